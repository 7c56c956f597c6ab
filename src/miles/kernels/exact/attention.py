"""Attention of spans of queries over keys in rows, bit by bit the same in every form, with its gradient.

Shapes: T queries, S rows of keys and values, H query heads, G key-value heads, d channels of a key, e of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.device_code import HAVE_TRITON
from miles.kernels.exact.attention_plain import plain_attention, plain_backward, sink_gradient
from miles.kernels.exact.attention_spans import Spans
from miles.kernels.terms import Terms


class Asked:
    """The spans of one call, and what forms of it keep of them from layer to layer."""

    def __init__(self, spans: Spans) -> None:
        assert spans.row_K is None, "a gradient needs keys that are each span's own"
        self.spans = spans
        self.kept: dict[Any, Any] = {}


def on_card(x: Tensor) -> bool:
    """Whether device code of our own computes this: double precision is left to torch."""
    return x.is_cuda and HAVE_TRITON and x.dtype != torch.float64


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor, sinks_H: Tensor | None, asked: Asked, terms: Terms
    ) -> Tensor:
        if on_card(q_THd):
            # Read by its compiler when it is first needed.
            from miles.kernels.exact.attention_train import train_attention

            out_THe, lse_TH = train_attention(q_THd, k_SGd, v_SGe, asked, terms, sinks_H)
        else:
            out_THe, lse_TH = plain_attention(q_THd, k_SGd, v_SGe, asked.spans, terms, sinks_H)
        ctx.asked, ctx.terms = asked, terms
        ctx.save_for_backward(q_THd, k_SGd, v_SGe, out_THe, lse_TH, sinks_H)
        return out_THe

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THe: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *saved, sinks_H = ctx.saved_tensors
        if on_card(grad_THe):
            from miles.kernels.exact.attention_backward import train_backward

            dq, dk, dv, delta_TH = train_backward(grad_THe, tuple(saved), ctx.asked, ctx.terms)
        else:
            dq, dk, dv, delta_TH = plain_backward(grad_THe, tuple(saved), ctx.asked.spans, ctx.terms)
        dsinks_H = None if sinks_H is None else sink_gradient(sinks_H, saved[4], delta_TH)
        return dq, dk, dv, dsinks_H, None, None


def span_attention(
    q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor, asked: Asked, terms: Terms, sinks_H: Tensor | None = None
) -> Tensor:
    """What every query sees of its span's keys, [T, H, e]."""
    return _Attention.apply(q_THd, k_SGd, v_SGe, sinks_H, asked, terms)  # pyright: ignore[reportReturnType]
