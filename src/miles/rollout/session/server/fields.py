"""Read a JSON object field by field: what is missing or null gets its default, what is of a wrong kind is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from miles.rollout.session.server.refusal import Refusal

LARGEST = 2**63 - 1


def read_json(body: bytes) -> Any:
    """The value in ``body``: strict JSON in UTF-8, with nothing in it that could not be written out again."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
        if b"\\ud" in body or b"\\uD" in body:  # an escape may be half of a pair
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # UnicodeError is a ValueError
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refusal(f"The body is not valid JSON: {reason}.") from error
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class Fields:
    """The fields of one JSON object; ``where`` is its name, for complaints."""

    def __init__(self, value: Any, where: str = "") -> None:
        self.where = where
        if not isinstance(value, Mapping):
            raise Refusal(f"{where or 'The body'} is {shown(value)}, but must be an object.", param=where or None)
        self._value: Mapping[str, Any] = value

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

    def refuse(self, name: str, must: str) -> Refusal:
        """The refusal to raise for a field that is not what it must be."""
        path = self.path(name)
        return Refusal(f"{path} is {shown(self._value.get(name))}, but must be {must}.", param=path)

    def only(self, known: frozenset[str], what: str) -> None:
        """Refuse fields nobody would look at."""
        for name in self._value:
            if name not in known:
                raise Refusal(f"{what} has no {name}; it may have {', '.join(sorted(known))}.", param=self.path(name))

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

    def integer(self, name: str, *, low: int = -LARGEST, high: int = LARGEST) -> int | None:
        value = self._value.get(name)
        if value is None:
            return None
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if type(whole) is not int:
            raise self.refuse(name, "an integer")
        if not low <= whole <= high:
            bounds = [f"at least {low}"] * (low > -LARGEST) + [f"at most {high}"] * (high < LARGEST)
            raise self.refuse(name, " and ".join(bounds) or "an integer of 64 bits")
        return whole

    def number(self, name: str, holds: Callable[[float], bool] = math.isfinite, must: str = "a number") -> float | None:
        """A finite number in a range, told as ``must``; a boolean is none."""
        value = self._value.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e308
        if not is_number or not holds(float(value)):
            raise self.refuse(name, must)
        return float(value)

    # -- collections ------------------------------------------------------------------------

    def object(self, name: str) -> Fields | None:
        value = self._value.get(name)
        return None if value is None else Fields(value, self.path(name))

    def needed_object(self, name: str) -> Fields:
        return Fields(self._value.get(name), self.path(name))

    def array(self, name: str) -> list[Any] | None:
        value = self._value.get(name)
        if value is not None and not isinstance(value, list):
            raise self.refuse(name, "a list")
        return value

    def objects(self, name: str) -> list[Fields]:
        """A list of objects; none where it is missing."""
        path = self.path(name)
        return [Fields(each, f"{path}[{i}]") for i, each in enumerate(self.array(name) or ())]

    def texts(self, name: str) -> tuple[str, ...]:
        """One string, or a list of them; empty ones are left out."""
        value = self._value.get(name)
        given = [value] if isinstance(value, str) else value
        if given is None:
            return ()
        if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
            raise self.refuse(name, "a string or a list of strings")
        return tuple(each for each in given if each)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._value.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 2**31 for each in value):
            raise self.refuse(name, "a list of token ids")
        return tuple(value)


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
