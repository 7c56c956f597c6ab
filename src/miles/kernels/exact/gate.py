"""What happens between the two projections of an MLP or an expert, and gates elsewhere: one form for both planes.

Shapes: R rows, I intermediate. Each step is rounded to the dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from miles.kernels.device_code import HAVE_TRITON
from miles.kernels.exact import elements
from miles.kernels.exact.elements import wide_of
from miles.kernels.gated import LIMIT, SLOPE, Kind, activate, halves
from miles.kernels.train_gated import gated_in_training


def gate(inner_R2I: Tensor, kind: Kind, *, interleaved: bool = False) -> Tensor:
    """The activation of one half of each row times the other; ``interleaved``, of each column times the next."""
    if inner_R2I.is_cuda and HAVE_TRITON and inner_R2I.dtype != torch.float64:
        return gated_in_training(inner_R2I, kind, interleaved=interleaved)
    return _Activated.apply(*halves(inner_R2I, interleaved), kind)  # pyright: ignore[reportReturnType]


def activated(x_RI: Tensor, kind: Kind) -> Tensor:
    """The activation alone."""
    return _Activated.apply(x_RI, None, kind)  # pyright: ignore[reportReturnType]


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid of each element, in its dtype."""
    return _Sigmoid.apply(x)  # pyright: ignore[reportReturnType]


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = elements.sigmoid(x.to(wide_of(x.dtype))).to(x.dtype)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (out,) = ctx.saved_tensors
        return grad * out * (1 - out)


class _Activated(torch.autograd.Function):
    """Keeps its inputs; the backward is that of ``gated.activate``, computed anew."""

    @staticmethod
    def forward(ctx: Any, gate_RI: Tensor, up_RI: Tensor | None, kind: Kind) -> Tensor:
        ctx.save_for_backward(gate_RI, up_RI)
        ctx.kind = kind
        return _forward(gate_RI, up_RI, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RI: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs = [x for x in ctx.saved_tensors if x is not None]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            out_RI = activate(leaves[0], leaves[1] if len(leaves) > 1 else None, ctx.kind)
        grads = torch.autograd.grad(out_RI, leaves, grad_RI)
        return grads[0], grads[1] if len(grads) > 1 else None, None


def _forward(gate_RI: Tensor, up_RI: Tensor | None, kind: Kind) -> Tensor:
    dtype, wide = gate_RI.dtype, wide_of(gate_RI.dtype)
    if kind == "swiglu_clamped":
        assert up_RI is not None
        gate_RI, up_RI = gate_RI.clamp(max=LIMIT), up_RI.clamp(-LIMIT, LIMIT) + 1
        return up_RI * (gate_RI * sigmoid(gate_RI * SLOPE))
    wide_RI = gate_RI.to(wide)
    if kind == "silu":
        out_RI = wide_RI * elements.sigmoid(wide_RI)
    elif kind == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2z.
        cube_RI = wide_RI * wide_RI * wide_RI
        out_RI = wide_RI * elements.sigmoid((wide_RI + cube_RI * 0.044715) * 1.5957691216057308)
    else:
        bound_RI = F.relu(wide_RI)
        out_RI = bound_RI * bound_RI
    out_RI = out_RI.to(dtype)
    return out_RI if up_RI is None else out_RI * up_RI
