"""FlashAttention with attention sinks on packed sequences (CUDA, half precision), by correcting torch's kernel.

Shapes: T tokens, M keys, H query heads, G key-value heads, d channels, B sequences. Without a past M = T.

A sink adds one term to the softmax denominator. The kernel returns its log-sum-exp, so the output only has to be scaled
down; and its backward, given the larger log-sum-exp and the smaller output, is the backward with the sink.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CuSeqlens = tuple[Tensor, Tensor]
_MaxSeqlens = tuple[int, int]


class _FlashWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_MGd: Tensor,
        v_MGd: Tensor,
        sinks_H: Tensor,
        ends: _CuSeqlens,
        longest: _MaxSeqlens,
        options: dict,
    ) -> Tensor:
        fixed_args = (*ends, *longest, 0.0, options["window_size_left"] < 0)
        outputs = torch.ops.aten._flash_attention_forward(q_THd, k_MGd, v_MGd, *fixed_args, False, **options)
        out_THd, lse_HT, seed, unused, _ = outputs
        lse_sinks_HT = torch.logaddexp(lse_HT, sinks_H.float()[:, None])
        out_THd = (out_THd * (lse_HT - lse_sinks_HT).exp().T[..., None]).to(q_THd.dtype)
        ctx.save_for_backward(q_THd, k_MGd, v_MGd, out_THd, lse_sinks_HT, sinks_H, *ends, seed, unused)
        ctx.fixed_args, ctx.options = fixed_args[2:], options
        return out_THd

    @staticmethod
    def backward(ctx: Any, grad_THd: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_THd, k_MGd, v_MGd, out_THd, lse_sinks_HT, sinks_H, *ends, seed, unused = ctx.saved_tensors
        grad_THd = grad_THd.contiguous()
        saved = (q_THd, k_MGd, v_MGd, out_THd, lse_sinks_HT, *ends)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_THd, *saved, *ctx.fixed_args, seed, unused, **ctx.options
        )
        delta_TH = (grad_THd.float() * out_THd).sum(-1)
        sink_weight_HT = (sinks_H.float()[:, None] - lse_sinks_HT).exp()
        dsinks_H = -(sink_weight_HT * delta_TH.T).sum(1)
        return dq, dk, dv, dsinks_H.to(sinks_H.dtype), None, None, None


def flash_attention_with_sinks(
    q_THd: Tensor,
    k_MGd: Tensor,
    v_MGd: Tensor,
    sinks_H: Tensor,
    ends_B: Tensor,
    longest: int,
    *,
    scale: float,
    window: int | None,
    keys: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Causal attention within the sequences between consecutive ``ends_B``, over at most ``window`` tokens.

    ``keys`` are the ends and the longest of the key sequences where these are longer than the queries.
    """
    left = -1 if window is None else window - 1
    options = {"scale": scale, "window_size_left": left, "window_size_right": 0}
    key_ends, max_keys = (ends_B, longest) if keys is None else keys
    ends, max_lengths = (ends_B, key_ends), (longest, max_keys)
    return _FlashWithSinks.apply(q_THd, k_MGd, v_MGd, sinks_H, ends, max_lengths, options)  # pyright: ignore[reportReturnType]
