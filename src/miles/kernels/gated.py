"""What happens between the two projections of an MLP or an expert, gate and up side by side in one tensor.

Shapes: R rows, I intermediate. Each step is rounded to the dtype as torch rounds it, so engine and trainer agree.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.device_code import jit, ready, tl, triton

Kind = Literal["silu", "gelu_tanh", "relu2", "swiglu_clamped"]

# The clamped gate's limit and slope, the same in every model that has it.
LIMIT = 7.0
SLOPE = 1.702

_BLOCK = 1024


class _Clamped(torch.autograd.Function):
    """A bounded ``gate`` times its sigmoid, times a bounded ``up`` plus one.

    Step by step it would keep six tensors for backward; this keeps its two inputs and computes the rest again.
    """

    @staticmethod
    def forward(ctx: Any, gate_RI: Tensor, up_RI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_RI, up_RI)
        gate_RI, up_RI = gate_RI.clamp(max=LIMIT), up_RI.clamp(-LIMIT, LIMIT)
        return (up_RI + 1) * (gate_RI * (gate_RI * SLOPE).sigmoid())

    @staticmethod
    def backward(ctx: Any, grad_RI: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        free_RI, up_RI = ctx.saved_tensors
        gate_RI = free_RI.clamp(max=LIMIT)
        part_RI = (gate_RI * SLOPE).sigmoid()
        slope_RI = part_RI * (1 + SLOPE * gate_RI * (1 - part_RI)) * (free_RI <= LIMIT)
        up_slope_RI = gate_RI * part_RI * (up_RI.abs() <= LIMIT)
        return grad_RI * (up_RI.clamp(-LIMIT, LIMIT) + 1) * slope_RI, grad_RI * up_slope_RI


def activate(gate_RI: Tensor, up_RI: Tensor | None, kind: Kind) -> Tensor:
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


def gated(inner_R2I: Tensor, kind: Kind, *, interleaved: bool = False) -> Tensor:
    """The activation of one half of each row times the other; ``interleaved``, of each column times the next."""
    if ready(inner_R2I):
        return _launch(inner_R2I, kind, interleaved)
    return activate(*halves(inner_R2I, interleaved), kind)


def halves(inner_R2I: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """What is activated of a row, and what that is multiplied with."""
    if interleaved:
        gate_RI, up_RI = inner_R2I.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        gate_RI, up_RI = inner_R2I.chunk(2, dim=-1)
    return gate_RI, up_RI


def _launch(inner_R2I: Tensor, kind: Kind, interleaved: bool) -> Tensor:
    shape, size = inner_R2I.shape, inner_R2I.shape[-1] // 2
    inner_R2I = inner_R2I.reshape(-1, 2 * size)
    if inner_R2I.stride(1) != 1:
        inner_R2I = inner_R2I.contiguous()
    out_RI = torch.empty((*shape[:-1], size), dtype=inner_R2I.dtype, device=inner_R2I.device)
    block = min(_BLOCK, triton.next_power_of_2(size))
    _gate_rows[(len(inner_R2I), triton.cdiv(size, block))](
        *(inner_R2I, out_RI, inner_R2I.stride(0), size),
        KIND=kind,
        INTERLEAVED=interleaved,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 4),
    )
    return out_RI


@jit
def combine(gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr, GATED: tl.constexpr) -> tl.tensor:
    """``activate`` within a kernel: takes the dtype of the model, computes in float32, rounds at each of its steps."""
    g = gate.to(tl.float32)
    if KIND == "swiglu_clamped":
        g = tl.minimum(g, 7.0, propagate_nan=tl.PropagateNan.ALL)
        u = tl.clamp(up.to(tl.float32), -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        part = tl.sigmoid((g * 1.702).to(gate.dtype).to(tl.float32)).to(gate.dtype).to(tl.float32)
        return (u.to(gate.dtype).to(tl.float32) * (g * part).to(gate.dtype).to(tl.float32)).to(gate.dtype)
    if KIND == "silu":
        g = g * tl.sigmoid(g)
    elif KIND == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2z, which needs no tanh of any vendor's.
        g = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    else:
        g = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        g = g * g
    out = g.to(gate.dtype)
    if GATED:
        out = (out.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    return out


@jit
def _gate_rows(
    inner_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column_I = first + tl.arange(0, BLOCK)
    inside_I = column_I < size
    inner_ptr += row * stride
    if INTERLEAVED:
        column_I2 = 2 * first + tl.arange(0, 2 * BLOCK)
        both_I2 = tl.load(inner_ptr + column_I2, column_I2 < 2 * size, other=0.0)
        gate_I, up_I = tl.split(tl.reshape(both_I2, (BLOCK, 2)))
    else:
        gate_I = tl.load(inner_ptr + column_I, inside_I, other=0.0)
        up_I = tl.load(inner_ptr + size + column_I, inside_I, other=0.0)
    tl.store(out_ptr + row * size + column_I, combine(gate_I, up_I, KIND, True), inside_I)
