"""LayerNorm fused with a residual add: float32 statistics and scaling, rounded once.

Shapes: T tokens, D features.

Blocks of vision towers have a LayerNorm behind each residual add. In inference both are one kernel, which reads two
tensors and writes two; elsewhere torch's kernels are used, whose rounding is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.numerics import Numerics
from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton, use_triton_inference


def add_layer_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, *, numerics: Numerics
) -> tuple[Tensor, Tensor]:
    """The sum of both inputs in their dtype, and its LayerNorm."""
    if numerics.batch_invariant or not use_triton_inference(x_TD):
        sum_TD = x_TD + delta_TD
        return sum_TD, F.layer_norm(sum_TD, weight_D.shape, weight_D, bias_D, eps)
    shape, size = x_TD.shape, x_TD.shape[-1]
    x_TD, delta_TD = x_TD.reshape(-1, size).contiguous(), delta_TD.reshape(-1, size).contiguous()
    sum_TD, normed_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    block = triton.next_power_of_2(size)
    if len(x_TD):
        with device_guard(x_TD):
            _add_layer_norm_kernel[(len(x_TD),)](
                x_TD,
                delta_TD,
                weight_D,
                bias_D,
                sum_TD,
                normed_TD,
                size,
                eps,
                BLOCK=block,
                num_warps=min(max(block // 512, 1), 16),
            )
    return sum_TD.view(shape), normed_TD.view(shape)


@jit
def _add_layer_norm_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * size
    column_D = tl.arange(0, BLOCK)
    valid_D = column_D < size
    x_D = tl.load(x_ptr + row + column_D, valid_D, other=0.0)
    delta_D = tl.load(delta_ptr + row + column_D, valid_D, other=0.0)
    weight_D = tl.load(weight_ptr + column_D, valid_D, other=0.0).to(tl.float32)
    bias_D = tl.load(bias_ptr + column_D, valid_D, other=0.0).to(tl.float32)
    # The norm is that of the rounded sum.
    x_D = (x_D.to(tl.float32) + delta_D.to(tl.float32)).to(x_D.dtype)
    tl.store(sum_ptr + row + column_D, x_D, valid_D)
    wide_D = x_D.to(tl.float32)
    centred_D = tl.where(valid_D, wide_D - tl.sum(wide_D, 0) / size, 0.0)
    scale = tl.rsqrt(tl.sum(centred_D * centred_D, 0) / size + eps)
    tl.store(normed_ptr + row + column_D, centred_D * scale * weight_D + bias_D, valid_D)
