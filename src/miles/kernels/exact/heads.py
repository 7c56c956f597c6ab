"""From a fused projection to queries, keys and values: norms of heads and a rotation, one form for both planes.

Shapes: T tokens, H query heads, G key-value heads, N = H + 2G, d head_dim, r <= d rotated channels, P positions.

On a card the engine's own pass (``prepare``) is the form: a trainer's keys and values go to slots of its own. Elsewhere
the steps are torch's, each of them one that rounds alike wherever an element stands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.device_code import HAVE_TRITON, on
from miles.kernels.exact.elements import wide_of
from miles.kernels.prepare import launch_heads, started
from miles.kernels.train_heads import Shape, heads_backward


def on_card(x: Tensor) -> bool:
    """Whether device code makes heads ready here."""
    return x.is_cuda and HAVE_TRITON and x.dtype != torch.float64


def heads_of(
    qkv_TN: Tensor,
    rotation: Tensor | None,
    positions_T: Tensor | None,
    q_weight_d: Tensor | None,
    k_weight_d: Tensor | None,
    shape: Shape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, d] and keys [T, G, d], normalised with weights and rotated with a rotation; and the values.

    ``rotation`` [P, 2, r] is read at ``positions_T``, or without those has a row for each token.
    """
    return _Heads.apply(qkv_TN, rotation, positions_T, q_weight_d, k_weight_d, shape)  # pyright: ignore[reportReturnType]


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TN: Tensor,
        rotation: Tensor | None,
        positions_T: Tensor | None,
        q_weight_d: Tensor | None,
        k_weight_d: Tensor | None,
        shape: Shape,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_TN = qkv_TN.contiguous()
        made = {"dtype": qkv_TN.dtype, "device": qkv_TN.device}
        k_TGd = torch.empty(len(qkv_TN), shape.kv_heads, shape.head_dim, **made)
        v_TGd = torch.empty_like(k_TGd)
        slots_T = torch.arange(len(qkv_TN), device=qkv_TN.device)
        with on(qkv_TN):
            q_THd = launch_heads(
                *(qkv_TN, shape.heads, shape.kv_heads, shape.head_dim, rotation, positions_T, shape.interleaved),
                *(q_weight_d, k_weight_d, shape.eps, shape.offset, k_TGd, v_TGd, slots_T, False),
                started=started(qkv_TN, positions_T),
            )
        ctx.shape = shape
        # Rotating back needs nothing of what was rotated; only a norm does.
        kept_TN = qkv_TN if q_weight_d is not None else None
        ctx.save_for_backward(kept_TN, rotation, positions_T, q_weight_d, k_weight_d)
        return q_THd, k_TGd, v_TGd

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor
    ) -> tuple[Tensor, None, None, Tensor | None, Tensor | None, None]:
        qkv_TN, rotation, positions_T, *weights = ctx.saved_tensors
        if rotation is not None and positions_T is not None:
            rotation = rotation.index_select(0, positions_T)
        saved = (qkv_TN, rotation, *weights)
        back_TN, _, q_weight, k_weight, _ = heads_backward(q_THd, k_TGd, v_TGd, saved, ctx.shape)
        return back_TN, None, None, q_weight, k_weight, None


def rotate(x_TNd: Tensor, rotation_T2d: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn each head's channel pairs by their position's angles; channels beyond the rotation's stay as they are."""
    dim = rotation_T2d.shape[-1]
    if dim < x_TNd.shape[-1]:
        turned_TNd, rest_TNd = x_TNd.split((dim, x_TNd.shape[-1] - dim), dim=-1)
        return torch.cat((rotate(turned_TNd, rotation_T2d, interleaved=interleaved), rest_TNd), -1)
    wide = wide_of(x_TNd.dtype)
    cos_T1d, sin_T1d = rotation_T2d.split(1, dim=1)
    swapped_TNd = x_TNd.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x_TNd.roll(dim // 2, -1)
    # A product and a sum that torch does at once may be rounded once or twice.
    first_TNd = (x_TNd * cos_T1d).to(wide)
    return (first_TNd + swapped_TNd.to(wide) * sin_T1d.to(wide)).to(x_TNd.dtype)
