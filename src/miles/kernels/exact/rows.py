"""Root-mean-square normalisation of rows, alone or of a sum: float32 statistics and scaling, rounded once.

Both planes call the one form there is on their device; the trainer's has a gradient. Shapes: T tokens, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.device_code import (
    HAVE_TRITON,
    early_in_engines,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    on,
    tl,
    triton,
)
from miles.kernels.exact.elements import summed, wide_of
from miles.kernels.train_norm import norm_backward


def rms_norm(x_TD: Tensor, weight_D: Tensor | None, eps: float, *, offset: float = 0.0) -> Tensor:
    """The last dimension at unit mean square, times the weight, if any, to which ``offset`` is added."""
    return _Norm.apply(x_TD, weight_D, eps, offset)  # pyright: ignore[reportReturnType]


def add_rms_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum of two, in their dtype, and that sum normalised."""
    return _AddNorm.apply(x_TD, delta_TD, weight_D, eps, offset)  # pyright: ignore[reportReturnType]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor | None, eps: float, offset: float) -> Tensor:
        rows_TD = x_TD.reshape(-1, x_TD.shape[-1]).contiguous()
        _, normed_TD, scale_T = _forward(rows_TD, None, weight_D, eps, offset)
        ctx.offset, ctx.shape = offset, x_TD.shape
        ctx.save_for_backward(rows_TD, weight_D, scale_T)
        return normed_TD.view(x_TD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_TD, weight_D, scale_T = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        grad_TD = grad_TD.reshape(rows_TD.shape)
        back_TD, weight = _backward(grad_TD, None, rows_TD, weight_D, scale_T, ctx.offset, wanted)
        return back_TD.view(ctx.shape), weight, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        rows_TD, delta_TD = (each.reshape(-1, each.shape[-1]).contiguous() for each in (x_TD, delta_TD))
        sum_TD, normed_TD, scale_T = _forward(rows_TD, delta_TD, weight_D, eps, offset)
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
        late_TD = None if stream_TD is None else stream_TD.reshape(sum_TD.shape)
        wanted = ctx.needs_input_grad[2]
        grad_TD = grad_TD.reshape(sum_TD.shape)
        back_TD, weight = _backward(grad_TD, late_TD, sum_TD, weight_D, scale_T, ctx.offset, wanted)
        back_TD = back_TD.view(ctx.shape)
        return back_TD, back_TD, weight, None, None


def _on_card(x_TD: Tensor) -> bool:
    return x_TD.is_cuda and HAVE_TRITON and x_TD.dtype != torch.float64


def _forward(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, the norm of it, and what each row was multiplied by."""
    if _on_card(x_TD):
        return _launch(x_TD, delta_TD, weight_D, eps, offset)
    sum_TD = x_TD if delta_TD is None else x_TD + delta_TD
    wide_TD = sum_TD.to(wide_of(x_TD.dtype))
    root_T1 = (summed(wide_TD * wide_TD) / x_TD.shape[1] + eps).sqrt()
    scale_T1 = torch.ones_like(root_T1) / root_T1
    normed_TD = wide_TD * scale_T1
    if weight_D is not None:
        normed_TD = normed_TD * (weight_D.to(wide_TD.dtype) + offset)
    return sum_TD, normed_TD.to(x_TD.dtype), scale_T1.squeeze(1)


def _backward(
    grad_TD: Tensor,
    late_TD: Tensor | None,
    x_TD: Tensor,
    weight_D: Tensor | None,
    scale_T: Tensor,
    offset: float,
    wanted: bool,
) -> tuple[Tensor, Tensor | None]:
    """dx = s (w dy - n mean(n w dy)) with n = s x, plus the gradient that comes along the sum."""
    if _on_card(x_TD) and weight_D is not None:
        grads = (each if each is None or each.stride(1) == 1 else each.contiguous() for each in (grad_TD, late_TD))
        first_TD, second_TD = grads
        assert first_TD is not None
        return norm_backward(first_TD, second_TD, x_TD, weight_D, scale_T, offset, wanted)
    wide = scale_T.dtype
    slope_TD, scale_T1 = grad_TD.to(wide), scale_T[:, None]
    normed_TD = x_TD.to(wide) * scale_T1
    weight = (slope_TD * normed_TD).sum(0).to(weight_D.dtype) if weight_D is not None and wanted else None
    if weight_D is not None:
        slope_TD = slope_TD * (weight_D.to(wide) + offset)
    back_TD = (slope_TD - normed_TD * (slope_TD * normed_TD).mean(1, keepdim=True)) * scale_T1
    if late_TD is not None:
        back_TD = back_TD + late_TD
    return back_TD.to(x_TD.dtype), weight


# -- device code ----------------------------------------------------------------------------


def _launch(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, size = x_TD.shape
    normed_TD = torch.empty_like(x_TD)
    sum_TD = x_TD if delta_TD is None else torch.empty_like(x_TD)
    scale_T = torch.empty(tokens, dtype=torch.float32, device=x_TD.device)
    block = triton.next_power_of_2(size)
    if tokens:
        with on(x_TD):
            _norm_rows[(tokens,)](
                *(x_TD, x_TD if delta_TD is None else delta_TD, x_TD if weight_D is None else weight_D),
                *(sum_TD, normed_TD, scale_T, 0.0 if delta_TD is None else 1.0, eps, offset),
                SIZE=size,
                WEIGHT=weight_D is not None,
                BLOCK=block,
                num_warps=min(max(block // 512, 1), 16),
                **early_in_engines(x_TD.device),
            )
    return sum_TD, normed_TD, scale_T


@jit
def _norm_rows(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    adds: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    SIZE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column_D = tl.arange(0, BLOCK)
    inside_D = column_D < SIZE
    weight_D = tl.zeros((BLOCK,), tl.float32)
    if WEIGHT:
        weight_D = tl.load(weight_ptr + column_D, inside_D, other=0.0).to(tl.float32) + offset
    if EARLY:
        gdc_wait()
    at_D = row * SIZE + column_D
    x_D = tl.load(x_ptr + at_D, inside_D, other=0.0)
    wide_D = x_D.to(tl.float32)
    # Whether there is anything to add is asked while it runs: a sum is normalised by the very code that norms alone.
    if adds > 0.0:
        # What is normalised is the sum as it is kept: rounded.
        x_D = (wide_D + tl.load(delta_ptr + at_D, inside_D, other=0.0).to(tl.float32)).to(x_D.dtype)
        tl.store(sum_ptr + at_D, x_D, inside_D)
        wide_D = x_D.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide_D * wide_D, 0) / SIZE + eps)
    tl.store(scale_ptr + row, scale)
    normed_D = wide_D * scale
    if WEIGHT:
        normed_D = normed_D * weight_D
    tl.store(normed_ptr + at_D, normed_D, inside_D)
