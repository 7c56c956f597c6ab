"""Fused AdamW step in Triton: clips the gradient, updates moments and float32 master, rounds the master to the weight.

One pass over memory, 30 bytes a value, where clipping, torch's fused AdamW and the copy to the weights take 42.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton, use_triton_training

_BLOCK, _WARPS = 1024, 8
# Of smaller parameters, launching one kernel each takes the host longer than the kernel saves.
_MIN_SIZE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamwParams:
    """Settings of an AdamW update; ``step`` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


def can_fuse_adamw(weight: Tensor, master: Tensor, grad: Tensor) -> bool:
    """Whether the fused step covers this parameter: a large one in half precision on a GPU, contiguous."""
    return (
        use_triton_training(weight)
        and weight.numel() >= _MIN_SIZE
        and master.device == weight.device
        and grad.dtype == master.dtype == torch.float32
        and weight.is_contiguous()
        and grad.is_contiguous()
    )


def fused_adamw(
    weight: Tensor,
    master: Tensor,
    grad: Tensor,
    moments: tuple[Tensor, Tensor],
    params: AdamwParams,
    *,
    scale: Tensor | None = None,
) -> None:
    """Update ``master``, both ``moments`` and ``weight`` in place; the gradient is multiplied by ``scale``, a float32
    scalar on the device, and is not changed itself.
    """
    size = weight.numel()
    # Computed in float64 here, since a kernel's numbers are float32.
    correction = 1 - params.beta1**params.step
    numbers = (
        params.beta1,
        1 - params.beta1,
        params.beta2,
        1 - params.beta2,
        1 - params.lr * params.weight_decay,
        params.lr / correction,
        1 / math.sqrt(1 - params.beta2**params.step),
        params.eps,
    )
    tensors = (weight, master, grad, *moments, grad if scale is None else scale)
    with device_guard(weight):
        _adamw_kernel[(triton.cdiv(size, _BLOCK),)](
            *tensors, size, *numbers, SCALED=scale is not None, BLOCK=_BLOCK, num_warps=_WARPS
        )


@jit
def _adamw_kernel(
    weight_ptr: tl.tensor,
    master_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    size: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    decay: tl.tensor,
    step_size: tl.tensor,
    second_correction: tl.tensor,
    eps: tl.tensor,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid_B = index_B < size
    grad_B = tl.load(grad_ptr + index_B, valid_B, other=0.0)
    if SCALED:
        grad_B *= tl.load(scale_ptr)
    first_B = beta1 * tl.load(first_ptr + index_B, valid_B, other=0.0) + rest1 * grad_B
    second_B = beta2 * tl.load(second_ptr + index_B, valid_B, other=0.0) + rest2 * grad_B * grad_B
    denominator_B = tl.sqrt(second_B) * second_correction + eps
    master_B = decay * tl.load(master_ptr + index_B, valid_B, other=0.0)
    master_B -= step_size * (first_B / denominator_B)
    tl.store(first_ptr + index_B, first_B, valid_B)
    tl.store(second_ptr + index_B, second_B, valid_B)
    tl.store(master_ptr + index_B, master_B, valid_B)
    tl.store(weight_ptr + index_B, master_B, valid_B)
