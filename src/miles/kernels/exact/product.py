"""Rows times a weight, of each row for itself: the same bits whatever rows are beside it, and in both planes.

Shapes: T rows, K in, N out; I = N / 2 where a product is gated.

On a card the inputs are taken in slices, summed in order, by kernels that differ in nothing but speed
(``product_code``). On a CPU a library sums as it likes for the shape it is given, so it is always given the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.exact.elements import wide_of
from miles.kernels.exact.gate import gate
from miles.kernels.exact.product_code import gates_at_once, multiply, multiply_gated, on_card
from miles.kernels.gated import Kind

# Rows that a CPU multiplies at once, missing ones being zeros: few for decoding, and yet enough for training.
_TILE = 16


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Rows times a weight, plus a bias; summed in float32 (float64 for float64 inputs) and rounded once.

    Rows may have any number of dimensions. Gradients are plain products, and the same in every run of the same shapes.
    """
    if torch.is_grad_enabled():
        return _Linear.apply(x_TK, weight_NK, bias_N)  # pyright: ignore[reportReturnType]
    return product(x_TK, weight_NK, bias_N, x_TK.dtype)


def gated_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, kind: Kind) -> Tensor:
    """The activation of the first half of a product, times the other half."""
    if not torch.is_grad_enabled() and gates_at_once(x_TK):
        return multiply_gated(x_TK, weight_NK, bias_N, kind)
    return gate(linear(x_TK, weight_NK, bias_N), kind)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        return product(x_TK, weight_NK, bias_N, x_TK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TK, weight_NK = ctx.saved_tensors
        rows_TN = grad_TN.reshape(-1, grad_TN.shape[-1])
        x, weight, bias = ctx.needs_input_grad
        return (
            grad_TN @ weight_NK if x else None,
            rows_TN.T @ x_TK.reshape(-1, x_TK.shape[-1]) if weight else None,
            rows_TN.sum(0) if bias else None,
        )


def product(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``linear`` without a gradient, rounded to ``dtype``."""
    rows_TK = x_TK.reshape(-1, x_TK.shape[-1])
    if on_card(rows_TK):
        out_TN = multiply(rows_TK, weight_NK, bias_N, dtype)
    else:
        wide = wide_of(x_TK.dtype)
        out_TN = rows_TK.new_empty(len(rows_TK), len(weight_NK), dtype=wide)
        multiply_tiles(rows_TK.to(wide), weight_NK.to(wide), out_TN)
        if bias_N is not None:
            out_TN += bias_N
        out_TN = out_TN.to(dtype)
    return out_TN.view(*x_TK.shape[:-1], len(weight_NK))


def multiply_tiles(x_TK: Tensor, weight_NK: Tensor, out_TN: Tensor) -> None:
    """Rows times a weight in plain torch, a tile of them at a time: every call of the library has the same shape.

    A tile's rows are columns of what the library is given, and its outputs are too: a column's place among as many as
    its kernels take at once is nothing to them.
    """
    rows, size = x_TK.shape
    tiles = -(-rows // _TILE)
    x_PKM = x_TK.new_zeros(tiles, size, _TILE)
    whole = rows // _TILE
    x_PKM[:whole].copy_(x_TK[: whole * _TILE].view(whole, _TILE, size).transpose(1, 2))
    if whole < tiles:
        x_PKM[whole, :, : rows - whole * _TILE].copy_(x_TK[whole * _TILE :].T)
    with _one_thread():
        for index in range(whole):
            torch.mm(weight_NK, x_PKM[index], out=out_TN[index * _TILE : (index + 1) * _TILE].T)
        if whole < tiles:
            last_MN = out_TN.new_empty(_TILE, len(weight_NK))
            torch.mm(weight_NK, x_PKM[whole], out=last_MN.T)
            out_TN[whole * _TILE :].copy_(last_MN[: rows - whole * _TILE])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Libraries cut a product's inputs in other places for other numbers of threads, and planes may differ in these.

    The number is this thread's own, so others are not held up.
    """
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)
