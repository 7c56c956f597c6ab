"""Quantization of weights and activations in torch: the reference that kernels, checkpoints and trainer are held to.

Shapes: E stacked matrices (may be absent), N rows, K columns, n and k blocks of rows and columns; T rows of an
activation.

A parameter of the decoder may be several weights of the checkpoint, concatenated by rows (``segments``): each is
quantized on its own, so that its bytes are those of the checkpoint's tensor. Only the global scale of NVFP4 is shared.
How each family rounds, and what becomes of zeros, infinities and NaN, is in ``fp8.py``, ``microscaling.py`` and
``integer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from miles.core.errors import UsageError
from miles.precision.e8m0 import decode_e8m0
from miles.precision.formats import WeightFormat
from miles.precision.fp8 import E4M3_MAX, expand_rows, quantize_fp8, quantize_rows_fp8
from miles.precision.integer import decode_integers, quantize_asymmetric, quantize_symmetric, unpack_nibbles
from miles.precision.microscaling import (
    decode_e2m1,
    nvfp4_global_scale,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
)
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor

__all__ = [
    "E4M3_MAX",
    "dequantize",
    "dequantize_activation",
    "packed_layout",
    "quantize",
    "quantize_activation",
    "row_block",
]

_SCALE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "e8m0": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}
_DATA_DTYPES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8, "int8": torch.int8, "int4": torch.uint8}


def quantize(
    weight: Tensor,
    format: WeightFormat,
    segments: Sequence[int] | None = None,
    parts: int = 1,
    *,
    global_scale: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize a weight [N, K] or a stack [E, N, K]; ``segments`` are the rows of the weights it is fused of.

    Stored scales can be sharded into ``parts`` (see ``row_block``).
    ``global_scale`` (NVFP4, [] or [E]) is that of the whole fused weight where ``weight`` is only a part of it.
    """
    rows, columns = weight.shape[-2:]
    _check_columns(format, columns)
    lengths = (rows,) if segments is None else tuple(segments)
    assert sum(lengths) == rows, "the segments of a fused weight must add up to its rows"
    if format.element == "e4m3" and format.scale == "float32":
        data, scale = quantize_fp8(weight, format, lengths)
        block = row_block(format, rows, lengths, parts)
        return QuantizedTensor(format, data, scale if block != 1 else expand_rows(scale, format, lengths), block)
    if format.element == "e4m3":
        return QuantizedTensor(format, *quantize_mxfp8(weight), row_block=1)
    if format.element == "e2m1" and not format.global_scale:
        return QuantizedTensor(format, *quantize_mxfp4(weight), row_block=1)
    if format.element == "e2m1":
        shared = nvfp4_global_scale(weight.abs().amax((-2, -1))) if global_scale is None else global_scale
        packed = quantize_nvfp4(weight, shared[..., None, None])
        return QuantizedTensor(format, *packed, row_block=1, global_scale=shared)
    if format.zero_point:
        data, scale, zero = quantize_asymmetric(weight, format.columns or columns)
        return QuantizedTensor(format, data, scale, row_block=1, zero=zero)
    return QuantizedTensor(format, *quantize_symmetric(weight, format.bits, format.columns or columns), row_block=1)


def dequantize(packed: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the weight: multiplied in float32 (by a global scale last) and rounded once to ``dtype``."""
    rows, columns = packed.shape[-2:]
    scale = decode_e8m0(packed.scale) if packed.format.scale == "e8m0" else packed.scale.float()
    wide = _elements(packed) * _expand_blocks(scale, packed, rows, columns)
    return (wide if packed.global_scale is None else wide * packed.global_scale[..., None, None]).to(dtype)


def quantize_activation(x_TK: Tensor, format: WeightFormat) -> QuantizedActivation:
    """Quantize each row by itself, so that the result does not depend on other rows."""
    assert format.quantizes_activations, f"{format.name} keeps activations as they are"
    columns = format.activation_columns or x_TK.shape[-1]
    if format.scale == "e8m0":
        _check_columns(format, x_TK.shape[-1])
        data_TK, byte_TK = quantize_mxfp8(x_TK)
        return QuantizedActivation(data_TK, decode_e8m0(byte_TK), columns, x_TK.dtype)
    return QuantizedActivation(*quantize_rows_fp8(x_TK, format), columns, x_TK.dtype)


def dequantize_activation(x: QuantizedActivation) -> Tensor:
    """Return the rows in float32."""
    scale_TK = x.scale.repeat_interleave(x.columns, -1)[..., : x.data.shape[-1]]
    return x.data.float() * scale_TK


def packed_layout(
    format: WeightFormat, shape: Sequence[int], segments: Sequence[int] | None = None, parts: int = 1
) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each packed tensor of a weight, by its suffix ("" is the values)."""
    *stack, rows, columns = shape
    _check_columns(format, columns)
    scales = (*stack, -(-rows // row_block(format, rows, segments, parts)), format.scale_shape(rows, columns)[1])
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "": ((*stack, rows, columns * format.bits // 8), _DATA_DTYPES[format.element]),
        "_scale": (scales, _SCALE_DTYPES[format.scale]),
    }
    if format.zero_point:
        layout["_zero"] = (scales, torch.uint8)
    if format.global_scale:
        layout["_global_scale"] = (tuple(stack), torch.float32)
    return layout


def row_block(format: WeightFormat, rows: int, segments: Sequence[int] | None = None, parts: int = 1) -> int:
    """Return how many rows share a stored scale (see ``WeightFormat.row_block``)."""
    return format.row_block(rows, segments, parts)


def _check_columns(format: WeightFormat, columns: int) -> None:
    """Microscaling groups are whole; two 4-bit values share a byte. Other blocks and groups may be partial."""
    whole = format.columns if format.scale in ("e8m0", "e4m3") else 2 if format.bits == 4 else 1
    if whole and columns % whole:
        raise UsageError(
            f"{format.name} needs the input size of a layer to be a multiple of {whole}, but one has {columns}; "
            f"keep that layer in bf16 or choose another precision."
        )


def _elements(packed: QuantizedTensor) -> Tensor:
    """The elements in float32, before any scale."""
    if packed.format.element == "e2m1":
        return decode_e2m1(unpack_nibbles(packed.data))
    if packed.format.element == "e4m3":
        return packed.data.float()
    zero = None if packed.zero is None else _expand_blocks(packed.zero, packed, *packed.shape[-2:])
    return decode_integers(packed.data, packed.format.bits, zero)


def _expand_blocks(scale: Tensor, packed: QuantizedTensor, rows: int, columns: int) -> Tensor:
    """One scale for each value."""
    by_row = scale.repeat_interleave(packed.row_block, -2)[..., :rows, :] if packed.row_block != 1 else scale
    return by_row.repeat_interleave(packed.column_block, -1)[..., :columns]
