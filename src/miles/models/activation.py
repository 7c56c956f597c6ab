"""What happens between the two projections of an MLP or an expert.

Shapes: R rows, I intermediate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.models.spec import Activation

# The clamped gate's limit and slope, the same in every model that has it.
_LIMIT = 7.0
_SLOPE = 1.702


class _Clamped(torch.autograd.Function):
    """A bounded ``gate`` times its sigmoid, times a bounded ``up`` plus one.

    Step by step it would keep six tensors for backward; this keeps its two inputs and computes the rest again.
    """

    @staticmethod
    def forward(ctx: Any, gate_RI: Tensor, up_RI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_RI, up_RI)
        gate_RI, up_RI = gate_RI.clamp(max=_LIMIT), up_RI.clamp(-_LIMIT, _LIMIT)
        return (up_RI + 1) * (gate_RI * (gate_RI * _SLOPE).sigmoid())

    @staticmethod
    def backward(ctx: Any, grad_RI: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        free_RI, up_RI = ctx.saved_tensors
        gate_RI = free_RI.clamp(max=_LIMIT)
        part_RI = (gate_RI * _SLOPE).sigmoid()
        slope_RI = part_RI * (1 + _SLOPE * gate_RI * (1 - part_RI)) * (free_RI <= _LIMIT)
        up_slope_RI = gate_RI * part_RI * (up_RI.abs() <= _LIMIT)
        return grad_RI * (up_RI.clamp(-_LIMIT, _LIMIT) + 1) * slope_RI, grad_RI * up_slope_RI


def activate(gate_RI: Tensor, up_RI: Tensor | None, kind: Activation) -> Tensor:
    """The activation of ``gate``, times ``up`` where there is one."""
    if kind == "swiglu_clamped":
        assert up_RI is not None
        return _Clamped.apply(gate_RI, up_RI)  # pyright: ignore[reportReturnType]
    if kind == "silu":
        out_RI = F.silu(gate_RI)
    elif kind == "gelu_tanh":
        out_RI = F.gelu(gate_RI, approximate="tanh")
    else:
        out_RI = F.relu(gate_RI).square()
    return out_RI if up_RI is None else out_RI * up_RI
