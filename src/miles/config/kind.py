"""What kind of value a knob takes: how words of a command line, or a value in a file, become one."""

import json
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, Union, cast, get_args, get_origin


class Misfit(Exception):
    """A value that is not of its knob's kind; the message says what is wanted and what was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A knob's type: one scalar or many, perhaps one of ``choices``, perhaps absent."""

    scalar: type
    many: bool = False
    optional: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def wanted(self) -> str:
        """What it takes, in words."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        one, several = _WORDS[self.scalar]
        return several if self.many else one

    def from_words(self, words: Sequence[str]) -> Any:
        """The value of a flag followed by ``words``."""
        if self.scalar is bool:
            if words:
                raise Misfit(f"takes no value, but was given {words[0]!r}")
            return True
        if not words:
            raise Misfit(f"needs a value: {self.wanted}")
        if self.many:
            return tuple(self._from_text(word) for word in words)
        if len(words) > 1:
            raise Misfit(f"takes one value, but was given {len(words)}: {' '.join(words)}")
        return self._from_text(words[0])

    def from_file(self, value: Any) -> Any:
        """The value of a key in a file; only ``None`` where it may be absent, and only its own type."""
        if value is None and self.optional:
            return None
        if not self.many:
            return self._from_value(value)
        if self.scalar is str and isinstance(value, str):  # one text needs no brackets
            return (self._from_value(value),)
        if not isinstance(value, list):
            raise Misfit(f"takes {self.wanted} in brackets, not {_named(value)}")
        return tuple(self._from_value(item) for item in cast(list[Any], value))

    def _from_text(self, text: str) -> Any:
        if not text:
            raise Misfit(f"was given an empty value, but takes {self.wanted} (is a shell variable unset?)")
        try:
            return self._chosen(_READERS[self.scalar](text))
        except ValueError:
            raise Misfit(f"takes {self.wanted}, not {text!r}") from None

    def _from_value(self, value: Any) -> Any:
        if self.scalar is float and (type(value) is int or (isinstance(value, str) and _EXPONENT.fullmatch(value))):
            value = float(value)
        if self.scalar is dict and isinstance(value, str):
            return self._from_text(value)
        if type(value) is not self.scalar or (self.scalar is float and not math.isfinite(cast(float, value))):
            raise Misfit(f"takes {self.wanted}, not {_named(value)}")
        if value == "":
            raise Misfit(f"is empty, but takes {self.wanted}")
        return self._chosen(value)

    def _chosen(self, value: Any) -> Any:
        if self.choices and value not in self.choices:
            close = get_close_matches(str(value), [str(c) for c in self.choices], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise Misfit(f"takes {self.wanted}, not {str(value)!r}{hint}")
        return value


def kind_of(annotation: Any) -> Kind:
    """The kind of a field's type: a scalar, a Literal, ``tuple[T, ...]``, a dict, or one of these or None."""
    optional = False
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
        optional = True
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return Kind(scalar=type(inner[0]), choices=inner, optional=optional)
    if origin is tuple:
        each = kind_of(inner[0])
        return Kind(scalar=each.scalar, choices=each.choices, many=True, optional=optional)
    scalar = dict if origin in (dict, Mapping) or annotation is dict else annotation
    assert scalar in _READERS or scalar is bool, f"no knob can be of type {annotation}"
    return Kind(scalar=scalar, optional=optional)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return cast(dict[str, Any], value)


# YAML reads 1e-6 as text, since its numbers need a dot.
_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")
_READERS: Mapping[type, Callable[[str], Any]] = {int: int, float: _finite, str: str, dict: _json_object}
_WORDS: Mapping[type, tuple[str, str]] = {
    bool: ("true or false", "true or false values"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    dict: ("a JSON object like '{\"key\": 1}'", "JSON objects"),
}


def _named(value: Any) -> str:
    """A file's value as its author wrote it, with its type where that is the point."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, list):
        return "a list"
    return "a table" if isinstance(value, dict) else f"{value}"
