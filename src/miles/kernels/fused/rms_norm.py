"""RMSNorm, plain or fused with a residual add: float32 statistics and scaling, rounded once.

Shapes: T tokens, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.batch_invariant import rms_norm as invariant
from miles.kernels.fused.rms_norm_autograd import add_rms_norm_training, rms_norm_training
from miles.kernels.numerics import Numerics
from miles.kernels.runtime.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
    use_triton_inference,
    use_triton_training,
)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0, numerics: Numerics) -> Tensor:
    """RMSNorm over the last dimension, with ``offset`` added to the weight."""
    if numerics.batch_invariant:
        return invariant.rms_norm(x_TD, weight_D, eps, offset=offset)
    if use_triton_inference(x_TD):
        return _launch_inference(x_TD, None, weight_D, eps, offset)[1]
    if use_triton_training(x_TD):
        return rms_norm_training(x_TD, weight_D, eps, offset=offset)
    if not offset:
        return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    scale_D = weight_D.to(torch.promote_types(weight_D.dtype, torch.float32)) + offset
    return F.rms_norm(x_TD.to(wide), weight_D.shape, scale_D, eps).to(x_TD.dtype)


def add_rms_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0, numerics: Numerics
) -> tuple[Tensor, Tensor]:
    """The sum of both inputs in their dtype, and its RMSNorm."""
    if numerics.batch_invariant:
        return invariant.add_rms_norm(x_TD, delta_TD, weight_D, eps, offset=offset)
    if use_triton_inference(x_TD):
        return _launch_inference(x_TD, delta_TD, weight_D, eps, offset)
    if use_triton_training(x_TD):
        return add_rms_norm_training(x_TD, delta_TD, weight_D, eps, offset=offset)
    sum_TD = x_TD + delta_TD
    return sum_TD, rms_norm(sum_TD, weight_D, eps, offset=offset, numerics=numerics)


def _launch_inference(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    shape, size = x_TD.shape, x_TD.shape[-1]
    x_TD = x_TD.reshape(-1, size)
    other_TD = x_TD if delta_TD is None else delta_TD.reshape(-1, size)
    if x_TD.stride(1) != 1 or other_TD.stride(1) != 1:
        x_TD, other_TD = x_TD.contiguous(), other_TD.contiguous()
    normed_TD = torch.empty(shape, dtype=x_TD.dtype, device=x_TD.device)
    sum_TD = x_TD if delta_TD is None else torch.empty_like(normed_TD)
    block = triton.next_power_of_2(size)
    tensors = (x_TD, other_TD, weight_D, sum_TD, normed_TD)
    scalars = (x_TD.stride(0), other_TD.stride(0), size, eps, offset)
    _rms_norm_kernel[(len(x_TD),)](
        *tensors,
        *scalars,
        ADD=delta_TD is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **pdl_options(x_TD.device),
    )
    return sum_TD, normed_TD


@jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    x_stride: tl.tensor,
    delta_stride: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column_D = tl.arange(0, BLOCK)
    valid_D = column_D < size
    weight_D = tl.load(weight_ptr + column_D, valid_D, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()
    x_D = tl.load(x_ptr + row * x_stride + column_D, valid_D, other=0.0)
    wide_D = x_D.to(tl.float32)
    if ADD:
        # The norm is that of the rounded sum.
        delta_D = tl.load(delta_ptr + row * delta_stride + column_D, valid_D, other=0.0)
        x_D = (wide_D + delta_D.to(tl.float32)).to(x_D.dtype)
        tl.store(sum_ptr + row * size + column_D, x_D, valid_D)
        wide_D = x_D.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide_D * wide_D, 0) / size + eps)
    tl.store(normed_ptr + row * size + column_D, wide_D * scale * weight_D, valid_D)
