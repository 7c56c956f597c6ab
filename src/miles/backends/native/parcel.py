"""A message between ranks as bytes: a header that says what is where, and the arrays behind it; nothing is executed.

A message is a verb and its content: an order, or plain numbers, words, arrays, and tuples and mappings of these.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

import numpy as np

from miles.backends.native.order import Edits, Looks, Manner, Order, Scoring
from miles.core.types import Array

# The only types that are made out of bytes.
_NOUNS: Mapping[str, Callable[..., Any]] = {noun.__name__: noun for noun in (Order, Manner, Edits, Looks, Scoring)}
_LENGTH = struct.Struct("<I")
# Where the header and each array end, a multiple of this: any array can then be read where it lies.
_STEP = 8


def pack(verb: str, content: Any = None) -> bytes:
    """A message as bytes."""
    arrays: list[Array] = []
    header = json.dumps([verb, _flat(content, arrays)], separators=(",", ":")).encode()
    header += b" " * (-(_LENGTH.size + len(header)) % _STEP)
    pieces = [_LENGTH.pack(len(header)), header]
    for array in arrays:
        pieces += (array.tobytes(), b"\0" * (-array.nbytes % _STEP))
    return b"".join(pieces)


def unpack(data: bytes) -> tuple[str, Any]:
    """The verb and the content."""
    start = _LENGTH.size
    (length,) = _LENGTH.unpack(data[:start])
    verb, tree = json.loads(data[start : start + length])
    # Torch wants arrays it may write to.
    return verb, _grown(tree, bytearray(data), [start + length])


def _flat(value: Any, arrays: list[Array]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": value.dtype.str, "shape": value.shape}
    if is_dataclass(value):
        inner = {field.name: _flat(getattr(value, field.name), arrays) for field in fields(value)}
        return {"noun": type(value).__name__, "fields": inner}
    if isinstance(value, Mapping):
        return {"mapping": {key: _flat(each, arrays) for key, each in value.items()}}
    if isinstance(value, tuple):
        return [_flat(each, arrays) for each in value]
    return value


def _grown(tree: Any, data: bytearray, at: list[int]) -> Any:
    """What ``_flat`` took apart; ``at`` holds where the next array lies."""
    if isinstance(tree, list):
        return tuple(_grown(each, data, at) for each in tree)
    if not isinstance(tree, dict):
        return tree
    if "noun" in tree:
        return _NOUNS[tree["noun"]](**{name: _grown(each, data, at) for name, each in tree["fields"].items()})
    if "mapping" in tree:
        return {key: _grown(each, data, at) for key, each in tree["mapping"].items()}
    dtype, shape = np.dtype(tree["array"]), tuple(tree["shape"])
    array = np.frombuffer(data, dtype, prod(shape), at[0]).reshape(shape)
    at[0] += array.nbytes + -array.nbytes % _STEP
    return array
