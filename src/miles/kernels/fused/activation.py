"""Gated activations (SwiGLU, GeGLU, ...) of an MLP or expert, gate and up side by side in one tensor: forward and
backward; and activation sparsity (Gaussian top-k).

Shapes: R rows, I intermediate. Each step is rounded to the dtype as torch rounds it, so engine and trainer agree. The
backward reads the projection's output again and writes the gradient of both halves; nothing else is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from miles.kernels.activation_kinds import (
    ActivationKind,
    LimitedSwiglu,
    is_limited,
    is_limited_before,
    read_limit,
)
from miles.kernels.runtime.triton_compat import (
    constexpr_function,
    device_guard,
    jit,
    tl,
    triton,
    use_triton_inference,
    use_triton_training,
)

__all__ = [
    "SWIGLU_ALPHA",
    "SWIGLU_LIMIT",
    "ActivationKind",
    "activate_and_multiply",
    "apply_activation",
    "apply_limited_swiglu",
    "gated_activation",
    "gated_activation_inference",
    "gated_activation_training",
    "split_gate_up",
]

# Limit and slope of the clamped SwiGLU, the same in every model that has it.
SWIGLU_LIMIT = 7.0
SWIGLU_ALPHA = 1.702

_BLOCK = 1024

# The same inside kernels, where the kind is a constant.
_is_limited_kind = constexpr_function(is_limited)
_is_limited_before_kind = constexpr_function(is_limited_before)
_limit_of_kind = constexpr_function(read_limit)


class _ClampedSwiglu(torch.autograd.Function):
    """A clamped ``gate`` times its sigmoid, times a clamped ``up`` plus one.

    Step by step autograd would save six tensors; this saves the two inputs and recomputes the rest.
    """

    @staticmethod
    def forward(ctx: Any, gate_RI: Tensor, up_RI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_RI, up_RI)
        gate_RI, up_RI = gate_RI.clamp(max=SWIGLU_LIMIT), up_RI.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (up_RI + 1) * (gate_RI * (gate_RI * SWIGLU_ALPHA).sigmoid())

    @staticmethod
    def backward(ctx: Any, grad_RI: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        unclamped_RI, up_RI = ctx.saved_tensors
        gate_RI = unclamped_RI.clamp(max=SWIGLU_LIMIT)
        sigmoid_RI = (gate_RI * SWIGLU_ALPHA).sigmoid()
        gate_grad_RI = sigmoid_RI * (1 + SWIGLU_ALPHA * gate_RI * (1 - sigmoid_RI)) * (unclamped_RI <= SWIGLU_LIMIT)
        up_grad_RI = gate_RI * sigmoid_RI * (up_RI.abs() <= SWIGLU_LIMIT)
        return grad_RI * (up_RI.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1) * gate_grad_RI, grad_RI * up_grad_RI


class _LimitedSwigluFunction(torch.autograd.Function):
    """SwiGLU with a limit; saves its two inputs and recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, gate_RI: Tensor, up_RI: Tensor, kind: LimitedSwiglu) -> Tensor:
        ctx.save_for_backward(gate_RI, up_RI)
        ctx.kind = kind
        limit = read_limit(kind)
        if is_limited_before(kind):
            return F.silu(gate_RI.clamp(max=limit)) * up_RI.clamp(-limit, limit)
        return F.silu(gate_RI).clamp(max=limit) * up_RI.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, grad_RI: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate_RI, up_RI = ctx.saved_tensors
        limit, is_before = read_limit(ctx.kind), is_limited_before(ctx.kind)
        clamped_RI = gate_RI.clamp(max=limit) if is_before else gate_RI
        sigmoid_RI = clamped_RI.sigmoid()
        silu_RI = clamped_RI * sigmoid_RI
        inside_RI = gate_RI <= limit if is_before else silu_RI <= limit
        slope_RI = sigmoid_RI * (1 + clamped_RI * (1 - sigmoid_RI)) * inside_RI
        up_slope_RI = silu_RI.clamp(max=limit) * (up_RI.abs() <= limit)
        return grad_RI * up_RI.clamp(-limit, limit) * slope_RI, grad_RI * up_slope_RI, None


def apply_limited_swiglu(gate_RI: Tensor, up_RI: Tensor, kind: LimitedSwiglu) -> Tensor:
    """SwiGLU with the limit of its kind."""
    return _LimitedSwigluFunction.apply(gate_RI, up_RI, kind)  # pyright: ignore[reportReturnType]


def apply_activation(gate_RI: Tensor, up_RI: Tensor | None, kind: ActivationKind) -> Tensor:
    """The activation of ``gate``, times ``up`` if given."""
    if is_limited(kind):
        assert up_RI is not None
        return apply_limited_swiglu(gate_RI, up_RI, LimitedSwiglu(kind))
    if kind == "swiglu_clamped":
        assert up_RI is not None
        return _ClampedSwiglu.apply(gate_RI, up_RI)  # pyright: ignore[reportReturnType]
    if kind == "silu":
        out_RI = F.silu(gate_RI)
    elif kind == "gelu_tanh":
        out_RI = F.gelu(gate_RI, approximate="tanh")
    else:
        out_RI = F.relu(gate_RI).square()
    return out_RI if up_RI is None else out_RI * up_RI


def sparsify_gates(gate_RI: Tensor, sparsity: float) -> Tensor:
    """Return how far each gate is above the cutoff of its row, 0 below it.

    The cutoff is the quantile of order ``sparsity`` of a normal distribution with their mean and variance.
    """
    mean_R1 = gate_RI.mean(-1, keepdim=True)
    deviation_R1 = gate_RI.std(-1, keepdim=True, correction=0)
    return (gate_RI - (mean_R1 + deviation_R1 * find_quantile(sparsity))).relu()


def sparsify_sharded_gates(
    gate_RI: Tensor, sparsity: float, channels: int, all_reduce: Callable[[Tensor], Tensor]
) -> Tensor:
    """``sparsify_gates`` of one tensor-parallel rank's gates, of ``channels`` on all ranks; padding must be zeros."""
    wide_RI = gate_RI.to(torch.promote_types(gate_RI.dtype, torch.float32))
    sums_R2 = torch.stack((wide_RI.sum(-1), wide_RI.square().sum(-1)), -1)
    mean_R1, square_R1 = (all_reduce(sums_R2) / channels).split(1, -1)
    deviation_R1 = (square_R1 - mean_R1.square()).clamp(min=0).sqrt()
    return (gate_RI - (mean_R1 + deviation_R1 * find_quantile(sparsity)).to(gate_RI.dtype)).relu()


@cache
def find_quantile(order: float) -> float:
    return NormalDist().inv_cdf(order)


def gated_activation_inference(inner_R2I: Tensor, kind: ActivationKind, *, interleaved: bool = False) -> Tensor:
    """``gated_activation`` of the engine, without a gradient in Triton."""
    if use_triton_inference(inner_R2I):
        return _launch_inference(inner_R2I, kind, interleaved)
    return apply_activation(*split_gate_up(inner_R2I, interleaved), kind)


def gated_activation(inner_R2I: Tensor, kind: ActivationKind, *, interleaved: bool = False) -> Tensor:
    """Activation of one half of each row times the other half (``interleaved``: of each column times the next)."""
    if use_triton_training(inner_R2I):
        return gated_activation_training(inner_R2I, kind, interleaved=interleaved)
    return gated_activation_inference(inner_R2I, kind, interleaved=interleaved)


def gated_activation_training(inner_R2I: Tensor, kind: ActivationKind, *, interleaved: bool = False) -> Tensor:
    """``gated_activation`` in Triton with a gradient."""
    return _GatedActivation.apply(inner_R2I, kind, interleaved)  # pyright: ignore[reportReturnType]


def split_gate_up(inner_R2I: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The gate and up parts of a row."""
    if interleaved:
        gate_RI, up_RI = inner_R2I.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        gate_RI, up_RI = inner_R2I.chunk(2, dim=-1)
    return gate_RI, up_RI


def _launch_inference(inner_R2I: Tensor, kind: ActivationKind, interleaved: bool) -> Tensor:
    shape, size = inner_R2I.shape, inner_R2I.shape[-1] // 2
    inner_R2I = inner_R2I.reshape(-1, 2 * size)
    if inner_R2I.stride(1) != 1:
        inner_R2I = inner_R2I.contiguous()
    out_RI = torch.empty((*shape[:-1], size), dtype=inner_R2I.dtype, device=inner_R2I.device)
    block = min(_BLOCK, triton.next_power_of_2(size))
    _gated_inference_kernel[(len(inner_R2I), triton.cdiv(size, block))](
        inner_R2I,
        out_RI,
        inner_R2I.stride(0),
        size,
        ACTIVATION=kind,
        INTERLEAVED=interleaved,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 4),
    )
    return out_RI


@jit
def activate_and_multiply(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr, GATED: tl.constexpr) -> tl.tensor:
    """``apply_activation`` inside a kernel: takes the model's dtype, computes in float32, rounds at each step."""
    g = gate.to(tl.float32)
    if _is_limited_kind(ACTIVATION):
        LIMIT: tl.constexpr = _limit_of_kind(ACTIVATION)
        if _is_limited_before_kind(ACTIVATION):
            g = tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(gate.dtype).to(tl.float32)
        g = (g * tl.sigmoid(g)).to(gate.dtype).to(tl.float32)
        g = tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(gate.dtype).to(tl.float32)
        u = tl.clamp(up.to(tl.float32), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(gate.dtype)
        return (g * u.to(tl.float32)).to(gate.dtype)
    if ACTIVATION == "swiglu_clamped":
        g = tl.minimum(g, 7.0, propagate_nan=tl.PropagateNan.ALL)
        u = tl.clamp(up.to(tl.float32), -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        sigmoid = tl.sigmoid((g * 1.702).to(gate.dtype).to(tl.float32)).to(gate.dtype).to(tl.float32)
        return (u.to(gate.dtype).to(tl.float32) * (g * sigmoid).to(gate.dtype).to(tl.float32)).to(gate.dtype)
    if ACTIVATION == "silu":
        g = g * tl.sigmoid(g)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2z, which is available on every vendor.
        g = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    else:
        g = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        g = g * g
    out = g.to(gate.dtype)
    if GATED:
        out = (out.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    return out


@jit
def _gated_inference_kernel(
    inner_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column_I = first + tl.arange(0, BLOCK)
    valid_I = column_I < size
    inner_ptr += row * stride
    if INTERLEAVED:
        column_I2 = 2 * first + tl.arange(0, 2 * BLOCK)
        pairs_I2 = tl.load(inner_ptr + column_I2, column_I2 < 2 * size, other=0.0)
        gate_I, up_I = tl.split(tl.reshape(pairs_I2, (BLOCK, 2)))
    else:
        gate_I = tl.load(inner_ptr + column_I, valid_I, other=0.0)
        up_I = tl.load(inner_ptr + size + column_I, valid_I, other=0.0)
    tl.store(out_ptr + row * size + column_I, activate_and_multiply(gate_I, up_I, ACTIVATION, True), valid_I)


# -- training ---------------------------------------------------------------------------------


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner_R2I: Tensor, kind: ActivationKind, interleaved: bool) -> Tensor:
        shape, size = inner_R2I.shape, inner_R2I.shape[-1] // 2
        rows_R2I = inner_R2I.reshape(-1, 2 * size).contiguous()
        ctx.kind = kind
        ctx.interleaved = interleaved
        ctx.shape = shape
        ctx.save_for_backward(rows_R2I)
        out_RI = torch.empty((*shape[:-1], size), dtype=inner_R2I.dtype, device=inner_R2I.device)
        _launch_training(_gated_forward_kernel, rows_R2I, (out_RI,), kind, interleaved)
        return out_RI

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RI: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (rows_R2I,) = ctx.saved_tensors
        grad_R2I = torch.empty_like(rows_R2I)
        _launch_training(_gated_backward_kernel, rows_R2I, (grad_RI.contiguous(), grad_R2I), ctx.kind, ctx.interleaved)
        return grad_R2I.view(ctx.shape), None, None


def _launch_training(
    kernel: Any, inner_R2I: Tensor, tensors: tuple[Tensor, ...], kind: ActivationKind, interleaved: bool
) -> None:
    rows, size = len(inner_R2I), inner_R2I.shape[1] // 2
    if not rows:
        return
    block = min(_BLOCK, triton.next_power_of_2(size))
    with device_guard(inner_R2I):
        kernel[(rows, triton.cdiv(size, block))](
            inner_R2I,
            *tensors,
            size,
            ACTIVATION=kind,
            INTERLEAVED=interleaved,
            BLOCK=block,
            num_warps=min(max(block // 256, 1), 4),
        )


@jit
def _gate_up_offsets(row: tl.tensor, column_I: tl.tensor, size: tl.tensor, INTERLEAVED: tl.constexpr) -> tuple:
    """Offsets of gates and ups."""
    if INTERLEAVED:
        gate_I = row * 2 * size + 2 * column_I
        up_I = gate_I + 1
    else:
        gate_I = row * 2 * size + column_I
        up_I = gate_I + size
    return gate_I, up_I


@jit
def _gated_forward_kernel(
    inner_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid_I = column_I < size
    gate_at_I, up_at_I = _gate_up_offsets(row, column_I, size, INTERLEAVED)
    gate_I = tl.load(inner_ptr + gate_at_I, valid_I, other=0.0)
    up_I = tl.load(inner_ptr + up_at_I, valid_I, other=0.0)
    tl.store(out_ptr + row * size + column_I, activate_and_multiply(gate_I, up_I, ACTIVATION, True), valid_I)


@jit
def _activation_grads(g: tl.tensor, u: tl.tensor, ACTIVATION: tl.constexpr) -> tuple:
    """Derivatives of the product by the gate and by the up part."""
    if _is_limited_kind(ACTIVATION):
        LIMIT: tl.constexpr = _limit_of_kind(ACTIVATION)
        clamped = tl.minimum(g, LIMIT) if _is_limited_before_kind(ACTIVATION) else g
        sigmoid = tl.sigmoid(clamped)
        silu = clamped * sigmoid
        inside = g if _is_limited_before_kind(ACTIVATION) else silu
        gate_grad = sigmoid * (1 + clamped * (1 - sigmoid)) * tl.clamp(u, -LIMIT, LIMIT)
        gate_grad = tl.where(inside <= LIMIT, gate_grad, 0.0)
        up_grad = tl.where(tl.abs(u) <= LIMIT, tl.minimum(silu, LIMIT), 0.0)
    elif ACTIVATION == "swiglu_clamped":
        clamped = tl.minimum(g, 7.0)
        sigmoid = tl.sigmoid(clamped * 1.702)
        gate_grad = sigmoid * (1 + 1.702 * clamped * (1 - sigmoid)) * (tl.clamp(u, -7.0, 7.0) + 1)
        gate_grad = tl.where(g <= 7.0, gate_grad, 0.0)
        up_grad = tl.where(tl.abs(u) <= 7.0, clamped * sigmoid, 0.0)
    elif ACTIVATION == "silu":
        sigmoid = tl.sigmoid(g)
        gate_grad = sigmoid * (1 + g * (1 - sigmoid)) * u
        up_grad = g * sigmoid
    elif ACTIVATION == "gelu_tanh":
        # g times the sigmoid of 2z; the derivative of 2z with z = 0.797885 (g + 0.044715 g^3) is the last factor.
        sigmoid = tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
        gate_grad = (sigmoid + g * sigmoid * (1 - sigmoid) * 1.5957691216057308 * (1 + 0.134145 * g * g)) * u
        up_grad = g * sigmoid
    else:
        clamped = tl.maximum(g, 0.0)
        gate_grad = 2 * clamped * u
        up_grad = clamped * clamped
    return gate_grad, up_grad


@jit
def _gated_backward_kernel(
    inner_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    grad_inner_ptr: tl.tensor,
    size: tl.tensor,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid_I = column_I < size
    gate_at_I, up_at_I = _gate_up_offsets(row, column_I, size, INTERLEAVED)
    gate_I = tl.load(inner_ptr + gate_at_I, valid_I, other=0.0).to(tl.float32)
    up_I = tl.load(inner_ptr + up_at_I, valid_I, other=0.0).to(tl.float32)
    grad_I = tl.load(grad_ptr + row * size + column_I, valid_I, other=0.0).to(tl.float32)
    gate_grad_I, up_grad_I = _activation_grads(gate_I, up_I, ACTIVATION)
    tl.store(grad_inner_ptr + gate_at_I, grad_I * gate_grad_I, valid_I)
    tl.store(grad_inner_ptr + up_at_I, grad_I * up_grad_I, valid_I)
