"""Dequantization of block-scaled FP8 and INT8 weights (DeepSeek-V3) and of MXFP4 weights (gpt-oss).

FP8 and INT8: one scale for each block of a matrix; scales in uint8 are E8M0 exponents (MXFP8).

MXFP4 (OCP microscaling): a byte is two E2M1 values, the low half first; 32 values share an E8M0 scale, an exponent
with a bias of 127, where 255 is NaN.

Shapes: R rows and C columns of a matrix; r and c its blocks, the last of either possibly smaller; G = C / 32 groups of
a row, b = 16 bytes of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.precision.microscaling import E2M1_VALUES

__all__ = ["MXFP4_GROUP", "dequantize_blocks", "dequantize_mxfp4"]

MXFP4_GROUP = 32

# Values converted at a time, so that the intermediate tensors stay small.
_CHUNK = 1 << 20
# The same where a block is a few rows: the intermediate tensors stay in the CPU cache.
_SMALL_CHUNK = 1 << 17


def dequantize_blocks(
    weight_RC: Tensor, scale_rc: Tensor, block: tuple[int, int], out_RC: Tensor, *, first: int = 0
) -> None:
    """Write each value times its block's scale into ``out_RC``: multiplied in float32, rounded once to ``out``'s dtype.

    The rows may be any run of a matrix: ``first`` is the index of the first one, and ``scale_rc`` begins with the block
    it is in.
    """
    rows, columns = weight_RC.shape
    block_rows, block_columns = block
    scale_rc = scale_rc.view(torch.float8_e8m0fnu) if scale_rc.dtype == torch.uint8 else scale_rc
    skipped = first % block_rows
    # Some rows of blocks at a time, so that the intermediate tensors stay small; one of large blocks shares its scales.
    step = block_rows * max(1, _SMALL_CHUNK // max(1, columns) // block_rows)
    for start in range(-skipped, rows, step):
        part = slice(max(start, 0), min(start + step, rows))
        top = (start + skipped) // block_rows
        scale = scale_rc[top : top + step // block_rows].float()
        if block_columns < columns:
            scale = scale.repeat_interleave(block_columns, 1)[:, :columns]
        if scale.shape[0] > 1 and block_rows > 1:
            scale = scale.repeat_interleave(block_rows, 0)[part.start - start :][: part.stop - part.start]
        out_RC[part].copy_(weight_RC[part].to(torch.float32).mul_(scale))


def dequantize_mxfp4(blocks_RGb: Tensor, scales_RG: Tensor, out_RC: Tensor) -> None:
    """Write the values into ``out_RC``; exact in float32 and bfloat16, rounded once in float16."""
    rows, groups, _ = blocks_RGb.shape
    pairs = _build_pair_table(blocks_RGb.device)
    step = max(1, _CHUNK // (groups * MXFP4_GROUP))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        # Looking up a pair of float32 as one float64 is the fastest gather.
        wide = torch.index_select(pairs, 0, blocks_RGb[part].flatten().int()).view(torch.float32)
        scale_RG1 = scales_RG[part].view(torch.float8_e8m0fnu).to(torch.float32).unsqueeze(-1)
        out_RC[part].copy_(wide.view(-1, groups, MXFP4_GROUP).mul_(scale_RG1).view(-1, groups * MXFP4_GROUP))


def _build_pair_table(device: torch.device) -> Tensor:
    """The two values of each of the 256 bytes: two float32 viewed as one float64."""
    half = torch.tensor(E2M1_VALUES, dtype=torch.float32)
    table = torch.stack((half.repeat(16), half.repeat_interleave(16)), dim=-1)
    return table.view(torch.float64).flatten().to(device)
