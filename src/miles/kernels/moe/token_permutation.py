"""Fused token permutation for MoE training: tokens' rows summed out of expert order, and gradients spread into it.

Shapes: T tokens, k experts per token, R = T * k rows, sorted by expert, D features.

What ``grouped_gemm`` does by a gather and a matmul or sum, in Triton and in one pass over the rows: nothing of their
size is written in between. Sums are in float32, in the order of a token's choices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton

_BLOCK = 2048


def sum_choices(x_RD: Tensor, weights_Tk: Tensor | None, place_R: Tensor, per_token: int) -> Tensor:
    """The sum of each token's rows, [T, D], times their weights if there are any; flat row f is at ``place_R[f]``."""
    x_RD = x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()
    rows, size = x_RD.shape
    out_TD = x_RD.new_empty(rows // per_token, size)
    block = min(triton.next_power_of_2(size), _BLOCK)
    if out_TD.numel():
        with device_guard(x_RD):
            _sum_choices_kernel[(len(out_TD), triton.cdiv(size, block))](
                x_RD,
                x_RD if weights_Tk is None else weights_Tk.contiguous(),
                place_R,
                out_TD,
                x_RD.stride(0),
                size,
                PER_TOKEN=per_token,
                WEIGHED=weights_Tk is not None,
                BLOCK=block,
                num_warps=max(1, min(block // 256, 8)),
            )
    return out_TD


def spread_gradient(
    grad_TD: Tensor, x_RD: Tensor, weights_Tk: Tensor, order_R: Tensor, *, needs_weights: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The gradients of ``sum_choices``: of the sorted rows, and of the weights; sorted row r is flat ``order_R[r]``."""
    grad_TD = grad_TD if grad_TD.stride(1) == 1 else grad_TD.contiguous()
    x_RD = x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()
    rows, size = x_RD.shape
    grad_x_RD = torch.empty(rows, size, dtype=x_RD.dtype, device=x_RD.device)
    grad_weights_Tk = torch.empty_like(weights_Tk, memory_format=torch.contiguous_format)
    block = min(triton.next_power_of_2(size), _BLOCK)
    if rows:
        with device_guard(x_RD):
            _spread_gradient_kernel[(rows,)](
                grad_TD,
                x_RD,
                weights_Tk.contiguous(),
                order_R,
                grad_x_RD,
                grad_weights_Tk,
                grad_TD.stride(0),
                x_RD.stride(0),
                size,
                PER_TOKEN=weights_Tk.shape[1],
                WEIGHTS=needs_weights,
                BLOCK=block,
                num_warps=max(1, min(block // 256, 8)),
            )
    return grad_x_RD, grad_weights_Tk if needs_weights else None


class CombineFunction(torch.autograd.Function):
    """``sum_choices`` with weights."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weights_Tk: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, weights_Tk, order_R)
        return sum_choices(x_RD, weights_Tk, place_R, weights_Tk.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_RD, weights_Tk, order_R = ctx.saved_tensors
        grads = spread_gradient(grad_TD, x_RD, weights_Tk, order_R, needs_weights=ctx.needs_input_grad[1])
        return *grads, None, None


@jit
def _sum_choices_kernel(
    x_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    place_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    PER_TOKEN: tl.constexpr,
    WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column_D = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid_D = column_D < size
    sum_D = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        row = tl.load(place_ptr + token * PER_TOKEN + choice)
        x_D = tl.load(x_ptr + row * stride + column_D, valid_D, other=0.0).to(tl.float32)
        if WEIGHED:
            x_D *= tl.load(weights_ptr + token * PER_TOKEN + choice).to(tl.float32)
        sum_D += x_D
    tl.store(out_ptr + token * size + column_D, sum_D, valid_D)


@jit
def _spread_gradient_kernel(
    grad_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    order_ptr: tl.tensor,
    grad_x_ptr: tl.tensor,
    grad_weights_ptr: tl.tensor,
    grad_stride: tl.tensor,
    x_stride: tl.tensor,
    size: tl.tensor,
    PER_TOKEN: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    flat = tl.load(order_ptr + row)
    weight = tl.load(weights_ptr + flat).to(tl.float32)
    dot_D = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):  # pyright: ignore[reportArgumentType]
        column_D = start + tl.arange(0, BLOCK)
        valid_D = column_D < size
        grad_D = tl.load(grad_ptr + flat // PER_TOKEN * grad_stride + column_D, valid_D, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + row * size + column_D, weight * grad_D, valid_D)
        if WEIGHTS:
            dot_D += grad_D * tl.load(x_ptr + row * x_stride + column_D, valid_D, other=0.0).to(tl.float32)
    if WEIGHTS:
        tl.store(grad_weights_ptr + flat, tl.sum(dot_D, 0))
