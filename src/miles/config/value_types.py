"""Value types of options: convert command-line words or file values, and check choices and ranges."""

import json
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, Union, cast, get_args, get_origin


class InvalidValue(Exception):
    """A value that an option cannot take; the message is the end of a sentence that starts with the option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRange:
    """Bounds of a number; ``or_value`` is allowed outside them as well."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    or_value: float | None = None

    def contains(self, value: float) -> bool:
        if self.or_value is not None and value == self.or_value:
            return True
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def check(self, value: float) -> None:
        """Raise InvalidValue when ``value`` is outside."""
        if not self.contains(value):
            raise InvalidValue(f"must be {self}, not {format_value(value)}")

    def __str__(self) -> str:
        bounds = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        text = " and ".join(f"{word} {format_value(bound)}" for word, bound in bounds.items() if bound is not None)
        return text + (f", or {format_value(self.or_value)}" if self.or_value is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """The type of an option: a scalar or a list of it (``many``), optionally restricted to ``choices`` or None."""

    scalar: type
    many: bool = False
    optional: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def description(self) -> str:
        """The accepted values in words."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        singular, plural = _DESCRIPTIONS[self.scalar]
        return plural if self.many else singular

    def from_words(self, words: Sequence[str]) -> Any:
        """The value of a flag followed by ``words``."""
        if self.scalar is bool:
            if words:
                raise InvalidValue(f"takes no value, but was given {words[0]!r}")
            return True
        if not words:
            raise InvalidValue(f"needs a value: {self.description}")
        if self.many:
            return tuple(self._from_text(word) for word in words)
        if len(words) > 1:
            raise InvalidValue(f"takes one value, but was given {len(words)}: {' '.join(words)}")
        return self._from_text(words[0])

    def from_file(self, value: Any) -> Any:
        """The value of a key in a file; None only where the option is optional, otherwise exactly its own type."""
        if value is None and self.optional:
            return None
        if not self.many:
            return self._from_value(value)
        if self.scalar is str and isinstance(value, str):  # a single text needs no brackets
            return (self._from_value(value),)
        if not isinstance(value, list):
            raise InvalidValue(f"takes {self.description} in brackets, not {_describe_file_value(value)}")
        return tuple(self._from_value(item) for item in cast(list[Any], value))

    def _from_text(self, text: str) -> Any:
        if not text:
            raise InvalidValue(f"was given an empty value, but takes {self.description} (is a shell variable unset?)")
        try:
            return self._check_choices(_PARSERS[self.scalar](text))
        except ValueError:
            raise InvalidValue(f"takes {self.description}, not {text!r}") from None

    def _from_value(self, value: Any) -> Any:
        if self.scalar is float and (type(value) is int or (isinstance(value, str) and _EXPONENT.fullmatch(value))):
            value = float(value)
        if self.scalar is dict and isinstance(value, str):
            return self._from_text(value)
        if type(value) is not self.scalar or (self.scalar is float and not math.isfinite(cast(float, value))):
            raise InvalidValue(f"takes {self.description}, not {_describe_file_value(value)}")
        if value == "":
            raise InvalidValue(f"is empty, but takes {self.description}")
        return self._check_choices(value)

    def _check_choices(self, value: Any) -> Any:
        if self.choices and value not in self.choices:
            close = get_close_matches(str(value), [str(c) for c in self.choices], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InvalidValue(f"takes {self.description}, not {str(value)!r}{hint}")
        return value


def value_type_from_annotation(annotation: Any) -> ValueType:
    """Map an annotation to its type: a scalar, a Literal, ``tuple[T, ...]``, a dict, or one of these or None."""
    optional = False
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
        optional = True
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ValueType(scalar=type(inner[0]), choices=inner, optional=optional)
    if origin is tuple:
        each = value_type_from_annotation(inner[0])
        return ValueType(scalar=each.scalar, choices=each.choices, many=True, optional=optional)
    scalar = dict if origin in (dict, Mapping) or annotation is dict else annotation
    assert scalar in _PARSERS or scalar is bool, f"an option cannot be of type {annotation}"
    return ValueType(scalar=scalar, optional=optional)


def format_value(value: Any) -> str:
    """A value as a user would type it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) if value else "none"
    if isinstance(value, Mapping):
        return str(dict(value)) if value else "none"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _parse_json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return cast(dict[str, Any], value)


# YAML reads 1e-6 as text, since its numbers need a dot.
_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")
_PARSERS: Mapping[type, Callable[[str], Any]] = {int: int, float: _parse_finite, str: str, dict: _parse_json_object}
_DESCRIPTIONS: Mapping[type, tuple[str, str]] = {
    bool: ("true or false", "true or false values"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    dict: ("a JSON object like '{\"key\": 1}'", "JSON objects"),
}


def _describe_file_value(value: Any) -> str:
    """A value of a file as its author wrote it, with its type where the type is wrong."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, list):
        return "a list"
    return "a table" if isinstance(value, dict) else f"{value}"
