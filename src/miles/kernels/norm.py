"""Root-mean-square normalisation, alone or of a sum: float32 statistics and scaling, rounded once.

Shapes: T tokens, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.arithmetic import exact
from miles.kernels.device_code import early, gdc_launch_dependents, gdc_wait, jit, ready, tl, trained, triton
from miles.kernels.exact import rows
from miles.kernels.train_norm import add_norm_in_training, norm_in_training


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """The last dimension at unit mean square, times the weight to which ``offset`` is added."""
    if exact():
        return rows.rms_norm(x_TD, weight_D, eps, offset=offset)
    if ready(x_TD):
        return _launch(x_TD, None, weight_D, eps, offset)[1]
    # Torch's own pass is the faster one in training, but it takes no offset.
    if offset and trained(x_TD):
        return norm_in_training(x_TD, weight_D, eps, offset=offset)
    if not offset:
        return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    scale_D = weight_D.to(torch.promote_types(weight_D.dtype, torch.float32)) + offset
    return F.rms_norm(x_TD.to(wide), weight_D.shape, scale_D, eps).to(x_TD.dtype)


def add_rms_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum of two, in their dtype, and that sum normalised."""
    if exact():
        return rows.add_rms_norm(x_TD, delta_TD, weight_D, eps, offset=offset)
    if ready(x_TD):
        return _launch(x_TD, delta_TD, weight_D, eps, offset)
    if offset and trained(x_TD):
        return add_norm_in_training(x_TD, delta_TD, weight_D, eps, offset=offset)
    sum_TD = x_TD + delta_TD
    return sum_TD, rms_norm(sum_TD, weight_D, eps, offset=offset)


def _launch(
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
    _norm_rows[(len(x_TD),)](
        *(x_TD, other_TD, weight_D, sum_TD, normed_TD),
        *(x_TD.stride(0), other_TD.stride(0), size, eps, offset),
        ADD=delta_TD is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **early(x_TD.device),
    )
    return sum_TD, normed_TD


@jit
def _norm_rows(
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
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column_D = tl.arange(0, BLOCK)
    inside_D = column_D < size
    weight_D = tl.load(weight_ptr + column_D, inside_D, other=0.0).to(tl.float32) + offset
    if EARLY:
        gdc_wait()
    x_D = tl.load(x_ptr + row * x_stride + column_D, inside_D, other=0.0)
    wide_D = x_D.to(tl.float32)
    if ADD:
        # What is normalised is the sum as it is kept: rounded.
        delta_D = tl.load(delta_ptr + row * delta_stride + column_D, inside_D, other=0.0)
        x_D = (wide_D + delta_D.to(tl.float32)).to(x_D.dtype)
        tl.store(sum_ptr + row * size + column_D, x_D, inside_D)
        wide_D = x_D.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide_D * wide_D, 0) / size + eps)
    tl.store(normed_ptr + row * size + column_D, wide_D * scale * weight_D, inside_D)
