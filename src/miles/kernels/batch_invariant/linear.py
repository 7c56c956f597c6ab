"""Batch-invariant linear layer: the same bits for a row whatever the other rows, in engine and trainer.

Shapes: T rows, K in, N out; I = N / 2 with a gated activation.

On a GPU all tile shapes sum the inputs in the same order (``linear_triton``). On a CPU a library chooses its summation
order by the shape, so it is always called with the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.batch_invariant.activation import gated_activation
from miles.kernels.batch_invariant.elementwise import accumulation_dtype
from miles.kernels.batch_invariant.linear_triton import can_fuse_gate, gated_gemm, gemm
from miles.kernels.fused.activation import ActivationKind
from miles.kernels.runtime.triton_compat import use_triton

# Rows of one CPU matmul, padded with zeros: few for decode, and enough for training.
_TILE = 16


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Rows times a weight, plus a bias; accumulated in float32 (float64 for float64 inputs) and rounded once.

    Rows may have any number of dimensions. Gradients are plain matmuls, reproducible for the same shapes.
    """
    if torch.is_grad_enabled():
        return _Linear.apply(x_TK, weight_NK, bias_N)  # pyright: ignore[reportReturnType]
    return linear_forward(x_TK, weight_NK, bias_N, x_TK.dtype)


def gated_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, kind: ActivationKind) -> Tensor:
    """``linear`` followed by ``gated_activation``."""
    if not torch.is_grad_enabled() and can_fuse_gate(x_TK):
        return gated_gemm(x_TK, weight_NK, bias_N, kind)
    return gated_activation(linear(x_TK, weight_NK, bias_N), kind)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        return linear_forward(x_TK, weight_NK, bias_N, x_TK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TK, weight_NK = ctx.saved_tensors
        rows_TN = grad_TN.reshape(-1, grad_TN.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            grad_TN @ weight_NK if needs_x else None,
            rows_TN.T @ x_TK.reshape(-1, x_TK.shape[-1]) if needs_weight else None,
            rows_TN.sum(0) if needs_bias else None,
        )


def linear_forward(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``linear`` without a gradient, rounded to ``dtype``."""
    rows_TK = x_TK.reshape(-1, x_TK.shape[-1])
    if use_triton(rows_TK):
        out_TN = gemm(rows_TK, weight_NK, bias_N, dtype)
    else:
        wide = accumulation_dtype(x_TK.dtype)
        out_TN = rows_TK.new_empty(len(rows_TK), len(weight_NK), dtype=wide)
        matmul_tiles(rows_TK.to(wide), weight_NK.to(wide), out_TN)
        if bias_N is not None:
            out_TN += bias_N
        out_TN = out_TN.to(dtype)
    return out_TN.view(*x_TK.shape[:-1], len(weight_NK))


def matmul_tiles(x_TK: Tensor, weight_NK: Tensor, out_TN: Tensor) -> None:
    """Rows times a weight in torch, a tile of rows at a time: every library call has the same shape.

    The rows of a tile are columns of the library's operand, and so are its outputs: its kernels treat all columns
    alike.
    """
    rows, size = x_TK.shape
    tiles = -(-rows // _TILE)
    x_PKM = x_TK.new_zeros(tiles, size, _TILE)
    full_tiles = rows // _TILE
    x_PKM[:full_tiles].copy_(x_TK[: full_tiles * _TILE].view(full_tiles, _TILE, size).transpose(1, 2))
    if full_tiles < tiles:
        x_PKM[full_tiles, :, : rows - full_tiles * _TILE].copy_(x_TK[full_tiles * _TILE :].T)
    with _single_threaded():
        for index in range(full_tiles):
            torch.mm(weight_NK, x_PKM[index], out=out_TN[index * _TILE : (index + 1) * _TILE].T)
        if full_tiles < tiles:
            last_MN = out_TN.new_empty(_TILE, len(weight_NK))
            torch.mm(weight_NK, x_PKM[full_tiles], out=last_MN.T)
            out_TN[full_tiles * _TILE :].copy_(last_MN[: rows - full_tiles * _TILE])


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Libraries split the reduction by the number of threads, which may differ between engine and trainer.

    The setting is per thread, so other threads are unaffected.
    """
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)
