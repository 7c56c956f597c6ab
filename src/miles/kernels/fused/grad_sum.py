"""Gradient accumulation in float32: adds a gradient in half precision to a float32 sum, as a Triton kernel.

The bits are those of torch's ``sum.add_(grad)``, whose kernel for two dtypes does not reach the memory bandwidth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton, use_triton_training

# Four elements a thread, so that both dtypes have one layout and nothing goes through shared memory.
_BLOCK, _WARPS = 1024, 8
# Of smaller gradients, launching the kernel takes the host longer than the kernel saves.
_MIN_SIZE = 1 << 22


def add_grad(total: Tensor | None, grad: Tensor) -> Tensor:
    """``total`` plus ``grad``, in place; without a ``total`` a float32 copy of ``grad``."""
    is_plain = grad.is_contiguous() and (total is None or total.is_contiguous())
    if grad.numel() < _MIN_SIZE or not (is_plain and use_triton_training(grad)):
        return grad.float() if total is None else total.add_(grad)
    return launch_add_grad(total, grad)


def launch_add_grad(total: Tensor | None, grad: Tensor) -> Tensor:
    """``add_grad`` of contiguous tensors in Triton."""
    out = torch.empty(grad.shape, dtype=torch.float32, device=grad.device) if total is None else total
    size = grad.numel()
    if size:
        with device_guard(grad):
            _add_grad_kernel[(triton.cdiv(size, _BLOCK),)](
                out, grad, size, ADD=total is not None, BLOCK=_BLOCK, num_warps=_WARPS
            )
    return out


@jit
def _add_grad_kernel(
    total_ptr: tl.tensor, grad_ptr: tl.tensor, size: tl.tensor, ADD: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    index_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid_B = index_B < size
    sum_B = tl.load(grad_ptr + index_B, valid_B, other=0.0).to(tl.float32)
    if ADD:
        sum_B += tl.load(total_ptr + index_B, valid_B, other=0.0)
    tl.store(total_ptr + index_B, sum_B, valid_B)
