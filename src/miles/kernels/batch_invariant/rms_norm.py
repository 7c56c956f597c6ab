"""Batch-invariant RMSNorm, plain or fused with a residual add: float32 statistics and scaling, rounded once.

Engine and trainer call the same implementation of their device; the trainer's has a gradient. Shapes: T tokens, D
features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.batch_invariant.elementwise import accumulation_dtype, tree_sum
from miles.kernels.fused.rms_norm_autograd import AddNormFunction, NormFunction, NormKernels, rms_norm_backward
from miles.kernels.runtime.triton_compat import (
    device_guard,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options_inference,
    tl,
    triton,
    use_triton,
)


def rms_norm(x_TD: Tensor, weight_D: Tensor | None, eps: float, *, offset: float = 0.0) -> Tensor:
    """RMSNorm over the last dimension; ``offset`` is added to the weight, if any."""
    return NormFunction.apply(x_TD, weight_D, eps, offset, _KERNELS)  # pyright: ignore[reportReturnType]


def add_rms_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum of both inputs in their dtype, and its RMSNorm."""
    return AddNormFunction.apply(x_TD, delta_TD, weight_D, eps, offset, _KERNELS)  # pyright: ignore[reportReturnType]


def _forward(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, its norm, and the scale of each row."""
    x_TD = x_TD.contiguous()
    delta_TD = None if delta_TD is None else delta_TD.contiguous()
    if use_triton(x_TD):
        return _launch(x_TD, delta_TD, weight_D, eps, offset)
    sum_TD = x_TD if delta_TD is None else x_TD + delta_TD
    wide_TD = sum_TD.to(accumulation_dtype(x_TD.dtype))
    root_T1 = (tree_sum(wide_TD * wide_TD) / x_TD.shape[1] + eps).sqrt()
    scale_T1 = torch.ones_like(root_T1) / root_T1
    normed_TD = wide_TD * scale_T1
    if weight_D is not None:
        normed_TD = normed_TD * (weight_D.to(wide_TD.dtype) + offset)
    return sum_TD, normed_TD.to(x_TD.dtype), scale_T1.squeeze(1)


def _backward(
    grad_TD: Tensor,
    residual_TD: Tensor | None,
    x_TD: Tensor,
    weight_D: Tensor | None,
    scale_T: Tensor,
    offset: float,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """dx = s (w dy - n mean(n w dy)) with n = s x, plus the gradient of the residual stream."""
    if use_triton(x_TD) and weight_D is not None:
        return rms_norm_backward(grad_TD, residual_TD, x_TD, weight_D, scale_T, offset, needs_weight)
    wide = scale_T.dtype
    weighted_TD, scale_T1 = grad_TD.to(wide), scale_T[:, None]
    normed_TD = x_TD.to(wide) * scale_T1
    weight = (weighted_TD * normed_TD).sum(0).to(weight_D.dtype) if weight_D is not None and needs_weight else None
    if weight_D is not None:
        weighted_TD = weighted_TD * (weight_D.to(wide) + offset)
    grad_x_TD = (weighted_TD - normed_TD * (weighted_TD * normed_TD).mean(1, keepdim=True)) * scale_T1
    if residual_TD is not None:
        grad_x_TD = grad_x_TD + residual_TD
    return grad_x_TD.to(x_TD.dtype), weight


_KERNELS = NormKernels(_forward, _backward)


# -- Triton ---------------------------------------------------------------------------------


def _launch(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, size = x_TD.shape
    normed_TD = torch.empty_like(x_TD)
    sum_TD = x_TD if delta_TD is None else torch.empty_like(x_TD)
    scale_T = torch.empty(tokens, dtype=torch.float32, device=x_TD.device)
    block = triton.next_power_of_2(size)
    if tokens:
        with device_guard(x_TD):
            _rms_norm_kernel[(tokens,)](
                x_TD,
                x_TD if delta_TD is None else delta_TD,
                x_TD if weight_D is None else weight_D,
                sum_TD,
                normed_TD,
                scale_T,
                0.0 if delta_TD is None else 1.0,
                eps,
                offset,
                SIZE=size,
                WEIGHT=weight_D is not None,
                BLOCK=block,
                num_warps=min(max(block // 512, 1), 16),
                **pdl_options_inference(x_TD.device),
            )
    return sum_TD, normed_TD, scale_T


@jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    has_residual: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    SIZE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column_D = tl.arange(0, BLOCK)
    valid_D = column_D < SIZE
    weight_D = tl.zeros((BLOCK,), tl.float32)
    if WEIGHT:
        weight_D = tl.load(weight_ptr + column_D, valid_D, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()
    index_D = row * SIZE + column_D
    x_D = tl.load(x_ptr + index_D, valid_D, other=0.0)
    wide_D = x_D.to(tl.float32)
    # A run-time branch: a sum is normalized by the very code that normalizes alone.
    if has_residual > 0.0:
        # The norm is that of the rounded sum.
        x_D = (wide_D + tl.load(delta_ptr + index_D, valid_D, other=0.0).to(tl.float32)).to(x_D.dtype)
        tl.store(sum_ptr + index_D, x_D, valid_D)
        wide_D = x_D.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide_D * wide_D, 0) / SIZE + eps)
    tl.store(scale_ptr + row, scale)
    normed_D = wide_D * scale
    if WEIGHT:
        normed_D = normed_D * weight_D
    tl.store(normed_ptr + index_D, normed_D, valid_D)
