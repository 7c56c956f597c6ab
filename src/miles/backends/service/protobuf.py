"""Protobuf wire format: read and write the fields of a message, without a schema compiler.

A message is a sequence of (field number, wire type) tags with values: varints (0), 8 bytes (1), lengths with bytes (2)
and 4 bytes (5). The field numbers of the messages are in ``messages``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from miles.rollout.serving.errors import RequestError

__all__ = ["Value", "read_fields", "write_bytes", "write_double", "write_text", "write_varint"]

Value = int | bytes
"""A field's value: the integer of a varint or of fixed bytes, or the bytes of a text, an array or a message."""

_VARINT, _FIXED64 = 0, 1
_BYTES, _FIXED32 = 2, 5
_MAX_VARINT_BYTES = 10


def read_fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the number and the value of every field, in the order of the message; RequestError if it is damaged.

    >>> list(read_fields(write_varint(1, 300) + write_text(2, "a")))
    [(1, 300), (2, b'a')]
    """
    position, end = 0, len(message)
    while position < end:
        tag, position = _read_varint(message, position)
        kind = tag & 7
        if kind == _VARINT:
            value, position = _read_varint(message, position)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, position = _read_varint(message, position)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise _damage_error()
        if position + size > end:
            raise _damage_error()
        content = message[position : position + size]
        yield tag >> 3, content if kind == _BYTES else int.from_bytes(content, "little")
        position += size


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for number in range(_MAX_VARINT_BYTES):
        if position >= len(message):
            raise _damage_error()
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
    raise _damage_error()


def _damage_error() -> RequestError:
    return RequestError("The body is not a valid protobuf message.", malformed=True)


def to_signed(value: int) -> int:
    """Return a varint as a signed 64-bit integer."""
    return value - (1 << 64) if value >= 1 << 63 else value


def to_double(value: int) -> float:
    """Return the 8 bytes of a field as a floating-point number."""
    return float(struct.unpack("<d", value.to_bytes(8, "little"))[0])


def _encode_varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def write_varint(number: int, value: int) -> bytes:
    """Return a field with an integer, a boolean or an enumerated value."""
    return _encode_varint(number << 3 | _VARINT) + _encode_varint(value)


def write_bytes(number: int, content: bytes) -> bytes:
    """Return a field with bytes, or with the bytes of a message."""
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(content)) + content


def write_text(number: int, text: str) -> bytes:
    """Return a field with a text."""
    return write_bytes(number, text.encode())


def write_double(number: int, value: float) -> bytes:
    """Return a field with a floating-point number of 8 bytes."""
    return _encode_varint(number << 3 | _FIXED64) + struct.pack("<d", value)
