"""Concatenation and splitting of packed weights by rows: a fused weight and the checkpoint's weights it consists of.

Shapes: E stacked matrices (may be absent), N rows, K columns, n and k blocks of rows and columns with a scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles.precision.quantize import row_block
from miles.precision.quantized_tensor import QuantizedTensor

__all__ = ["concat_segments", "split_segments", "stack", "unstack"]


def concat_segments(parts: Sequence[QuantizedTensor], shards: int = 1) -> QuantizedTensor:
    """Concatenate packed weights by rows, as ``quantize`` packs the fused weight; they share a global scale.

    Stored scales can be sharded into ``shards`` (see ``row_block``).
    """
    first = parts[0]
    lengths = [part.shape[-2] for part in parts]
    block = row_block(first.format, sum(lengths), lengths, shards)
    if len(parts) == 1 and block == first.row_block:
        return first
    scales = [part.scale if block == part.row_block else _expand_rows(part) for part in parts]
    zeros = [part.zero for part in parts if part.zero is not None]
    return QuantizedTensor(
        first.format,
        torch.cat([part.data for part in parts], -2),
        torch.cat(scales, -2),
        block,
        torch.cat(zeros, -2) if zeros else None,
        first.global_scale,
    )


def _expand_rows(part: QuantizedTensor) -> Tensor:
    return part.scale.repeat_interleave(part.row_block, -2)[..., : part.shape[-2], :]


def split_segments(packed: QuantizedTensor, segments: Sequence[int]) -> list[QuantizedTensor]:
    """Split a fused weight into those it consists of: the inverse of ``concat_segments``."""
    if len(segments) == 1 and packed.row_block == (packed.format.rows or segments[0]):
        return [packed]
    block = packed.row_block
    scales = packed.scale.split([-(-length // block) for length in segments], -2)
    zeros = [None] * len(segments) if packed.zero is None else packed.zero.split(list(segments), -2)
    parts: list[QuantizedTensor] = []
    for length, data, scale, zero in zip(segments, packed.data.split(list(segments), -2), scales, zeros, strict=True):
        own = packed.format.rows or length
        own_scale = scale if own == block else scale[..., ::own, :]
        parts.append(QuantizedTensor(packed.format, data, own_scale, own, zero, packed.global_scale))
    return parts


def stack(matrices: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Stack packed matrices of one shape into [E, N, K]."""
    first = matrices[0]
    zeros = [matrix.zero for matrix in matrices if matrix.zero is not None]
    totals = [matrix.global_scale for matrix in matrices if matrix.global_scale is not None]
    return QuantizedTensor(
        first.format,
        torch.stack([matrix.data for matrix in matrices]),
        torch.stack([matrix.scale for matrix in matrices]),
        first.row_block,
        torch.stack(zeros) if zeros else None,
        torch.stack(totals) if totals else None,
    )


def unstack(packed: QuantizedTensor) -> list[QuantizedTensor]:
    """Return the packed matrices of a stack: the inverse of ``stack``."""
    return [
        QuantizedTensor(
            packed.format,
            packed.data[number],
            packed.scale[number],
            packed.row_block,
            None if packed.zero is None else packed.zero[number],
            None if packed.global_scale is None else packed.global_scale[number],
        )
        for number in range(len(packed.data))
    ]
