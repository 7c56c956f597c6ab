"""Binary serialization of dataclasses and arrays: a JSON header followed by raw array data; nothing is executed.

    length of the header (uint32) | header, JSON | array | array | ...        each part begins at a multiple of 8

A message is a kind (string) and its content: registered types, numbers, strings, arrays, and tuples, lists and
mappings of these. A ``Codec`` decodes registered types only. It rejects anything else, and every object with missing
or unknown fields or field values of the wrong type. An image that occurs several times is written once.
"""

from __future__ import annotations

import json
import struct
import types as python_types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from math import prod
from pathlib import Path, PurePath
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from miles.core import media, types
from miles.core.errors import MilesError
from miles.core.types import Array

_LENGTH = struct.Struct("<I")
# Alignment that lets any array be read without a copy.
_ALIGNMENT = 8
# dtype kinds that may be sent: no objects, no text, no structures.
_NUMBERS = frozenset("biuf")
_JSON_TYPES = frozenset((str, int, float, bool, type(None)))
_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)  # it encodes trees built here


class SerializationError(MilesError):
    """A value that cannot be serialized, or bytes that are not a valid message."""


CORE_TYPES: tuple[type, ...] = (
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
    types.TimeSpan,
    types.TokenStats,
    media.ImageInput,
    media.PlacedImage,
)
"""All types of ``core.types`` and ``core.media``."""


class Codec:
    """Packs and unpacks messages of the registered ``types``: frozen dataclasses, named tuples and enums, by name.

    >>> codec = Codec(CORE_TYPES)
    >>> codec.unpack(codec.pack("version", types.Version(number=3)))
    ('version', Version(policy='actor', number=3))
    """

    def __init__(self, types: Iterable[type]) -> None:
        self._types: dict[str, type] = {}
        for cls in types:
            assert cls.__name__ not in self._types, f"two registered types are named {cls.__name__}"
            self._types[cls.__name__] = cls

    def pack(self, kind: str, content: Any = None) -> bytes:
        """Serialize one message."""
        parts = _MessageParts()
        header = _ENCODER.encode([kind, self._encode(content, parts)]).encode()
        header += b" " * (-(_LENGTH.size + len(header)) % _ALIGNMENT)
        pieces: list[Any] = [_LENGTH.pack(len(header)), header]
        for array in parts.arrays:
            pieces += (
                np.ascontiguousarray(array).data.cast("B") if array.size else b"",
                b"\0" * _padding(array.nbytes),
            )
        return b"".join(pieces)

    def unpack(self, data: bytes | bytearray | memoryview) -> tuple[str, Any]:
        """Return the kind and the content. Arrays are views of ``data`` if it is writable, else of a copy."""
        view = memoryview(data)
        if view.readonly:  # torch needs writable arrays
            view = memoryview(bytearray(view))
        reader = _MessageReader(view)
        try:
            kind, tree = json.loads(reader.header)
        except (ValueError, TypeError) as error:
            raise SerializationError(f"invalid message: its header cannot be parsed ({error})") from error
        if not isinstance(kind, str):
            raise SerializationError("invalid message: its header does not start with a kind")
        content = self._decode(tree, reader)
        reader.finish()
        return kind, content

    # -- encoding -----------------------------------------------------------------------------

    def _encode(self, value: Any, parts: _MessageParts) -> Any:
        if type(value) in _JSON_TYPES:  # the most frequent types first
            return value
        if type(value) is dict:
            return self._encode_mapping(cast("dict[Any, Any]", value), parts)
        if isinstance(value, np.ndarray | np.generic | bytes):
            return _encode_numbers(value, parts.arrays)
        if isinstance(value, Enum) or is_dataclass(value) or hasattr(value, "_fields"):
            return self._encode_object(value, parts)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple):
            return [self._encode(each, parts) for each in cast("tuple[Any, ...]", value)]
        if isinstance(value, list):
            return {"list": [self._encode(each, parts) for each in cast("list[Any]", value)]}
        if isinstance(value, Mapping):
            return self._encode_mapping(cast("Mapping[Any, Any]", value), parts)
        if isinstance(value, PurePath):
            return {"path": str(value)}
        raise SerializationError(
            f"a {type(value).__name__} cannot be serialized; use numbers, strings and arrays instead"
        )

    def _encode_mapping(self, value: Mapping[Any, Any], parts: _MessageParts) -> Any:
        pairs = [
            [key, each if type(each) in _JSON_TYPES else self._encode(each, parts)]
            if type(key) is str  # nearly all, and many: a call for each would take longer than its encoding
            else [self._encode(key, parts), self._encode(each, parts)]
            for key, each in value.items()
        ]
        return {"mapping": pairs}

    def _encode_object(self, value: Any, parts: _MessageParts) -> Any:
        name = type(value).__name__
        if self._types.get(name) is not type(value):
            raise SerializationError(f"a {name} cannot be serialized: it is not a registered type")
        if isinstance(value, Enum):
            return {"enum": name, "value": value.value}
        if isinstance(value, media.ImageInput):
            key = value.digest, value.num_features, value.source
            if key in parts.images:
                return {"image": parts.images[key]}
            parts.images[key] = len(parts.images)
        return {"type": name, "fields": {n: self._encode(getattr(value, n), parts) for n in _field_types(type(value))}}

    # -- decoding -----------------------------------------------------------------------------

    def _decode(self, tree: Any, reader: _MessageReader) -> Any:
        if isinstance(tree, list):
            return tuple(self._decode(each, reader) for each in cast("list[Any]", tree))
        if not isinstance(tree, dict):
            return tree
        match cast("dict[str, Any]", tree):
            case {"type": str(name), "fields": dict(inner), **rest} if not rest:
                return self._decode_object(name, cast("dict[str, Any]", inner), reader)
            case {"enum": str(name), "value": value, **rest} if not rest:
                return _construct(name, self._find_type(name), value)
            case {"list": list(inner), **rest} if not rest:
                return [self._decode(each, reader) for each in cast("list[Any]", inner)]
            case {"mapping": list(inner), **rest} if not rest:
                return dict(cast("tuple[Any, Any]", self._decode(pair, reader)) for pair in cast("list[Any]", inner))
            case leaf:
                return reader.decode_leaf(leaf)

    def _decode_object(self, name: str, inner: Mapping[str, Any], reader: _MessageReader) -> Any:
        cls = self._find_type(name)
        field_types = _field_types(cls)
        if wrong := sorted(inner.keys() ^ field_types.keys()):
            problem = "has the unknown" if wrong[0] in inner else "lacks the"
            raise SerializationError(
                f"a received {name} {problem} field {wrong[0]}; run the same version of Miles in all processes"
            )
        # Decode in encoding order, which is the order of the arrays.
        values = {field: self._decode(inner[field], reader) for field in inner}
        for field, value in values.items():
            if not _matches(value, field_types[field]):
                raise SerializationError(f"field {field} of a received {name} has the wrong type: {_describe(value)}")
        decoded = _construct(name, cls, **values)
        if isinstance(decoded, media.ImageInput):
            reader.images.append(decoded)
        return decoded

    def _find_type(self, name: str) -> type:
        if name not in self._types:
            raise SerializationError(f"a {name} was received, which is not a registered type")
        return self._types[name]


class _MessageParts:
    """What one message contains so far: the arrays behind its header, and the numbers of its different images."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.images: dict[tuple[str, int, str], int] = {}


class _MessageReader:
    """Reads the bytes of one message sequentially; ``images`` are those decoded so far."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.images: list[media.ImageInput] = []
        if len(view) < _LENGTH.size:
            raise SerializationError("invalid message: it ends before its header")
        (length,) = _LENGTH.unpack(view[: _LENGTH.size])
        self._offset = _LENGTH.size + length
        if self._offset > len(view):
            raise SerializationError("invalid message: it ends within its header")
        self.header = bytes(view[_LENGTH.size : self._offset])

    def decode_leaf(self, leaf: Mapping[str, Any]) -> Any:
        """Decode a node without inner nodes."""
        match leaf:
            case {"array": str(dtype), "shape": list(shape), **rest} if not rest:
                return self.array(dtype, cast("list[Any]", shape))
            case {"bytes": int(size), **rest} if not rest:
                return self.array("|u1", [size]).tobytes()
            case {"path": str(path), **rest} if not rest:
                return Path(path)
            case {"image": int(number), **rest} if not rest:
                return self.image(number)
            case other:
                raise SerializationError(f"invalid message: unknown node with keys {', '.join(map(str, other))}")

    def array(self, dtype_name: str, shape: Sequence[Any]) -> Array:
        try:
            dtype = np.dtype(dtype_name)
        except TypeError as error:
            raise SerializationError(f"invalid message: {dtype_name!r} is not a numeric dtype") from error
        if dtype.kind not in _NUMBERS or any(type(dim) is not int or dim < 0 for dim in shape):
            raise SerializationError(f"invalid message: no array has dtype {dtype_name!r} and shape {list(shape)}")
        size = prod(shape) * dtype.itemsize
        if self._offset + size > len(self._view):
            raise SerializationError("invalid message: it ends within an array")
        array = np.frombuffer(self._view, dtype, prod(shape), self._offset).reshape(shape)
        self._offset += size + _padding(size)
        return array

    def image(self, number: int) -> media.ImageInput:
        if not 0 <= number < len(self.images):
            raise SerializationError(f"invalid message: it refers to image {number} of {len(self.images)}")
        return self.images[number]

    def finish(self) -> None:
        if self._offset != len(self._view):
            raise SerializationError(f"invalid message: {len(self._view) - self._offset} bytes are left over")


def _padding(size: int) -> int:
    return -size % _ALIGNMENT


def _encode_numbers(value: Any, arrays: list[Array]) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        arrays.append(np.frombuffer(value, np.uint8))
        return {"bytes": len(value)}
    if value.dtype.kind not in _NUMBERS:
        raise SerializationError(f"an array of {value.dtype} cannot be serialized; use a numeric dtype")
    arrays.append(value)
    return {"array": value.dtype.str, "shape": value.shape}


def _construct(name: str, cls: Callable[..., Any], /, *values: Any, **fields: Any) -> Any:
    """Build the object; its own validation may reject the values."""
    try:
        return cls(*values, **fields)
    except (ValueError, TypeError) as error:
        raise SerializationError(f"a received {name} is invalid: {error}") from error


# -- fields and their types -----------------------------------------------------------------


@cache
def _field_types(cls: type) -> dict[str, Any]:
    """Return the fields of a type, in order, with their declared types."""
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)] if is_dataclass(cls) else list(cast(Any, cls)._fields)
    return {name: hints[name] for name in names}


def _matches(value: Any, hint: Any) -> bool:
    """Return whether a value has the declared type of a field."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, python_types.UnionType):
        return any(_matches(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if origin is np.ndarray:
        (scalar,) = get_args(inner[1])
        return isinstance(value, np.ndarray) and (scalar is Any or value.dtype == scalar)
    if origin is not None:
        return _matches_container(value, origin, inner)
    if hint is None:
        return value is None
    if hint in (int, float):
        return type(value) is int or (hint is float and type(value) is float)
    return isinstance(value, hint)


def _matches_container(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    if not isinstance(value, origin):
        return False
    if issubclass(origin, Mapping):
        return all(_matches(key, inner[0]) and _matches(each, inner[1]) for key, each in value.items())
    if origin is tuple and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(_matches, value, inner))
    return all(_matches(each, inner[0]) for each in value)


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    return f"a {type(value).__name__}"
