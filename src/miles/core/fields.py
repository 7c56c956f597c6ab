"""Read a JSON object field by field: what is missing or null gets its default, what is of a wrong kind is refused."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NoReturn, Self, TypeVar

from miles.core.errors import MilesError

LARGEST = 2**63 - 1

Refused = TypeVar("Refused", bound=MilesError)


def strict_json(body: bytes) -> Any:
    """The value in ``body``: strict JSON in UTF-8, with nothing in it that could not be written out again.

    ``ValueError`` says why it is none.
    """
    try:
        value = json.loads(body, parse_constant=_no_constant)
        if b"\\ud" in body or b"\\uD" in body:  # an escape may be half of a pair
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class JsonFields(ABC, Generic[Refused]):
    """The fields of one JSON object; ``where`` is its name, for complaints. A server says how it refuses."""

    def __init__(self, value: Any, where: str = "") -> None:
        self.where = where
        if not isinstance(value, Mapping):
            told = f"{where or 'The body'} is {shown(value)}, but must be an object."
            raise self.refusal(told, where or None, form=True)
        self._value: Mapping[str, Any] = value

    @abstractmethod
    def refusal(self, message: str, param: str | None, *, form: bool) -> Refused:
        """The error to raise. ``form``: the kind of value is wrong, and not its size alone."""

    def inner(self, value: Any, where: str) -> Self:
        """An object within this one, refused in the same way."""
        return type(self)(value, where)

    def __contains__(self, name: str) -> bool:
        """Is it there, and not null?"""
        return self._value.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def raw(self, name: str) -> Any:
        """As it is; None where it is missing."""
        return self._value.get(name)

    def all(self) -> dict[str, Any]:
        """Every field, as it is."""
        return dict(self._value)

    def path(self, name: str) -> str:
        """The field's name as seen from the body."""
        return f"{self.where}.{name}" if self.where else name

    def refuse(self, name: str, must: str, *, form: bool = True) -> Refused:
        """The refusal to raise for a field that is not what it must be."""
        path = self.path(name)
        return self.refusal(f"{path} is {shown(self._value.get(name))}, but must be {must}.", path, form=form)

    # -- scalars ----------------------------------------------------------------------------

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._value.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        value = self._value.get(name)
        if value is not None and not isinstance(value, str):
            raise self.refuse(name, "a string")
        return value

    def needed_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise self.refuse(name, "a string")
        return value

    def integer(self, name: str, default: int, *, low: int = -LARGEST, high: int = LARGEST) -> int:
        value = self.maybe_integer(name, low=low, high=high)
        return default if value is None else value

    def maybe_integer(self, name: str, *, low: int = -LARGEST, high: int = LARGEST) -> int | None:
        value = self._value.get(name)
        if value is None:
            return None
        whole = as_integer(value)
        if whole is None:
            raise self.refuse(name, "an integer")
        if not low <= whole <= high:
            bounds = [f"at least {low}"] * (low > -LARGEST) + [f"at most {high}"] * (high < LARGEST)
            raise self.refuse(name, " and ".join(bounds) or "an integer of 64 bits", form=False)
        return whole

    def number(self, name: str, default: float) -> float:
        value = self.maybe_number(name)
        return default if value is None else value

    def maybe_number(self, name: str) -> float | None:
        value = self._value.get(name)
        if value is None:
            return None
        number = as_number(value)
        if number is None:
            raise self.refuse(name, "a number")
        return number

    # -- collections ------------------------------------------------------------------------

    def object(self, name: str) -> Self | None:
        value = self._value.get(name)
        return None if value is None else self.inner(value, self.path(name))

    def needed_object(self, name: str) -> Self:
        return self.inner(self._value.get(name), self.path(name))

    def array(self, name: str) -> list[Any] | None:
        value = self._value.get(name)
        if value is not None and not isinstance(value, list):
            raise self.refuse(name, "a list")
        return value

    def objects(self, name: str) -> list[Self]:
        """A list of objects; none where it is missing."""
        path = self.path(name)
        return [self.inner(each, f"{path}[{i}]") for i, each in enumerate(self.array(name) or ())]

    def texts(self, name: str) -> tuple[str, ...]:
        """One string, or a list of them."""
        value = self._value.get(name)
        given = [value] if isinstance(value, str) else value
        if given is None:
            return ()
        if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
            raise self.refuse(name, "a string or a list of strings")
        return tuple(given)

    def integers(
        self, name: str, *, low: int = -LARGEST, high: int = LARGEST, what: str = "integers"
    ) -> tuple[int, ...]:
        value = self._value.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(each) is int and low <= each <= high for each in value):
            raise self.refuse(name, f"a list of {what}")
        return tuple(value)


def as_integer(value: Any) -> int | None:
    """A JSON number without a fraction; a boolean is none."""
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST:
        return int(value)
    return None


def as_number(value: Any) -> float | None:
    """A finite JSON number; a boolean is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e308:
        return None
    return float(value) if math.isfinite(value) else None


def shown(value: Any) -> str:
    """A value as a complaint names it."""
    if value is None:
        return "missing"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
