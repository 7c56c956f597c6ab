"""Quantization of weights and activations in torch: the reference that kernels, checkpoints and trainer are held to.

Shapes: E stacked matrices (may be absent), N rows, K columns, n and k blocks of rows and columns; T rows of an
activation; g values of a block.

A parameter of the decoder may be several weights of the checkpoint, concatenated by rows (``segments``): each is
quantized on its own, so that its bytes are those of the checkpoint's tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from miles.precision.formats import WeightFormat
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

E4M3_MAX = 448.0


def quantize(
    weight: Tensor, format: WeightFormat, segments: Sequence[int] | None = None, parts: int = 1
) -> QuantizedTensor:
    """Quantize a weight [N, K] or a stack [E, N, K]; ``segments`` are the rows of the weights it is fused of.

    Stored scales can be sharded into ``parts`` (see ``row_block``).
    """
    block = row_block(format, weight.shape[-2], segments, parts)
    scale = _block_scale(weight, format, segments)
    data = _round_e4m3(weight.float() / _expand_scale(scale, format, weight.shape, segments))
    stored = scale if block != 1 else _expand_rows(scale, format, weight.shape[-2], segments)
    return QuantizedTensor(format, data, stored, block)


def dequantize(packed: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the weight: multiplied in float32 and rounded once to ``dtype``."""
    rows, columns = packed.shape[-2:]
    scale = packed.scale.float().repeat_interleave(packed.row_block, -2)[..., :rows, :]
    scale = scale.repeat_interleave(packed.column_block, -1)[..., :columns]
    return (packed.data.float() * scale).to(dtype)


def quantize_activation(x_TK: Tensor, format: WeightFormat) -> QuantizedActivation:
    """Quantize each row by itself, so that the result does not depend on other rows."""
    columns = format.activation_columns or x_TK.shape[-1]
    x_TKg = _pad_columns(x_TK.float(), columns).unflatten(-1, (-1, columns))
    scale_TK = _scale_of(x_TKg.abs().amax(-1), format)
    data_TK = _round_e4m3(x_TKg / scale_TK.unsqueeze(-1)).flatten(-2)[..., : x_TK.shape[-1]]
    return QuantizedActivation(data_TK, scale_TK, columns, x_TK.dtype)


def dequantize_activation(x: QuantizedActivation) -> Tensor:
    """Return the rows in float32."""
    scale_TK = x.scale.repeat_interleave(x.columns, -1)[..., : x.data.shape[-1]]
    return x.data.float() * scale_TK


def packed_layout(
    format: WeightFormat, shape: Sequence[int], segments: Sequence[int] | None = None, parts: int = 1
) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each packed tensor of a weight, by its suffix ("" is the values)."""
    *stack, rows, columns = shape
    block = row_block(format, rows, segments, parts)
    scales = (-(-rows // block), format.scale_shape(rows, columns)[1])
    return {"": (tuple(shape), torch.float8_e4m3fn), "_scale": ((*stack, *scales), torch.float32)}


def row_block(format: WeightFormat, rows: int, segments: Sequence[int] | None = None, parts: int = 1) -> int:
    """Return how many rows share a stored scale.

    It is 1 where a block of the format would cross into the next segment, or, if each segment is to be sharded into
    ``parts`` equal runs of rows, into the next of these.
    """
    block = format.rows or rows
    lengths = (rows,) if segments is None else segments
    if parts > 1:
        return block if all(length % (block * parts) == 0 for length in lengths) else 1
    return block if all(length % block == 0 for length in lengths[:-1]) else 1


def _segment_lengths(rows: int, segments: Sequence[int] | None) -> Sequence[int]:
    lengths = (rows,) if segments is None else segments
    assert sum(lengths) == rows, "the segments of a fused weight must add up to its rows"
    return lengths


def _block_scale(weight: Tensor, format: WeightFormat, segments: Sequence[int] | None) -> Tensor:
    """Scales [E, n, k], the blocks of each segment one after the other."""
    parts: list[Tensor] = []
    for part in weight.split(list(_segment_lengths(weight.shape[-2], segments)), -2):
        rows, columns = part.shape[-2:]
        block = (format.rows or rows, format.columns or columns)
        padded = _pad_rows(_pad_columns(part.float().abs(), block[1]), block[0])
        blocks = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
        parts.append(_scale_of(blocks.amax((-3, -1)), format))
    return torch.cat(parts, -2)


def _expand_rows(scale: Tensor, format: WeightFormat, rows: int, segments: Sequence[int] | None) -> Tensor:
    """Scales of every row, [E, N, k]."""
    lengths = _segment_lengths(rows, segments)
    counts = [-(-length // (format.rows or length)) for length in lengths]
    parts = [
        part.repeat_interleave(format.rows or length, -2)[..., :length, :]
        for part, length in zip(scale.split(counts, -2), lengths, strict=True)
    ]
    return torch.cat(parts, -2)


def _expand_scale(scale: Tensor, format: WeightFormat, shape: Sequence[int], segments: Sequence[int] | None) -> Tensor:
    rows, columns = shape[-2:]
    by_row = _expand_rows(scale, format, rows, segments)
    return by_row.repeat_interleave(format.columns or columns, -1)[..., :columns]


def _scale_of(amax: Tensor, format: WeightFormat) -> Tensor:
    """The scale of blocks with this largest magnitude; 1 for a block of zeros."""
    # Division by a tensor is correctly rounded on every device; by a number, a GPU multiplies with its reciprocal.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    if format.power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return scale


def _round_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest E4M3 value, saturating at the largest."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _pad_columns(x: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % block))


def _pad_rows(x: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[-2] % block))
