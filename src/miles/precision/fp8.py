"""Eight-bit floats with a scale for every block of a matrix, as DeepSeek-V3 and its kin are published.

Shapes: R rows and C columns of a matrix; r and c its blocks, the last of either possibly cut short.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dequantise"]


def dequantise(weight_RC: Tensor, scale_rc: Tensor, block: tuple[int, int], out_RC: Tensor, *, first: int = 0) -> None:
    """Write each value times its block's scale into ``out_RC``: a float32 product, rounded once to ``out``'s dtype.

    The rows given may be any run of a matrix: ``first`` is the number of their first one in it, and ``scale_rc`` begins
    with the block which that one lies in.
    """
    rows, columns = weight_RC.shape
    high, wide = block
    skipped = first % high
    scale_rC = scale_rc.float().repeat_interleave(wide, dim=1)[:, :columns]
    # A row of blocks at a time: what is in between stays small, and in the processor's cache.
    for number, start in enumerate(range(-skipped, rows, high)):
        part = slice(max(start, 0), min(start + high, rows))
        out_RC[part].copy_(weight_RC[part].to(torch.float32).mul_(scale_rC[number]))
