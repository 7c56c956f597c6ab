"""LoRA beside a frozen weight, which may be packed: y = x W^T + s (x A^T) B^T, the same in engine and trainer.

Shapes: T tokens, I inputs, N outputs of the projection, O outputs of its targets, S targets, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.fused.gemv import linear
from miles.kernels.numerics import Numerics
from miles.models.lora.layout import LoraLayout

__all__ = ["add_lora", "merge_lora"]


def add_lora(
    y_TN: Tensor, x_TI: Tensor, a_XI: Tensor, b_Or: Tensor, layout: LoraLayout, *, numerics: Numerics
) -> Tensor:
    """Add the products of the factors ``a`` [S r, I] and ``b`` to a projection's output.

    It is computed in the dtype of ``x``, in which the factors are: the scaled low-rank rows are rounded to it, then
    their product, then the sum.
    """
    xa_TX = linear(x_TI, a_XI, numerics=numerics) * layout.scale
    pieces: list[Tensor] = []
    column = first = 0
    for (start, stop), xa_Tr in zip(layout.rows, xa_TX.split(layout.rank, -1), strict=True):
        if start > column:
            pieces.append(y_TN.new_zeros((*y_TN.shape[:-1], start - column)))
        last = first + stop - start
        pieces.append(linear(xa_Tr.contiguous(), b_Or[first:last], numerics=numerics))
        column, first = stop, last
    if column < y_TN.shape[-1]:
        pieces.append(y_TN.new_zeros((*y_TN.shape[:-1], y_TN.shape[-1] - column)))
    return y_TN + (pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1))


def merge_lora(weight_NI: Tensor, a_XI: Tensor, b_Or: Tensor, layout: LoraLayout) -> Tensor:
    """Return the weight plus the products of the factors, for a layer that reads its weight directly."""
    merged_NI = weight_NI.to(torch.promote_types(weight_NI.dtype, torch.float32), copy=True)
    first = 0
    for (start, stop), a_rI in zip(layout.rows, a_XI.split(layout.rank), strict=True):
        last = first + stop - start
        merged_NI[start:stop] += layout.scale * (b_Or[first:last].to(merged_NI.dtype) @ a_rI.to(merged_NI.dtype))
        first = last
    return merged_NI.to(weight_NI.dtype)
