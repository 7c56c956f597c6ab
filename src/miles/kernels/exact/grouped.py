"""Many small products as one, each row with its group's weight as if it were alone, and the sum of a token's rows.

Shapes: T tokens, k groups a token, R rows sorted by group, E groups, N out, K in, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels import grouped
from miles.kernels.exact.elements import wide_of
from miles.kernels.exact.grouped_code import add_choices, multiply
from miles.kernels.exact.product import multiply_tiles
from miles.kernels.exact.product_code import on_card
from miles.kernels.grouped import Rows


def grouped_linear(x_RK: Tensor, weight_ENK: Tensor, rows: Rows, bias_EN: Tensor | None = None) -> Tensor:
    """Each row times its group's weight, plus its bias: the bits that ``product.linear`` gives with that weight."""
    if torch.is_grad_enabled():
        return _Grouped.apply(x_RK, weight_ENK, bias_EN, rows)  # pyright: ignore[reportReturnType]
    return _product(x_RK, weight_ENK, bias_EN, rows)


def combine(x_TkD: Tensor, weights_Tk: Tensor) -> Tensor:
    """The weighted sum of each token's rows, in float32 and in their order; rounded once."""
    return _sum(x_TkD.flatten(0, 1), weights_Tk, None)


def collect(x_RD: Tensor, weights_Tk: Tensor | None, rows: Rows) -> Tensor:
    """``combine`` of rows that are still sorted by group; without weights, their plain sum."""
    if weights_Tk is None:
        weights_Tk = x_RD.new_ones(len(x_RD) // rows.per_token, rows.per_token)
    return _sum(x_RD, weights_Tk, rows)


def _sum(x_RD: Tensor, weights_Tk: Tensor, rows: Rows | None) -> Tensor:
    if torch.is_grad_enabled():
        return _Combine.apply(x_RD, weights_Tk, rows)  # pyright: ignore[reportReturnType]
    return _combined(x_RD, weights_Tk, rows)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None, rows: Rows) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(x_RK, weight_ENK, bias_EN)
        return _product(x_RK, weight_ENK, bias_EN, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """That of the product that is not exact, whose forward is done without being needed: no gradient needs it."""
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[:3]
        with torch.enable_grad():
            leaves = [None if x is None else x.detach().requires_grad_(n) for x, n in zip(inputs, needed, strict=True)]
            x_RK, weight_ENK, bias_EN = leaves
            assert x_RK is not None and weight_ENK is not None
            out_RN = grouped.grouped_linear(x_RK, weight_ENK, ctx.rows, bias_EN)
        wanted = [leaf for leaf, needs in zip(leaves, needed, strict=True) if needs and leaf is not None]
        grads = iter(torch.autograd.grad(out_RN, wanted, grad_RN))
        return *(next(grads) if needs else None for needs in needed), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weights_Tk: Tensor, rows: Rows | None) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(x_RD, weights_Tk)
        return _combined(x_RD, weights_Tk, rows)

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


def _product(x_RK: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None, rows: Rows) -> Tensor:
    if on_card(x_RK):
        return multiply(x_RK, weight_ENK, bias_EN, rows)
    wide = wide_of(x_RK.dtype)
    out_RN = x_RK.new_empty(len(x_RK), weight_ENK.shape[1], dtype=wide)
    start = 0
    for group, end in enumerate(rows.ends_E.tolist()):
        if end > start:
            multiply_tiles(x_RK[start:end].to(wide), weight_ENK[group].to(wide), out_RN[start:end])
        start = end
    if bias_EN is not None:
        out_RN += bias_EN.index_select(0, rows.group_R)
    return out_RN.to(x_RK.dtype)


def _combined(x_RD: Tensor, weights_Tk: Tensor, rows: Rows | None) -> Tensor:
    if on_card(x_RD):
        return add_choices(x_RD, weights_Tk, None if rows is None else rows.place_R)
    wide = wide_of(x_RD.dtype)
    flat_RD = x_RD if rows is None else x_RD.index_select(0, rows.place_R)
    wide_TkD, wide_Tk1 = flat_RD.to(wide).unflatten(0, weights_Tk.shape), weights_Tk.to(wide).unsqueeze(2)
    sum_TD = wide_TkD[:, 0] * wide_Tk1[:, 0]
    for choice in range(1, weights_Tk.shape[1]):
        sum_TD = sum_TD + wide_TkD[:, choice] * wide_Tk1[:, choice]
    return sum_TD.to(x_RD.dtype)
