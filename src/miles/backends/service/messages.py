"""Messages of the Tinker API that travel as protobuf: training requests in, training and sampling results out.

Everything else of the API is JSON. Unknown fields are ignored, as protobuf wants it.

Shapes: N tokens of a datum, K targets of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.backends.service.protobuf import (
    read_fields,
    to_double,
    to_signed,
    write_bytes,
    write_double,
    write_text,
    write_varint,
)
from miles.rollout.serving.errors import RequestError

__all__ = [
    "Datum",
    "SampledTokens",
    "TopTokens",
    "TrainRequest",
    "decode_train_request",
    "encode_array_record",
    "encode_sample_result",
    "encode_train_result",
]

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_FLOAT32, _INT64 = 1, 2
_INT32 = 3
_DTYPES = {_FLOAT32: np.dtype(np.float32), _INT64: np.dtype(np.int64), _INT32: np.dtype(np.int32)}
_STOP, _LENGTH = 0, 1
# Tokens and log-probs of a position that has fewer than the requested top tokens.
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """A sequence to train on: its tokens, and what the loss needs of each of them."""

    tokens_N: Ints
    inputs: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """A forward pass over some data, with or without a backward pass."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def decode_train_request(body: bytes) -> TrainRequest:
    """Decode the body of ``forward_backward``; RequestError if it is no such message."""
    texts = {1: "", 4: ""}
    numbers = {2: 0, 6: 0}
    data: list[Datum] = []
    plain: dict[str, float | str] = {}
    typed: dict[str, float | str] = {}
    for number, value in read_fields(body):
        if number in texts:
            texts[number] = _text(value)
        elif number in numbers:
            numbers[number] = _int(value)
        elif number == 3:
            data.append(_decode_datum(_bytes(value), len(data)))
        elif number == 5:
            key, content = _decode_entry(_bytes(value))
            plain[key] = to_double(content) if isinstance(content, int) else 0.0
        elif number == 7:
            key, content = _decode_entry(_bytes(value))
            typed[key] = _decode_config_value(b"" if isinstance(content, int) else content)
    return TrainRequest(
        model_id=texts[1],
        seq_id=numbers[2],
        data=tuple(data),
        loss_fn=texts[4],
        loss_config=typed or plain,
        forward_only=bool(numbers[6]),
    )


def _decode_datum(body: bytes, index: int) -> Datum:
    tokens: list[NDArray[Any]] = []
    inputs: dict[str, NDArray[Any]] = {}
    for number, value in read_fields(body):
        if number == 1:
            tokens.append(_decode_chunk(_bytes(value), index))
        elif number == 2:
            key, content = _decode_entry(_bytes(value))
            inputs[key] = _decode_tensor(b"" if isinstance(content, int) else content, f"{key} of datum {index}")
    joined = np.concatenate(tokens) if tokens else np.zeros(0, np.int64)
    return Datum(tokens_N=joined.astype(np.int64), inputs=inputs)


def _decode_chunk(body: bytes, index: int) -> NDArray[Any]:
    for number, value in read_fields(body):
        if number == 1:
            for inner, content in read_fields(_bytes(value)):
                if inner == 1:
                    return _array(_bytes(content), np.dtype(np.int32), f"the tokens of datum {index}")
            return np.zeros(0, np.int32)
        raise RequestError(f"Datum {index} has a chunk that is not text; send tokens only.", status=422)
    return np.zeros(0, np.int32)


def _decode_tensor(body: bytes, what: str) -> NDArray[Any]:
    """Decode a tensor; of a sparse one (CSR) all entries that are not listed are 0."""
    dense, sparse = b"", None
    dtype, shape = 0, list[int]()
    for number, value in read_fields(body):
        if number == 1:
            dense = _bytes(value)
        elif number == 2:
            sparse = {inner: _bytes(content) for inner, content in read_fields(_bytes(value))}
        elif number == 3:
            dtype = _int(value)
        elif number == 4:
            shape += [to_signed(_int(value))] if isinstance(value, int) else _packed_varints(value)
    if dtype not in _DTYPES:
        raise RequestError(f"{what} has the unknown dtype {dtype}; send float32 or int64.", status=422)
    if sparse is not None:
        return _densify(sparse, _DTYPES[dtype], shape, what)
    array = _array(dense, _DTYPES[dtype], what)
    if shape and (min(shape) < 0 or int(np.prod(shape)) != array.size):
        raise RequestError(f"{what} has {array.size} values, which are not the shape {tuple(shape)}.", status=422)
    return array.reshape(shape) if shape else array


def _densify(parts: Mapping[int, bytes], dtype: np.dtype[Any], shape: Sequence[int], what: str) -> NDArray[Any]:
    values = _array(parts.get(1, b""), dtype, what)
    starts, columns = (_array(parts.get(i, b""), np.dtype(np.int64), what) for i in (2, 3))
    is_valid = (
        len(shape) == 2
        and min(shape) >= 0
        and len(starts) == shape[0] + 1
        and len(columns) == len(values)
        and bool((np.diff(starts) >= 0).all())
        and (int(starts[0]), int(starts[-1])) == (0, len(values))
        and (not len(columns) or 0 <= int(columns.min()) <= int(columns.max()) < shape[1])
    )
    if not is_valid:
        raise RequestError(f"{what} is not a valid sparse (CSR) tensor of its shape {tuple(shape)}.", status=422)
    out = np.zeros(tuple(shape), dtype)
    out[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return out


def _packed_varints(body: bytes) -> list[int]:
    # A packed list is varints without tags; a tag of field 1 before each makes it a message.
    values: list[int] = []
    value = shift = 0
    for byte in body:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            values.append(to_signed(value))
            value = shift = 0
    return values


def _decode_entry(body: bytes) -> tuple[str, int | bytes]:
    """Decode an entry of a map: its key and its value."""
    key, found = "", b""
    for number, value in read_fields(body):
        if number == 1:
            key = _text(value)
        elif number == 2:
            found = value
    return key, found


def _decode_config_value(body: bytes) -> float | str:
    for number, value in read_fields(body):
        return to_double(_int(value)) if number == 1 else _text(value)
    return 0.0


def _array(content: bytes, dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    if len(content) % dtype.itemsize:
        raise RequestError(f"{what} has {len(content)} bytes, which are no array of {dtype}.", status=422)
    return np.frombuffer(content, dtype)


def _int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise RequestError("The body is not a valid protobuf message: a number has the form of a text.", malformed=True)
    return value


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise RequestError("The body is not a valid protobuf message: a text has the form of a number.", malformed=True)
    return value


def _text(value: int | bytes) -> str:
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError as error:
        raise RequestError("The body is not a valid protobuf message: a text is not UTF-8.", malformed=True) from error


# -- results --------------------------------------------------------------------------------------


def encode_array_record(outputs: Sequence[Mapping[str, Floats]]) -> bytes:
    """Encode the outputs of some data; each has the same names, and arrays [N] or [N, K] with one K per name."""
    record = write_text(1, "ArrayRecord")
    for name in outputs[0] if outputs else ():
        arrays = [np.ascontiguousarray(output[name], np.float32) for output in outputs]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype(np.int64)
        trailing = b"".join(write_varint(4, size) for size in arrays[0].shape[1:])
        tensor = write_bytes(1, b"".join(array.tobytes() for array in arrays)) + write_bytes(2, offsets.tobytes())
        record += write_bytes(2, write_text(1, name) + write_bytes(2, tensor + write_varint(3, _FLOAT32) + trailing))
    return record + write_varint(3, len(outputs))


def encode_train_result(records: Sequence[bytes], metrics: Mapping[str, float]) -> bytes:
    """Encode the result of a training request from the records of its parts."""
    result = write_text(1, "ArrayRecord") + b"".join(write_bytes(2, record) for record in records)
    return result + b"".join(
        write_bytes(3, write_text(1, name) + write_double(2, value)) for name, value in metrics.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """The most likely tokens of some positions and their log-probs; a position may have none."""

    positions: Sequence[Sequence[tuple[int, float]]]
    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """A sampled sequence."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    top: TopTokens | None = None


def encode_sample_result(
    sequences: Sequence[SampledTokens],
    *,
    prompt_logprobs: Sequence[float | None] | None = None,
    top_prompt: TopTokens | None = None,
    target_logprobs: Floats | None = None,
    cached_tokens: int = 0,
) -> bytes:
    """Encode the result of a sampling request; a position without a log-prob is NaN."""
    out = b"".join(write_bytes(1, _encode_sequence(sequence)) for sequence in sequences)
    if prompt_logprobs is not None:
        values = np.array([np.nan if value is None else value for value in prompt_logprobs], np.float32)
        out += write_bytes(2, values.tobytes())
    if top_prompt is not None:
        out += write_bytes(3, _encode_top(top_prompt))
    out += write_varint(4, cached_tokens)
    if target_logprobs is not None:
        shape = b"".join(write_varint(4, size) for size in target_logprobs.shape)
        dense = write_bytes(1, np.ascontiguousarray(target_logprobs, np.float32).tobytes())
        out += write_bytes(5, dense + write_varint(3, _FLOAT32) + shape)
    return out


def _encode_sequence(sequence: SampledTokens) -> bytes:
    out = write_varint(1, _STOP if sequence.stopped else _LENGTH)
    out += write_bytes(2, np.array(sequence.tokens, np.int32).tobytes())
    out += write_bytes(3, np.array(sequence.logprobs, np.float32).tobytes())
    return out if sequence.top is None else out + write_bytes(4, _encode_top(sequence.top))


def _encode_top(top: TopTokens) -> bytes:
    tokens_NK = np.full((len(top.positions), top.k), _NO_TOKEN, np.int32)
    logprobs_NK = np.full(tokens_NK.shape, _NO_LOGPROB, np.float32)
    for row, found in enumerate(top.positions):
        for column, (token, logprob) in enumerate(found[: top.k]):
            tokens_NK[row, column] = token
            logprobs_NK[row, column] = logprob
    sizes = write_varint(3, top.k) + write_varint(4, len(top.positions))
    return write_bytes(1, tokens_NK.tobytes()) + write_bytes(2, logprobs_NK.tobytes()) + sizes
