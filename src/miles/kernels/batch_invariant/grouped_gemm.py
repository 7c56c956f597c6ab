"""Batch-invariant grouped GEMM, each row as if it were alone, and the weighted sum of a token's rows.

Shapes: T tokens, k groups per token, R rows sorted by group, E groups, N out, K in, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.batch_invariant.elementwise import accumulation_dtype
from miles.kernels.batch_invariant.grouped_gemm_triton import launch_combine, launch_grouped_gemm
from miles.kernels.batch_invariant.linear import matmul_tiles
from miles.kernels.moe import grouped_gemm
from miles.kernels.moe.grouped_gemm import SortedRows
from miles.kernels.runtime.triton_compat import use_triton


def grouped_linear(x_RK: Tensor, weight_ENK: Tensor, rows: SortedRows, bias_EN: Tensor | None = None) -> Tensor:
    """Each row times its group's weight, plus its bias: the same bits as ``linear`` with that weight."""
    if torch.is_grad_enabled():
        return _GroupedLinear.apply(x_RK, weight_ENK, bias_EN, rows)  # pyright: ignore[reportReturnType]
    return _grouped_forward(x_RK, weight_ENK, bias_EN, rows)


def combine_choices(x_TkD: Tensor, weights_Tk: Tensor) -> Tensor:
    """The weighted sum of each token's rows, in float32 and in their order; rounded once."""
    return _combine(x_TkD.flatten(0, 1), weights_Tk, None)


def combine_rows(x_RD: Tensor, weights_Tk: Tensor | None, rows: SortedRows) -> Tensor:
    """``combine_choices`` of rows that are still sorted by group; without weights, their plain sum."""
    if weights_Tk is None:
        weights_Tk = x_RD.new_ones(len(x_RD) // rows.per_token, rows.per_token)
    return _combine(x_RD, weights_Tk, rows)


def _combine(x_RD: Tensor, weights_Tk: Tensor, rows: SortedRows | None) -> Tensor:
    if torch.is_grad_enabled():
        return _CombineRows.apply(x_RD, weights_Tk, rows)  # pyright: ignore[reportReturnType]
    return _combine_forward(x_RD, weights_Tk, rows)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None, rows: SortedRows) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(x_RK, weight_ENK, bias_EN)
        return _grouped_forward(x_RK, weight_ENK, bias_EN, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The backward of the default grouped GEMM, whose forward is recomputed without being used."""
        inputs, needs_grad = ctx.saved_tensors, ctx.needs_input_grad[:3]
        with torch.enable_grad():
            detached = [
                None if x is None else x.detach().requires_grad_(n) for x, n in zip(inputs, needs_grad, strict=True)
            ]
            x_RK, weight_ENK, bias_EN = detached
            assert x_RK is not None and weight_ENK is not None
            out_RN = grouped_gemm.grouped_linear(x_RK, weight_ENK, ctx.rows, bias_EN)
        needed_inputs = [
            tensor for tensor, needs in zip(detached, needs_grad, strict=True) if needs and tensor is not None
        ]
        grads = iter(torch.autograd.grad(out_RN, needed_inputs, grad_RN))
        return *(next(grads) if needs else None for needs in needs_grad), None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weights_Tk: Tensor, rows: SortedRows | None) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(x_RD, weights_Tk)
        return _combine_forward(x_RD, weights_Tk, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x_RD, weights_Tk), rows = ctx.saved_tensors, ctx.rows
        grad_x = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_x = (weights_Tk.to(x_RD.dtype).unsqueeze(2) * grad_TD.unsqueeze(1)).flatten(0, 1)
            grad_x = grad_x if rows is None else grad_x.index_select(0, rows.order_R)
        if ctx.needs_input_grad[1]:
            x_TkD = (x_RD if rows is None else x_RD.index_select(0, rows.place_R)).unflatten(0, weights_Tk.shape)
            grad_weights = torch.bmm(x_TkD, grad_TD.unsqueeze(2)).squeeze(2).to(weights_Tk.dtype)
        return grad_x, grad_weights, None


def _grouped_forward(x_RK: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None, rows: SortedRows) -> Tensor:
    if use_triton(x_RK):
        return launch_grouped_gemm(x_RK, weight_ENK, bias_EN, rows)
    wide = accumulation_dtype(x_RK.dtype)
    out_RN = x_RK.new_empty(len(x_RK), weight_ENK.shape[1], dtype=wide)
    start = 0
    for group, end in enumerate(rows.ends_E.tolist()):
        if end > start:
            matmul_tiles(x_RK[start:end].to(wide), weight_ENK[group].to(wide), out_RN[start:end])
        start = end
    if bias_EN is not None:
        out_RN += bias_EN.index_select(0, rows.group_R)
    return out_RN.to(x_RK.dtype)


def _combine_forward(x_RD: Tensor, weights_Tk: Tensor, rows: SortedRows | None) -> Tensor:
    if use_triton(x_RD):
        return launch_combine(x_RD, weights_Tk, None if rows is None else rows.place_R)
    wide = accumulation_dtype(x_RD.dtype)
    flat_RD = x_RD if rows is None else x_RD.index_select(0, rows.place_R)
    wide_TkD, wide_Tk1 = flat_RD.to(wide).unflatten(0, weights_Tk.shape), weights_Tk.to(wide).unsqueeze(2)
    total_TD = wide_TkD[:, 0] * wide_Tk1[:, 0]
    for choice in range(1, weights_Tk.shape[1]):
        total_TD = total_TD + wide_TkD[:, choice] * wide_Tk1[:, choice]
    return total_TD.to(x_RD.dtype)
