"""Four-bit floats that share a power of two by 32, as gpt-oss is published (OCP microscaling, MXFP4).

A byte is two values, the low half first; a value is a sign, two bits of exponent and one of mantissa (E2M1). A scale is
an exponent with a bias of 127 and nothing else (E8M0); 255 is not a number.

Shapes: R rows and C columns of a matrix, G = C / 32 groups of a row, b = 16 bytes of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GROUP", "dequantise"]

GROUP = 32

# The values of a half byte.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Values worked on at a time, so that what is in between stays small.
_STRIP = 1 << 20


def dequantise(blocks_RGb: Tensor, scales_RG: Tensor, out_RC: Tensor) -> None:
    """Write the values into ``out_RC``; exact in float32 and bfloat16, rounded once in float16."""
    rows, groups, _ = blocks_RGb.shape
    pairs = _pairs(blocks_RGb.device)
    step = max(1, _STRIP // (groups * GROUP))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        # A pair of float32 fetched as one float64 is the quickest table there is.
        wide = torch.index_select(pairs, 0, blocks_RGb[part].flatten().int()).view(torch.float32)
        scale_RG1 = scales_RG[part].view(torch.float8_e8m0fnu).to(torch.float32).unsqueeze(-1)
        out_RC[part].copy_(wide.view(-1, groups, GROUP).mul_(scale_RG1).view(-1, groups * GROUP))


def _pairs(device: torch.device) -> Tensor:
    """What each of the 256 bytes means: two float32 in the place of a float64."""
    half = torch.tensor(_E2M1, dtype=torch.float32)
    table = torch.stack((half.repeat(16), half.repeat_interleave(16)), dim=-1)
    return table.view(torch.float64).flatten().to(device)
