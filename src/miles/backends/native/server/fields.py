"""Read a JSON object field by field: what is missing or null gets its default, what is of a wrong kind is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from miles.backends.native.server.refusal import Refusal, malformed

LARGEST = 2**63 - 1


def read_json(body: bytes) -> Any:
    """The value in ``body``: strict JSON in UTF-8, with nothing in it that could not be written out again."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
        if b"\\ud" in body or b"\\uD" in body:  # an escape may be half of a pair
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # UnicodeError is a ValueError
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise malformed(f"The body is not valid JSON: {reason}.") from error
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class Fields:
    """The fields of one JSON object; ``where`` is its name, for complaints. ``malformed``: how wrong kinds are told."""

    def __init__(self, value: Any, where: str = "", *, malformed: bool = True) -> None:
        self.where = where
        self._malformed = malformed
        if not isinstance(value, Mapping):
            raise Refusal(f"{where or 'The body'} is {_shown(value)}, but must be an object.", malformed=malformed)
        self._value: Mapping[str, Any] = value

    def __contains__(self, name: str) -> bool:
        """Is it there, and not null?"""
        return self._value.get(name) is not None

    def __iter__(self) -> Any:
        return iter(self._value)

    def raw(self, name: str) -> Any:
        """As it is; None where it is missing."""
        return self._value.get(name)

    def refuse(self, name: str, must: str) -> Refusal:
        """The refusal to raise for a field that is not what it must be."""
        path = f"{self.where}.{name}" if self.where else name
        return Refusal(
            f"{path} is {_shown(self._value.get(name))}, but must be {must}.", malformed=self._malformed, param=path
        )

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
            raise self._outside(name, low, high)
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

    def within(self, name: str, default: float, holds: Callable[[float], bool], must: str) -> float:
        """A number in a range, told as ``must``."""
        value = self.number(name, default)
        if not holds(value):
            raise Refusal(f"{self._path(name)} is {value:g}, but must be {must}.", param=self._path(name))
        return value

    # -- collections ------------------------------------------------------------------------

    def object(self, name: str) -> Fields | None:
        value = self._value.get(name)
        return None if value is None else Fields(value, self._path(name), malformed=self._malformed)

    def array(self, name: str) -> list[Any] | None:
        value = self._value.get(name)
        if value is not None and not isinstance(value, list):
            raise self.refuse(name, "a list")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """One string, or a list of them."""
        value = self._value.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.refuse(name, "a string or a list of strings")
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._value.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(each) is int and abs(each) <= LARGEST for each in value):
            raise self.refuse(name, "a list of integers")
        return tuple(value)

    def _path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def _outside(self, name: str, low: int, high: int) -> Refusal:
        bounds = [f"at least {low}"] * (low > -LARGEST) + [f"at most {high}"] * (high < LARGEST)
        path = self._path(name)
        must = " and ".join(bounds) or "an integer of 64 bits"
        return Refusal(f"{path} is {_shown(self._value.get(name))}, but must be {must}.", param=path)


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


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
