"""Nouns as bytes: a JSON header that says what is where, and the arrays behind it; nothing is executed.

    length of the header (uint32) | header, JSON | array | array | ...        each part begins at a multiple of 8

A message is a verb and its content: nouns, plain numbers, words, arrays, and tuples, lists and mappings of these. A
``Codec`` knows which nouns may be made out of bytes. It refuses anything else, and every noun whose fields are not all
there, not its own, or not of the types they are declared with.
"""

from __future__ import annotations

import json
import struct
import types as kinds
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from math import prod
from pathlib import Path, PurePath
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from miles.core import types
from miles.core.errors import MilesError
from miles.core.types import Array

_LENGTH = struct.Struct("<I")
# Any array can be read where it lies.
_STEP = 8
# Numbers alone: no objects, no text, no structures.
_NUMBERS = frozenset("biuf")


class WireError(MilesError):
    """Something that cannot be sent, or bytes that are no message."""


NOUNS: tuple[type, ...] = (
    types.Version,
    types.Author,
    types.Span,
    types.Status,
    types.Prompt,
    types.Reward,
    types.Trajectory,
    types.Group,
    types.Sample,
    types.Batch,
    types.StepReport,
)
"""Every noun of the ground floor."""


class Codec:
    """Packs and unpacks messages of these ``nouns``: frozen dataclasses, named tuples and enums, known by their names.

    >>> codec = Codec(NOUNS)
    >>> codec.unpack(codec.pack("published", types.Version(number=3)))
    ('published', Version(policy='actor', number=3))
    """

    def __init__(self, nouns: Iterable[type]) -> None:
        self._nouns: dict[str, type] = {}
        for noun in nouns:
            assert noun.__name__ not in self._nouns, f"two nouns are called {noun.__name__}"
            self._nouns[noun.__name__] = noun

    def pack(self, verb: str, content: Any = None) -> bytes:
        """A message as bytes."""
        arrays: list[Array] = []
        header = json.dumps([verb, self._flat(content, arrays)], separators=(",", ":")).encode()
        header += b" " * (-(_LENGTH.size + len(header)) % _STEP)
        pieces: list[Any] = [_LENGTH.pack(len(header)), header]
        for array in arrays:
            pieces += (np.ascontiguousarray(array).data.cast("B") if array.size else b"", b"\0" * _gap(array.nbytes))
        return b"".join(pieces)

    def unpack(self, data: bytes | bytearray | memoryview) -> tuple[str, Any]:
        """The verb and the content. Arrays lie in ``data`` where that may be written to, else in a copy of it."""
        view = memoryview(data)
        if view.readonly:  # torch wants arrays it may write to
            view = memoryview(bytearray(view))
        parcel = _Parcel(view)
        try:
            verb, tree = json.loads(parcel.header)
        except (ValueError, TypeError) as error:
            raise WireError(f"these bytes are no message: their header is {error}") from error
        if not isinstance(verb, str):
            raise WireError("these bytes are no message: they do not begin with a verb")
        content = self._grown(tree, parcel)
        parcel.finish()
        return verb, content

    # -- taking apart -----------------------------------------------------------------------

    def _flat(self, value: Any, arrays: list[Array]) -> Any:
        if isinstance(value, np.ndarray | np.generic | bytes):
            return _flat_numbers(value, arrays)
        if isinstance(value, Enum) or is_dataclass(value) or hasattr(value, "_fields"):
            return self._flat_noun(value, arrays)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple):
            return [self._flat(each, arrays) for each in cast("tuple[Any, ...]", value)]
        if isinstance(value, list):
            return {"list": [self._flat(each, arrays) for each in cast("list[Any]", value)]}
        if isinstance(value, Mapping):
            pairs = cast("Mapping[Any, Any]", value).items()
            return {"mapping": [[self._flat(key, arrays), self._flat(each, arrays)] for key, each in pairs]}
        if isinstance(value, PurePath):
            return {"path": str(value)}
        raise WireError(f"a {type(value).__name__} cannot be sent to another process; make it of numbers and words")

    def _flat_noun(self, value: Any, arrays: list[Array]) -> Any:
        name = type(value).__name__
        if self._nouns.get(name) is not type(value):
            raise WireError(f"a {name} cannot be sent to another process: it is no noun that travels")
        if isinstance(value, Enum):
            return {"enum": name, "value": value.value}
        return {"noun": name, "fields": {n: self._flat(getattr(value, n), arrays) for n in _hints(type(value))}}

    # -- putting together -------------------------------------------------------------------

    def _grown(self, tree: Any, parcel: _Parcel) -> Any:
        if isinstance(tree, list):
            return tuple(self._grown(each, parcel) for each in cast("list[Any]", tree))
        if not isinstance(tree, dict):
            return tree
        match cast("dict[str, Any]", tree):
            case {"noun": str(name), "fields": dict(inner), **rest} if not rest:
                return self._grown_noun(name, cast("dict[str, Any]", inner), parcel)
            case {"enum": str(name), "value": value, **rest} if not rest:
                return _checked(name, self._known(name), value)
            case {"list": list(inner), **rest} if not rest:
                return [self._grown(each, parcel) for each in cast("list[Any]", inner)]
            case {"mapping": list(inner), **rest} if not rest:
                return dict(cast("tuple[Any, Any]", self._grown(pair, parcel)) for pair in cast("list[Any]", inner))
            case {"array": str(dtype), "shape": list(shape), **rest} if not rest:
                return parcel.array(dtype, cast("list[Any]", shape))
            case {"bytes": int(size), **rest} if not rest:
                return parcel.array("|u1", [size]).tobytes()
            case {"path": str(path), **rest} if not rest:
                return Path(path)
            case other:
                raise WireError(f"these bytes are no message: nothing is made of {' and '.join(map(str, other))}")

    def _grown_noun(self, name: str, inner: Mapping[str, Any], parcel: _Parcel) -> Any:
        noun = self._known(name)
        hints = _hints(noun)
        if odd := sorted(inner.keys() ^ hints.keys()):
            what = "has no" if odd[0] in inner else "lacks its"
            raise WireError(f"a {name} that was sent {what} field {odd[0]}; do all processes run the same Miles?")
        # In the order in which they were taken apart: their arrays lie so.
        found = {field: self._grown(inner[field], parcel) for field in inner}
        for field, value in found.items():
            if not _is(value, hints[field]):
                raise WireError(f"a {name} that was sent has a {field} of another type: {_described(value)}")
        return _checked(name, noun, **found)

    def _known(self, name: str) -> type:
        if name not in self._nouns:
            raise WireError(f"a {name} was sent, which is no noun that travels")
        return self._nouns[name]


class _Parcel:
    """The bytes of a message, read from front to back."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        if len(view) < _LENGTH.size:
            raise WireError("these bytes are no message: they end before their header")
        (length,) = _LENGTH.unpack(view[: _LENGTH.size])
        self._at = _LENGTH.size + length
        if self._at > len(view):
            raise WireError("these bytes are no message: they end within their header")
        self.header = bytes(view[_LENGTH.size : self._at])

    def array(self, kind: str, shape: Sequence[Any]) -> Array:
        try:
            dtype = np.dtype(kind)
        except TypeError as error:
            raise WireError(f"these bytes are no message: {kind!r} is no type of numbers") from error
        if dtype.kind not in _NUMBERS or any(type(side) is not int or side < 0 for side in shape):
            raise WireError(f"these bytes are no message: an array of {kind!r} and shape {list(shape)} is none")
        size = prod(shape) * dtype.itemsize
        if self._at + size > len(self._view):
            raise WireError("these bytes are no message: they end within an array")
        array = np.frombuffer(self._view, dtype, prod(shape), self._at).reshape(shape)
        self._at += size + _gap(size)
        return array

    def finish(self) -> None:
        if self._at != len(self._view):
            raise WireError(f"these bytes are no message: {len(self._view) - self._at} of them are of no use")


def _gap(size: int) -> int:
    return -size % _STEP


def _flat_numbers(value: Any, arrays: list[Array]) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        arrays.append(np.frombuffer(value, np.uint8))
        return {"bytes": len(value)}
    if value.dtype.kind not in _NUMBERS:
        raise WireError(f"an array of {value.dtype} cannot be sent to another process; make it one of numbers")
    arrays.append(value)
    return {"array": value.dtype.str, "shape": value.shape}


def _checked(name: str, noun: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """A noun refuses what does not fit together."""
    try:
        return noun(*values, **named)
    except (ValueError, TypeError) as error:
        raise WireError(f"a {name} that was sent is none: {error}") from error


# -- fields and their types -----------------------------------------------------------------


@cache
def _hints(noun: type) -> dict[str, Any]:
    """The fields of a noun, in order, and what each may hold."""
    hints = get_type_hints(noun)
    names = [field.name for field in fields(noun)] if is_dataclass(noun) else list(cast(Any, noun)._fields)
    return {name: hints[name] for name in names}


def _is(value: Any, hint: Any) -> bool:
    """Does a value have the type a field is declared with?"""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, kinds.UnionType):
        return any(_is(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if origin is np.ndarray:
        (number,) = get_args(inner[1])
        return isinstance(value, np.ndarray) and (number is Any or value.dtype == number)
    if origin is not None:
        return _holds(value, origin, inner)
    if hint is None:
        return value is None
    if hint in (int, float):
        return type(value) is int or (hint is float and type(value) is float)
    return isinstance(value, hint)


def _holds(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    if not isinstance(value, origin):
        return False
    if issubclass(origin, Mapping):
        return all(_is(key, inner[0]) and _is(each, inner[1]) for key, each in value.items())
    if origin is tuple and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(_is, value, inner))
    return all(_is(each, inner[0]) for each in value)


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    return f"a {type(value).__name__}"
