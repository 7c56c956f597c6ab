"""FP8 (E4M3) quantization: 128x128 blocks, per output channel, per tensor, and activations by row.

Shapes: E stacked matrices (may be absent), N rows, K columns, n and k blocks of rows and columns; T rows of an
activation; g values of a block.

A scale is the largest magnitude of its block over 448, as DeepSeek-V3, compressed-tensors, SGLang and vLLM have it
(transformers takes the reciprocal of 448 over the magnitude, which may differ in the last bit), and 1 where that is
zero. The scales of ``fp8_pow2`` are rounded up to a power of two (UE8M0), never below 2**-126.

A value that is not finite is not hidden: NaN makes the scale of its block NaN; an infinity makes what it dequantizes
to infinite or NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles.precision.e8m0 import decode_e8m0, encode_e8m0
from miles.precision.formats import WeightFormat

__all__ = ["E4M3_MAX", "divide", "expand_rows", "pad_columns", "quantize_fp8", "quantize_rows_fp8", "round_e4m3"]

E4M3_MAX = 448.0


def quantize_fp8(weight: Tensor, format: WeightFormat, segments: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the values and the scales [E, n, k], the blocks of each segment one after the other."""
    values: list[Tensor] = []
    scales: list[Tensor] = []
    for part in weight.split(list(segments), -2):
        rows, columns = part.shape[-2:]
        block = (format.rows or rows, format.columns or columns)
        wide = part.float()
        padded = torch.nn.functional.pad(wide.abs(), (0, -columns % block[1], 0, -rows % block[0]))
        blocks = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
        scale = _scale_of(blocks.amax((-3, -1)), format)
        by_row = scale.repeat_interleave(block[0], -2)[..., :rows, :]
        values.append(round_e4m3(wide / by_row.repeat_interleave(block[1], -1)[..., :columns]))
        scales.append(scale)
    return torch.cat(values, -2), torch.cat(scales, -2)


def quantize_rows_fp8(x_TK: Tensor, format: WeightFormat) -> tuple[Tensor, Tensor]:
    """Quantize activations by row: return the values and float32 scales of every ``activation_columns`` of a row."""
    columns = format.activation_columns or x_TK.shape[-1]
    x_TKg = pad_columns(x_TK.float(), columns).unflatten(-1, (-1, columns))
    scale_TK = _scale_of(x_TKg.abs().amax(-1), format)
    data_TK = round_e4m3(x_TKg / scale_TK.unsqueeze(-1)).flatten(-2)[..., : x_TK.shape[-1]]
    return data_TK.contiguous(), scale_TK


def expand_rows(scale: Tensor, format: WeightFormat, segments: Sequence[int]) -> Tensor:
    """Return the scales of every row, [E, N, k]."""
    counts = [-(-length // (format.rows or length)) for length in segments]
    parts = [
        part.repeat_interleave(format.rows or length, -2)[..., :length, :]
        for part, length in zip(scale.split(counts, -2), segments, strict=True)
    ]
    return torch.cat(parts, -2)


def round_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest E4M3 value, ties to even, saturating at the largest; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def divide(x: Tensor, number: float) -> Tensor:
    """Divide and round correctly on every device: by a plain number, a GPU multiplies with its reciprocal."""
    return x / torch.full_like(x, number)


def pad_columns(x: Tensor, block: int) -> Tensor:
    """Add zeros until the columns are whole blocks."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % block))


def _scale_of(amax: Tensor, format: WeightFormat) -> Tensor:
    """The scale of blocks with this largest magnitude; 1 for a block of zeros."""
    scale = divide(amax, E4M3_MAX)
    rounded = decode_e8m0(encode_e8m0(scale).clamp(min=1)) if format.power_of_two else scale
    return torch.where(scale == 0, torch.ones_like(scale), rounded)
