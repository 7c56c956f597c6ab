"""The gated activation of an MLP or an expert in training: one pass forward and one back.

Shapes: R rows, I intermediate. Rounded as ``gated`` rounds it. The backward reads the projection's output again and
writes the gradient of both of its halves; nothing between the two projections is kept but that output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.device_code import jit, on, tl, trained, triton
from miles.kernels.gated import Kind, combine, gated

_BLOCK = 1024


def gate(inner_R2I: Tensor, kind: Kind, *, interleaved: bool = False) -> Tensor:
    """As ``gated.gated``, for engine and trainer alike."""
    if trained(inner_R2I):
        return gated_in_training(inner_R2I, kind, interleaved=interleaved)
    return gated(inner_R2I, kind, interleaved=interleaved)


def gated_in_training(inner_R2I: Tensor, kind: Kind, *, interleaved: bool = False) -> Tensor:
    """As ``gated.gated``, with a gradient."""
    return _Gated.apply(inner_R2I, kind, interleaved)  # pyright: ignore[reportReturnType]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner_R2I: Tensor, kind: Kind, interleaved: bool) -> Tensor:
        shape, size = inner_R2I.shape, inner_R2I.shape[-1] // 2
        rows_R2I = inner_R2I.reshape(-1, 2 * size).contiguous()
        ctx.kind, ctx.interleaved, ctx.shape = kind, interleaved, shape
        ctx.save_for_backward(rows_R2I)
        out_RI = torch.empty((*shape[:-1], size), dtype=inner_R2I.dtype, device=inner_R2I.device)
        _launch(_gate_forward, rows_R2I, (out_RI,), kind, interleaved)
        return out_RI

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RI: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (rows_R2I,) = ctx.saved_tensors
        back_R2I = torch.empty_like(rows_R2I)
        _launch(_gate_backward, rows_R2I, (grad_RI.contiguous(), back_R2I), ctx.kind, ctx.interleaved)
        return back_R2I.view(ctx.shape), None, None


def _launch(kernel: Any, inner_R2I: Tensor, others: tuple[Tensor, ...], kind: Kind, interleaved: bool) -> None:
    rows, size = len(inner_R2I), inner_R2I.shape[1] // 2
    if not rows:
        return
    block = min(_BLOCK, triton.next_power_of_2(size))
    with on(inner_R2I):
        kernel[(rows, triton.cdiv(size, block))](
            *(inner_R2I, *others, size),
            KIND=kind,
            INTERLEAVED=interleaved,
            BLOCK=block,
            num_warps=min(max(block // 256, 1), 4),
        )


@jit
def _places(row: tl.tensor, column_I: tl.tensor, size: tl.tensor, INTERLEAVED: tl.constexpr) -> tuple:
    """Where gates and ups lie."""
    if INTERLEAVED:
        gate_I = row * 2 * size + 2 * column_I
        up_I = gate_I + 1
    else:
        gate_I = row * 2 * size + column_I
        up_I = gate_I + size
    return gate_I, up_I


@jit
def _gate_forward(
    inner_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_I = column_I < size
    gate_at_I, up_at_I = _places(row, column_I, size, INTERLEAVED)
    gate_I = tl.load(inner_ptr + gate_at_I, inside_I, other=0.0)
    up_I = tl.load(inner_ptr + up_at_I, inside_I, other=0.0)
    tl.store(out_ptr + row * size + column_I, combine(gate_I, up_I, KIND, True), inside_I)


@jit
def _slopes(g: tl.tensor, u: tl.tensor, KIND: tl.constexpr) -> tuple:
    """By how much the product rises with the gate and with the other half."""
    if KIND == "swiglu_clamped":
        bound = tl.minimum(g, 7.0)
        part = tl.sigmoid(bound * 1.702)
        by_gate = part * (1 + 1.702 * bound * (1 - part)) * (tl.clamp(u, -7.0, 7.0) + 1)
        by_gate = tl.where(g <= 7.0, by_gate, 0.0)
        by_up = tl.where(tl.abs(u) <= 7.0, bound * part, 0.0)
    elif KIND == "silu":
        part = tl.sigmoid(g)
        by_gate = part * (1 + g * (1 - part)) * u
        by_up = g * part
    elif KIND == "gelu_tanh":
        # g times the sigmoid of 2z, whose slope is that of z = 0.797885 (g + 0.044715 g^3) twice.
        part = tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
        by_gate = (part + g * part * (1 - part) * 1.5957691216057308 * (1 + 0.134145 * g * g)) * u
        by_up = g * part
    else:
        bound = tl.maximum(g, 0.0)
        by_gate = 2 * bound * u
        by_up = bound * bound
    return by_gate, by_up


@jit
def _gate_backward(
    inner_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    back_ptr: tl.tensor,
    size: tl.tensor,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_I = column_I < size
    gate_at_I, up_at_I = _places(row, column_I, size, INTERLEAVED)
    gate_I = tl.load(inner_ptr + gate_at_I, inside_I, other=0.0).to(tl.float32)
    up_I = tl.load(inner_ptr + up_at_I, inside_I, other=0.0).to(tl.float32)
    grad_I = tl.load(grad_ptr + row * size + column_I, inside_I, other=0.0).to(tl.float32)
    by_gate_I, by_up_I = _slopes(gate_I, up_I, KIND)
    tl.store(back_ptr + gate_at_I, grad_I * by_gate_I, inside_I)
    tl.store(back_ptr + up_at_I, grad_I * by_up_I, inside_I)
