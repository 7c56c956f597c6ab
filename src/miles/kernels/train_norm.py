"""Root-mean-square normalisation in training, alone or of a sum: one pass forward and one back.

Shapes: T tokens, D features, P programs, M rows of a tile.

Rounded as ``norm`` rounds it, so that engine and trainer agree. What is kept for the backward is the normalised
tensor's input and one number a row; the gradient that comes along the residual stream is added on the way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.device_code import jit, on, tl, triton

# Numbers of a tile, and the most programs a backward is given: each adds up weights' gradients of its own.
_TILE = 4096
_PROGRAMS = 528


def norm_in_training(x_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """As ``norm.rms_norm``, with a gradient."""
    return _Norm.apply(x_TD, weight_D, eps, offset)  # pyright: ignore[reportReturnType]


def add_norm_in_training(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As ``norm.add_rms_norm``, with a gradient."""
    return _AddNorm.apply(x_TD, delta_TD, weight_D, eps, offset)  # pyright: ignore[reportReturnType]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float, offset: float) -> Tensor:
        rows_TD = _rows(x_TD)
        _, normed_TD, scale_T = _forward(rows_TD, None, weight_D, eps, offset)
        ctx.offset, ctx.shape = offset, x_TD.shape
        ctx.save_for_backward(rows_TD, weight_D, scale_T)
        return normed_TD.view(x_TD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TD, weight_D, scale_T = ctx.saved_tensors
        back_TD, weight = norm_backward(
            _rows(grad_TD), None, x_TD, weight_D, scale_T, ctx.offset, ctx.needs_input_grad[1]
        )
        return back_TD.view(ctx.shape), weight, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        sum_TD, normed_TD, scale_T = _forward(_rows(x_TD), _rows(delta_TD), weight_D, eps, offset)
        ctx.offset, ctx.shape = offset, x_TD.shape
        ctx.save_for_backward(sum_TD, weight_D, scale_T)
        ctx.set_materialize_grads(False)
        return sum_TD.view(x_TD.shape), normed_TD.view(x_TD.shape)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, stream_TD: Tensor | None, grad_TD: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        if grad_TD is None:
            return stream_TD, stream_TD, None, None, None
        sum_TD, weight_D, scale_T = ctx.saved_tensors
        late_TD = None if stream_TD is None else _rows(stream_TD)
        wanted = ctx.needs_input_grad[2]
        back_TD, weight = norm_backward(_rows(grad_TD), late_TD, sum_TD, weight_D, scale_T, ctx.offset, wanted)
        back_TD = back_TD.view(ctx.shape)
        return back_TD, back_TD, weight, None, None


def _rows(x_TD: Tensor) -> Tensor:
    x_TD = x_TD.reshape(-1, x_TD.shape[-1])
    return x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()


def _tile(size: int) -> tuple[int, int, int]:
    """The width of a tile, its rows, and its warps."""
    block = 1 << (size - 1).bit_length()
    rows = max(1, _TILE // block)
    return block, rows, min(max(rows * block // 512, 1), 16)


def _forward(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, size = x_TD.shape
    other_TD = x_TD if delta_TD is None else delta_TD
    normed_TD = torch.empty(tokens, size, dtype=x_TD.dtype, device=x_TD.device)
    sum_TD = x_TD if delta_TD is None else torch.empty_like(normed_TD)
    scale_T = torch.empty(tokens, dtype=torch.float32, device=x_TD.device)
    block, rows, warps = _tile(size)
    if tokens:
        with on(x_TD):
            _norm_forward[(triton.cdiv(tokens, rows),)](
                *(x_TD, other_TD, weight_D, sum_TD, normed_TD, scale_T),
                *(x_TD.stride(0), other_TD.stride(0), tokens, size, eps, offset),
                ADD=delta_TD is not None,
                M=rows,
                BLOCK=block,
                num_warps=warps,
            )
    return sum_TD, normed_TD, scale_T


def norm_backward(
    grad_TD: Tensor,
    late_TD: Tensor | None,
    x_TD: Tensor,
    weight_D: Tensor,
    scale_T: Tensor,
    offset: float,
    wanted: bool,
) -> tuple[Tensor, Tensor | None]:
    tokens, size = grad_TD.shape
    back_TD = torch.empty(tokens, size, dtype=grad_TD.dtype, device=grad_TD.device)
    block, rows, warps = _tile(size)
    programs = min(-(-tokens // rows), _PROGRAMS)
    parts_PD = torch.empty(programs, size, dtype=torch.float32, device=grad_TD.device)
    if tokens:
        stream_TD = grad_TD if late_TD is None else late_TD
        with on(x_TD):
            _norm_backward[(programs,)](
                *(grad_TD, stream_TD, x_TD, weight_D, scale_T, back_TD, parts_PD),
                *(grad_TD.stride(0), stream_TD.stride(0), x_TD.stride(0), tokens, size, offset, programs),
                ADD=late_TD is not None,
                WEIGHT=wanted,
                M=rows,
                BLOCK=block,
                num_warps=warps,
            )
    return back_TD, parts_PD.sum(0).to(weight_D.dtype) if wanted else None


@jit
def _norm_forward(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    x_stride: tl.tensor,
    delta_stride: tl.tensor,
    tokens: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    ADD: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row_M = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    column_D = tl.arange(0, BLOCK)
    inside_MD = (row_M < tokens)[:, None] & (column_D < size)[None, :]
    x_MD = tl.load(x_ptr + row_M[:, None] * x_stride + column_D[None, :], inside_MD, other=0.0)
    wide_MD = x_MD.to(tl.float32)
    at_MD = row_M[:, None] * size + column_D[None, :]
    if ADD:
        # What is normalised is the sum as it is kept: rounded.
        delta_MD = tl.load(delta_ptr + row_M[:, None] * delta_stride + column_D[None, :], inside_MD, other=0.0)
        x_MD = (wide_MD + delta_MD.to(tl.float32)).to(x_MD.dtype)
        tl.store(sum_ptr + at_MD, x_MD, inside_MD)
        wide_MD = x_MD.to(tl.float32)
    weight_D = tl.load(weight_ptr + column_D, column_D < size, other=0.0).to(tl.float32) + offset
    scale_M = tl.rsqrt(tl.sum(wide_MD * wide_MD, 1) / size + eps)
    tl.store(scale_ptr + row_M, scale_M, row_M < tokens)
    tl.store(normed_ptr + at_MD, wide_MD * scale_M[:, None] * weight_D[None, :], inside_MD)


@jit
def _norm_backward(
    grad_ptr: tl.tensor,
    stream_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    back_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    grad_stride: tl.tensor,
    stream_stride: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    size: tl.tensor,
    offset: tl.tensor,
    programs: tl.tensor,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """dx = s (w dy - n mean(n w dy)) with n = s x; a program takes every so many tiles of rows."""
    program = tl.program_id(0)
    column_D = tl.arange(0, BLOCK)
    weight_D = tl.load(weight_ptr + column_D, column_D < size, other=0.0).to(tl.float32) + offset
    sum_D = tl.zeros((BLOCK,), tl.float32)
    for first in range(program * M, tokens, programs * M):
        row_M = (first + tl.arange(0, M)).to(tl.int64)
        inside_MD = (row_M < tokens)[:, None] & (column_D < size)[None, :]
        grad_MD = tl.load(grad_ptr + row_M[:, None] * grad_stride + column_D[None, :], inside_MD, other=0.0)
        grad_MD = grad_MD.to(tl.float32)
        x_MD = tl.load(x_ptr + row_M[:, None] * x_stride + column_D[None, :], inside_MD, other=0.0)
        scale_M = tl.load(scale_ptr + row_M, row_M < tokens, other=0.0)
        normed_MD = x_MD.to(tl.float32) * scale_M[:, None]
        if WEIGHT:
            sum_D += tl.sum(grad_MD * normed_MD, 0)
        slope_MD = grad_MD * weight_D[None, :]
        mean_M = tl.sum(slope_MD * normed_MD, 1) / size
        back_MD = (slope_MD - normed_MD * mean_M[:, None]) * scale_M[:, None]
        if ADD:
            stream_MD = tl.load(stream_ptr + row_M[:, None] * stream_stride + column_D[None, :], inside_MD, other=0.0)
            back_MD += stream_MD.to(tl.float32)
        tl.store(back_ptr + row_M[:, None] * size + column_D[None, :], back_MD, inside_MD)
    if WEIGHT:
        tl.store(parts_ptr + program * size + column_D, sum_D, column_D < size)
