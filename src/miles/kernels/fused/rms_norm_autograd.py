"""RMSNorm in training, plain or fused with a residual add: Triton forward and backward kernels.

Shapes: T tokens, D features, P programs, M rows of a tile.

Rounded like ``fused.rms_norm``, so that engine and trainer agree. Backward needs the input of the norm and one number
per row; the gradient of the residual stream is added on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton

# Elements of a tile and of a warp, and the most programs of a backward: each sums weight gradients of its own.
_TILE = 4096
_WARP_ELEMENTS = 512
_MAX_PROGRAMS = 528


class NormKernels(NamedTuple):
    """An implementation of the norm of rows.

    ``forward`` takes the rows, what is added to them, the weight, eps and the offset of the weight; it returns the sum,
    its norm and the scale of each row. ``backward`` takes the gradients of the norm and of the sum, the sum, the
    weight, the scales, the offset and whether the weight needs a gradient.
    """

    forward: Callable[[Tensor, Tensor | None, Any, float, float], tuple[Tensor, Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor | None, Tensor, Any, Tensor, float, bool], tuple[Tensor, Tensor | None]]


class NormFunction(torch.autograd.Function):
    """RMSNorm by an implementation."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_D: Tensor | None, eps: float, offset: float, kernels: NormKernels
    ) -> Tensor:
        rows_TD, normed_TD, scale_T = kernels.forward(x_TD.reshape(-1, x_TD.shape[-1]), None, weight_D, eps, offset)
        ctx.offset, ctx.shape = offset, x_TD.shape
        ctx.kernels = kernels
        ctx.save_for_backward(rows_TD, weight_D, scale_T)
        return normed_TD.view(x_TD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_TD, weight_D, scale_T = ctx.saved_tensors
        grad_TD = grad_TD.reshape(rows_TD.shape)
        needs_weight = ctx.needs_input_grad[1]
        grad_x_TD, weight = ctx.kernels.backward(grad_TD, None, rows_TD, weight_D, scale_T, ctx.offset, needs_weight)
        return grad_x_TD.view(ctx.shape), weight, None, None, None


class AddNormFunction(torch.autograd.Function):
    """The sum of two inputs, and its RMSNorm by an implementation."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float, offset: float, kernels: NormKernels
    ) -> tuple[Tensor, Tensor]:
        rows_TD, delta_rows_TD = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x_TD, delta_TD))
        sum_TD, normed_TD, scale_T = kernels.forward(rows_TD, delta_rows_TD, weight_D, eps, offset)
        ctx.offset, ctx.shape = offset, x_TD.shape
        ctx.kernels = kernels
        ctx.save_for_backward(sum_TD, weight_D, scale_T)
        ctx.set_materialize_grads(False)
        return sum_TD.view(x_TD.shape), normed_TD.view(x_TD.shape)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, residual_grad_TD: Tensor | None, grad_TD: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        if grad_TD is None:
            return residual_grad_TD, residual_grad_TD, None, None, None, None
        sum_TD, weight_D, scale_T = ctx.saved_tensors
        residual_TD = None if residual_grad_TD is None else residual_grad_TD.reshape(sum_TD.shape)
        grad_TD = grad_TD.reshape(sum_TD.shape)
        needs_weight = ctx.needs_input_grad[2]
        grad_x_TD, weight = ctx.kernels.backward(
            grad_TD, residual_TD, sum_TD, weight_D, scale_T, ctx.offset, needs_weight
        )
        grad_x_TD = grad_x_TD.view(ctx.shape)
        return grad_x_TD, grad_x_TD, weight, None, None, None


def rms_norm_training(x_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """``rms_norm`` with a gradient."""
    return NormFunction.apply(x_TD, weight_D, eps, offset, _KERNELS)  # pyright: ignore[reportReturnType]


def add_rms_norm_training(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``add_rms_norm`` with a gradient."""
    return AddNormFunction.apply(x_TD, delta_TD, weight_D, eps, offset, _KERNELS)  # pyright: ignore[reportReturnType]


def _make_rows_contiguous(x_TD: Tensor) -> Tensor:
    return x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()


def _select_tile(size: int) -> tuple[int, int, int]:
    """Width of a tile, its rows, and its warps."""
    block = 1 << (size - 1).bit_length()
    rows = max(1, _TILE // block)
    return block, rows, min(max(rows * block // _WARP_ELEMENTS, 1), 16)


def _launch_forward(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, size = x_TD.shape
    x_TD = _make_rows_contiguous(x_TD)
    other_TD = x_TD if delta_TD is None else _make_rows_contiguous(delta_TD)
    normed_TD = torch.empty(tokens, size, dtype=x_TD.dtype, device=x_TD.device)
    sum_TD = x_TD if delta_TD is None else torch.empty_like(normed_TD)
    scale_T = torch.empty(tokens, dtype=torch.float32, device=x_TD.device)
    block, rows, warps = _select_tile(size)
    if tokens:
        with device_guard(x_TD):
            tensors = (x_TD, other_TD, weight_D, sum_TD, normed_TD, scale_T)
            scalars = (x_TD.stride(0), other_TD.stride(0), tokens, size, eps, offset)
            _forward_kernel[(triton.cdiv(tokens, rows),)](
                *tensors,
                *scalars,
                ADD=delta_TD is not None,
                M=rows,
                BLOCK=block,
                num_warps=warps,
            )
    return sum_TD, normed_TD, scale_T


def rms_norm_backward(
    grad_TD: Tensor,
    residual_TD: Tensor | None,
    x_TD: Tensor,
    weight_D: Tensor,
    scale_T: Tensor,
    offset: float,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the input and, if ``needs_weight``, of the weight; ``residual_TD`` is added to the former."""
    tokens, size = grad_TD.shape
    grad_TD = _make_rows_contiguous(grad_TD)
    residual_TD = None if residual_TD is None else _make_rows_contiguous(residual_TD)
    grad_x_TD = torch.empty(tokens, size, dtype=grad_TD.dtype, device=grad_TD.device)
    block, rows, warps = _select_tile(size)
    programs = min(-(-tokens // rows), _MAX_PROGRAMS)
    partial_sums_PD = torch.empty(programs, size, dtype=torch.float32, device=grad_TD.device)
    if tokens:
        residual_grad_TD = grad_TD if residual_TD is None else residual_TD
        with device_guard(x_TD):
            tensors = (grad_TD, residual_grad_TD, x_TD, weight_D, scale_T, grad_x_TD, partial_sums_PD)
            scalars = (grad_TD.stride(0), residual_grad_TD.stride(0), x_TD.stride(0), tokens, size, offset, programs)
            _backward_kernel[(programs,)](
                *tensors,
                *scalars,
                ADD=residual_TD is not None,
                WEIGHT=needs_weight,
                M=rows,
                BLOCK=block,
                num_warps=warps,
            )
    return grad_x_TD, partial_sums_PD.sum(0).to(weight_D.dtype) if needs_weight else None


_KERNELS = NormKernels(_launch_forward, rms_norm_backward)


@jit
def _forward_kernel(
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
    valid_MD = (row_M < tokens)[:, None] & (column_D < size)[None, :]
    x_MD = tl.load(x_ptr + row_M[:, None] * x_stride + column_D[None, :], valid_MD, other=0.0)
    wide_MD = x_MD.to(tl.float32)
    index_MD = row_M[:, None] * size + column_D[None, :]
    if ADD:
        # The norm is that of the rounded sum.
        delta_MD = tl.load(delta_ptr + row_M[:, None] * delta_stride + column_D[None, :], valid_MD, other=0.0)
        x_MD = (wide_MD + delta_MD.to(tl.float32)).to(x_MD.dtype)
        tl.store(sum_ptr + index_MD, x_MD, valid_MD)
        wide_MD = x_MD.to(tl.float32)
    weight_D = tl.load(weight_ptr + column_D, column_D < size, other=0.0).to(tl.float32) + offset
    scale_M = tl.rsqrt(tl.sum(wide_MD * wide_MD, 1) / size + eps)
    tl.store(scale_ptr + row_M, scale_M, row_M < tokens)
    tl.store(normed_ptr + index_MD, wide_MD * scale_M[:, None] * weight_D[None, :], valid_MD)


@jit
def _backward_kernel(
    grad_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    grad_x_ptr: tl.tensor,
    partial_sums_ptr: tl.tensor,
    grad_stride: tl.tensor,
    residual_stride: tl.tensor,
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
    """dx = s (w dy - n mean(n w dy)) with n = s x; a program takes every ``programs``-th tile of rows.

    The gradient of the weight is summed per row of the tile first, so that threads need not wait for each other.
    """
    program = tl.program_id(0)
    column_D = tl.arange(0, BLOCK)
    weight_D = tl.load(weight_ptr + column_D, column_D < size, other=0.0).to(tl.float32) + offset
    sum_MD = tl.zeros((M, BLOCK), tl.float32)
    for first in range(program * M, tokens, programs * M):
        row_M = (first + tl.arange(0, M)).to(tl.int64)
        valid_MD = (row_M < tokens)[:, None] & (column_D < size)[None, :]
        grad_MD = tl.load(grad_ptr + row_M[:, None] * grad_stride + column_D[None, :], valid_MD, other=0.0)
        grad_MD = grad_MD.to(tl.float32)
        x_MD = tl.load(x_ptr + row_M[:, None] * x_stride + column_D[None, :], valid_MD, other=0.0)
        scale_M = tl.load(scale_ptr + row_M, row_M < tokens, other=0.0)
        normed_MD = x_MD.to(tl.float32) * scale_M[:, None]
        if WEIGHT:
            sum_MD += grad_MD * normed_MD
        weighted_MD = grad_MD * weight_D[None, :]
        mean_M = tl.sum(weighted_MD * normed_MD, 1) / size
        grad_x_MD = (weighted_MD - normed_MD * mean_M[:, None]) * scale_M[:, None]
        if ADD:
            residual_MD = tl.load(
                residual_ptr + row_M[:, None] * residual_stride + column_D[None, :], valid_MD, other=0.0
            )
            grad_x_MD += residual_MD.to(tl.float32)
        tl.store(grad_x_ptr + row_M[:, None] * size + column_D[None, :], grad_x_MD, valid_MD)
    if WEIGHT:
        tl.store(partial_sums_ptr + program * size + column_D, tl.sum(sum_MD, 0), column_D < size)
