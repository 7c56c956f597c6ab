"""Batch-invariant QK-norm and RoPE on a fused QKV projection: one implementation for engine and trainer.

Shapes: T tokens, H query heads, G key-value heads, N = H + 2G, d head_dim, r <= d rotated channels, P positions.

On a GPU the engine's kernel is used: a trainer's keys and values go to slots of its own. Elsewhere the steps are torch
operations that round the same wherever an element is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.batch_invariant.elementwise import accumulation_dtype
from miles.kernels.fused.qk_norm_rope import (
    QKNormRopeParams,
    QKVShape,
    launch_qk_norm_rope,
    select_pdl_options,
)
from miles.kernels.fused.qk_norm_rope_autograd import qk_norm_rope_backward
from miles.kernels.runtime.triton_compat import device_guard


def qk_norm_rope(
    qkv_TN: Tensor,
    rotation: Tensor | None,
    positions_T: Tensor | None,
    q_weight_d: Tensor | None,
    k_weight_d: Tensor | None,
    shape: QKVShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, d] and keys [T, G, d] after QK-norm (if there are weights) and RoPE (if there is a rotation), and
    values.

    ``rotation`` [P, 2, r] is indexed by ``positions_T``, or without those has a row for each token.
    """
    return _QKNormRope.apply(qkv_TN, rotation, positions_T, q_weight_d, k_weight_d, shape)  # pyright: ignore[reportReturnType]


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TN: Tensor,
        rotation: Tensor | None,
        positions_T: Tensor | None,
        q_weight_d: Tensor | None,
        k_weight_d: Tensor | None,
        shape: QKVShape,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_TN = qkv_TN.contiguous()
        k_TGd = torch.empty(len(qkv_TN), shape.kv_heads, shape.head_dim, dtype=qkv_TN.dtype, device=qkv_TN.device)
        v_TGd = torch.empty_like(k_TGd)
        slots_T = torch.arange(len(qkv_TN), device=qkv_TN.device)
        params = QKNormRopeParams(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rotation=rotation,
            positions_T=positions_T,
            interleaved=shape.interleaved,
            q_weight_d=q_weight_d,
            k_weight_d=k_weight_d,
            eps=shape.eps,
            offset=shape.offset,
        )
        pdl = select_pdl_options(qkv_TN, positions_T)
        with device_guard(qkv_TN):
            q_THd = launch_qk_norm_rope(qkv_TN, params, k_TGd, v_TGd, slots_T, False, pdl)
        ctx.shape = shape
        # Only the norm needs its input in backward.
        saved_TN = qkv_TN if q_weight_d is not None else None
        ctx.save_for_backward(saved_TN, rotation, positions_T, q_weight_d, k_weight_d)
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
        grad_qkv_TN, _, q_weight, k_weight, _ = qk_norm_rope_backward(q_THd, k_TGd, v_TGd, saved, ctx.shape)
        return grad_qkv_TN, None, None, q_weight, k_weight, None


def apply_rope(x_TNd: Tensor, rotation_T2d: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate each head's channel pairs by their position's angles; channels beyond the rotary dim are unchanged."""
    rotary_dim = rotation_T2d.shape[-1]
    if rotary_dim < x_TNd.shape[-1]:
        rotated_TNd, rest_TNd = x_TNd.split((rotary_dim, x_TNd.shape[-1] - rotary_dim), dim=-1)
        return torch.cat((apply_rope(rotated_TNd, rotation_T2d, interleaved=interleaved), rest_TNd), -1)
    wide = accumulation_dtype(x_TNd.dtype)
    cos_T1d, sin_T1d = rotation_T2d.split(1, dim=1)
    swapped_TNd = x_TNd.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x_TNd.roll(rotary_dim // 2, -1)
    # A fused multiply-add of torch may round once or twice.
    cos_part_TNd = (x_TNd * cos_T1d).to(wide)
    return (cos_part_TNd + swapped_TNd.to(wide) * sin_T1d.to(wide)).to(x_TNd.dtype)
