"""LoRA beside a frozen weight, which may be packed: y = x W^T + s (x A^T) B^T, the same in engine and trainer.

Shapes: T tokens, I inputs, N outputs of the projection, O outputs of its targets, S targets, r rank, E experts, R rows
sorted by expert, X matrices of all targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles.kernels.batch_invariant import grouped_gemm as batch_invariant
from miles.kernels.fused.gemv import linear
from miles.kernels.moe.grouped_gemm import SortedRows, grouped_linear
from miles.kernels.numerics import Numerics
from miles.models.lora.layout import LoraLayout

__all__ = ["add_expert_lora", "add_lora", "merge_lora"]


def add_lora(
    y_TN: Tensor, x_TI: Tensor, a_XI: Tensor, b_Or: Tensor, layout: LoraLayout, *, numerics: Numerics
) -> Tensor:
    """Add the products of the factors ``a`` [S r, I] and ``b`` to a projection's output.

    It is computed in the dtype of ``x``, in which the factors are: the scaled low-rank rows are rounded to it, then
    their product, then the sum.
    """
    xa_TX = linear(x_TI, a_XI, numerics=numerics) * layout.scale
    deltas: list[Tensor] = []
    first = 0
    for (start, stop), xa_Tr in zip(layout.rows, xa_TX.split(layout.rank, -1), strict=True):
        last = first + stop - start
        deltas.append(linear(xa_Tr.contiguous(), b_Or[first:last], numerics=numerics))
        first = last
    return _add_columns(y_TN, deltas, layout)


def add_expert_lora(
    y_RN: Tensor,
    x_RI: Tensor,
    a_XrI: Tensor,
    b_XOr: Tensor,
    layout: LoraLayout,
    rows: SortedRows,
    *,
    numerics: Numerics,
) -> Tensor:
    """``add_lora`` for rows sorted by expert: each row with its expert's factors, or with those that experts share."""
    assert layout.experts is not None
    deltas: list[Tensor] = []
    for a_ErI, b_EOr in zip(*(f.split(n) for f, n in zip((a_XrI, b_XOr), layout.experts, strict=True)), strict=True):
        xa_Rr = _multiply_rows(x_RI, a_ErI, rows, numerics) * layout.scale
        deltas.append(_multiply_rows(xa_Rr, b_EOr, rows, numerics))
    return _add_columns(y_RN, deltas, layout)


def _multiply_rows(x_RI: Tensor, weight_EOI: Tensor, rows: SortedRows, numerics: Numerics) -> Tensor:
    if len(weight_EOI) == 1:
        return linear(x_RI, weight_EOI[0], numerics=numerics)
    multiply = batch_invariant.grouped_linear if numerics.batch_invariant else grouped_linear
    return multiply(x_RI, weight_EOI, rows)


def _add_columns(y_TN: Tensor, deltas: Sequence[Tensor], layout: LoraLayout) -> Tensor:
    """Add the product of each target to its columns."""
    pieces: list[Tensor] = []
    column = 0
    for (start, stop), delta_TO in zip(layout.rows, deltas, strict=True):
        if start > column:
            pieces.append(y_TN.new_zeros((*y_TN.shape[:-1], start - column)))
        pieces.append(delta_TO)
        column = stop
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
