"""Batch-invariant activations, gated and ungated: one implementation for engine and trainer.

Shapes: R rows, I intermediate. Each step is rounded to the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from miles.kernels.activation_kinds import is_limited, is_limited_before, read_limit
from miles.kernels.batch_invariant import elementwise
from miles.kernels.batch_invariant.elementwise import accumulation_dtype, tree_sum
from miles.kernels.fused.activation import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    ActivationKind,
    apply_activation,
    find_quantile,
    gated_activation_training,
    split_gate_up,
)
from miles.kernels.runtime.triton_compat import use_triton

# The softplus of more than this is the number itself, as in torch.
_SOFTPLUS_LINEAR = 20.0


def gated_activation(inner_R2I: Tensor, kind: ActivationKind, *, interleaved: bool = False) -> Tensor:
    """Activation of one half of each row times the other half (``interleaved``: of each column times the next)."""
    if use_triton(inner_R2I):
        return gated_activation_training(inner_R2I, kind, interleaved=interleaved)
    return _Activation.apply(*split_gate_up(inner_R2I, interleaved), kind)  # pyright: ignore[reportReturnType]


def ungated_activation(x_RI: Tensor, kind: ActivationKind) -> Tensor:
    """The activation alone."""
    return _Activation.apply(x_RI, None, kind)  # pyright: ignore[reportReturnType]


def sparsify_gates(
    gate_RI: Tensor, sparsity: float, channels: int, all_reduce: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """``fused.activation.sparsify_gates``, of a row whose ``channels`` may be on several tensor-parallel ranks."""
    wide_RI = gate_RI.to(accumulation_dtype(gate_RI.dtype))
    if all_reduce is None:
        mean_R1 = tree_sum(wide_RI) / channels
        distance_RI = wide_RI - mean_R1
        deviation_R1 = (tree_sum(distance_RI * distance_RI) / channels).sqrt()
    else:
        sums_R2 = torch.cat((tree_sum(wide_RI), tree_sum(wide_RI * wide_RI)), -1)
        mean_R1, square_R1 = (all_reduce(sums_R2) / channels).split(1, -1)
        deviation_R1 = (square_R1 - mean_R1 * mean_R1).clamp(min=0).sqrt()
    return (wide_RI - (mean_R1 + deviation_R1 * find_quantile(sparsity))).relu().to(gate_RI.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid of each element, in its dtype."""
    return _Sigmoid.apply(x)  # pyright: ignore[reportReturnType]


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) of each element, in its dtype."""
    return _Softplus.apply(x)  # pyright: ignore[reportReturnType]


class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.to(accumulation_dtype(x.dtype))
        log = elementwise.map_elements(torch.log1p, elementwise.map_elements(torch.exp, wide))
        return torch.where(wide > _SOFTPLUS_LINEAR, wide, log).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return torch.where(x > _SOFTPLUS_LINEAR, grad, grad * x.sigmoid())


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = elementwise.sigmoid(x.to(accumulation_dtype(x.dtype))).to(x.dtype)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (out,) = ctx.saved_tensors
        return grad * out * (1 - out)


class _Activation(torch.autograd.Function):
    """Saves its inputs; backward is that of ``fused.activation.apply_activation``, recomputed."""

    @staticmethod
    def forward(ctx: Any, gate_RI: Tensor, up_RI: Tensor | None, kind: ActivationKind) -> Tensor:
        ctx.save_for_backward(gate_RI, up_RI)
        ctx.kind = kind
        return _forward(gate_RI, up_RI, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RI: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs = [x for x in ctx.saved_tensors if x is not None]
        with torch.enable_grad():
            detached = [x.detach().requires_grad_() for x in inputs]
            out_RI = apply_activation(detached[0], detached[1] if len(detached) > 1 else None, ctx.kind)
        grads = torch.autograd.grad(out_RI, detached, grad_RI)
        return grads[0], grads[1] if len(grads) > 1 else None, None


def _forward(gate_RI: Tensor, up_RI: Tensor | None, kind: ActivationKind) -> Tensor:
    dtype, wide = gate_RI.dtype, accumulation_dtype(gate_RI.dtype)
    if is_limited(kind):
        assert up_RI is not None
        limit = read_limit(kind)
        gate_RI = gate_RI.clamp(max=limit) if is_limited_before(kind) else gate_RI
        wide_RI = gate_RI.to(wide)
        out_RI = (wide_RI * elementwise.sigmoid(wide_RI)).to(dtype).clamp(max=limit)
        return out_RI * up_RI.clamp(-limit, limit)
    if kind == "swiglu_clamped":
        assert up_RI is not None
        gate_RI, up_RI = gate_RI.clamp(max=SWIGLU_LIMIT), up_RI.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
        return up_RI * (gate_RI * sigmoid(gate_RI * SWIGLU_ALPHA))
    wide_RI = gate_RI.to(wide)
    if kind == "silu":
        out_RI = wide_RI * elementwise.sigmoid(wide_RI)
    elif kind == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2z.
        cube_RI = wide_RI * wide_RI * wide_RI
        out_RI = wide_RI * elementwise.sigmoid((wide_RI + cube_RI * 0.044715) * 1.5957691216057308)
    else:
        relu_RI = F.relu(wide_RI)
        out_RI = relu_RI * relu_RI
    out_RI = out_RI.to(dtype)
    return out_RI if up_RI is None else out_RI * up_RI
