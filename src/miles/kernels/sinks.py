"""Packed attention with a sink on CUDA in half precision: torch's fused kernel, corrected by what it leaves out.

Shapes: T tokens, M keys, H query heads, G key-value heads, d channels, B sequences. Without a past M = T.

A sink adds one term to the sum that each softmax divides by. The kernel says what its sum was, so its result only has
to shrink; and its backward, told the larger sum and the smaller result, is the backward with the sink.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_Ends = tuple[Tensor, Tensor]
_Most = tuple[int, int]


class _Sunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THd: Tensor, k_MGd: Tensor, v_MGd: Tensor, sinks_H: Tensor, ends: _Ends, longest: _Most, how: dict
    ) -> Tensor:
        at = (*ends, *longest, 0.0, how["window_size_left"] < 0)
        found = torch.ops.aten._flash_attention_forward(q_THd, k_MGd, v_MGd, *at, False, **how)
        out_THd, sum_HT, seed, unused, _ = found
        total_HT = torch.logaddexp(sum_HT, sinks_H.float()[:, None])
        out_THd = (out_THd * (sum_HT - total_HT).exp().T[..., None]).to(q_THd.dtype)
        ctx.save_for_backward(q_THd, k_MGd, v_MGd, out_THd, total_HT, sinks_H, *ends, seed, unused)
        ctx.at, ctx.how = at[2:], how
        return out_THd

    @staticmethod
    def backward(ctx: Any, grad_THd: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_THd, k_MGd, v_MGd, out_THd, total_HT, sinks_H, *ends, seed, unused = ctx.saved_tensors
        grad_THd = grad_THd.contiguous()
        held = (q_THd, k_MGd, v_MGd, out_THd, total_HT, *ends)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(grad_THd, *held, *ctx.at, seed, unused, **ctx.how)
        common_TH = (grad_THd.float() * out_THd).sum(-1)
        share_HT = (sinks_H.float()[:, None] - total_HT).exp()
        dsinks_H = -(share_HT * common_TH.T).sum(1)
        return dq, dk, dv, dsinks_H.to(sinks_H.dtype), None, None, None


def sunk_attention(
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
    """Causal attention of the sequences between neighbours of ``ends_B``, no further back than ``window`` tokens.

    ``keys`` are the ends and the longest of the sequences' keys where these have a past before their queries.
    """
    left = -1 if window is None else window - 1
    how = {"scale": scale, "window_size_left": left, "window_size_right": 0}
    ends_of_keys, most_keys = (ends_B, longest) if keys is None else keys
    ends, most = (ends_B, ends_of_keys), (longest, most_keys)
    return _Sunk.apply(q_THd, k_MGd, v_MGd, sinks_H, ends, most, how)  # pyright: ignore[reportReturnType]
