"""Fused QK-norm + RoPE on a fused QKV projection, with the KV-cache write, in the engine.

Shapes: T tokens, H query heads, G key-value heads, N = H + 2G (H more with gates), d head_dim, r <= d rotated channels,
P positions, S slots of a cache.

``qk_norm_rope_autograd`` rounds like this, so that engine and trainer agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.fused.kv_cache_fp8 import quantize_rows, scale_offset
from miles.kernels.numerics import Numerics
from miles.kernels.runtime.kv_cache import KVScales, write_fp8
from miles.kernels.runtime.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    pdl_options_inference,
    tl,
    triton,
    use_triton_inference,
)

# Elements per program: sixteen bytes for each thread of four warps.
_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNormRopeParams:
    """How a layer's projection becomes queries, keys and values: QK-norm where there are weights, RoPE where there is a
    rotation.

    ``rotation`` holds cosines and signed sines, [P, 2, rotated channels]: of all positions, indexed by ``positions_T``,
    or without these of every token.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotation: Tensor | None
    positions_T: Tensor | None
    interleaved: bool
    q_weight_d: Tensor | None
    k_weight_d: Tensor | None
    eps: float
    offset: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QKVShape:
    """Shape of a QKV projection; ``interleaved`` rotations pair neighbours instead of halves."""

    heads: int
    kv_heads: int
    head_dim: int
    interleaved: bool = False
    eps: float = 1e-6
    offset: float = 0.0

    @property
    def rows(self) -> int:
        """Heads of all three kinds."""
        return self.heads + 2 * self.kv_heads


def qk_norm_rope_write_kv(
    qkv_TN: Tensor,
    params: QKNormRopeParams,
    *,
    key_slots: Tensor,
    value_slots: Tensor,
    slots_T: Tensor,
    numerics: Numerics,
    gated: bool = False,
    scales: KVScales | None = None,
) -> Tensor:
    """Queries [T, H, d] after QK-norm and RoPE; writes keys, treated alike, and values to their slots [S, G, d].

    A token with a negative slot is not written. ``gated`` projections have a gate after each query head, which is
    skipped. With ``scales`` the slots are those of an FP8 KV cache.
    """
    assert (params.q_weight_d is None) == (params.k_weight_d is None)
    if use_triton_inference(qkv_TN):
        invariant = numerics.batch_invariant
        pdl = select_pdl_options(qkv_TN, params.positions_T) if invariant else pdl_options(qkv_TN.device)
        return launch_qk_norm_rope(qkv_TN, params, key_slots, value_slots, slots_T, gated, pdl, scales)
    heads, kv_heads, head_dim = params.heads, params.kv_heads, params.head_dim
    qkv_TNd = qkv_TN.unflatten(-1, (-1, head_dim))
    if gated:
        q_THd = qkv_TNd[:, : 2 * heads].unflatten(1, (heads, 2)).select(2, 0)
        qkv_TNd = torch.cat((q_THd, qkv_TNd[:, 2 * heads :]), 1)
    qk_TNd, v_TGd = qkv_TNd.split((heads + kv_heads, kv_heads), dim=1)
    if params.q_weight_d is not None and params.k_weight_d is not None:
        weight_Nd = torch.cat((params.q_weight_d.expand(heads, -1), params.k_weight_d.expand(kv_heads, -1)))
        if params.offset:
            weight_Nd = weight_Nd.to(torch.promote_types(weight_Nd.dtype, torch.float32)) + params.offset
        wide_TNd = qk_TNd.to(torch.promote_types(qk_TNd.dtype, weight_Nd.dtype))
        qk_TNd = (F.rms_norm(wide_TNd, (head_dim,), None, params.eps) * weight_Nd).to(qk_TNd.dtype)
    if params.rotation is not None:
        positions_T = params.positions_T
        rotation_T2r = params.rotation if positions_T is None else params.rotation.index_select(0, positions_T)
        qk_TNd = _apply_rope(qk_TNd, rotation_T2r, params.interleaved)
    q_THd, k_TGd = qk_TNd.split((heads, kv_heads), dim=1)
    written = slots_T >= 0
    if scales is not None:
        write_fp8(key_slots, scales.keys_PGp, slots_T[written], k_TGd[written])
        write_fp8(value_slots, scales.values_PGp, slots_T[written], v_TGd[written])
        return q_THd
    key_slots.index_copy_(0, slots_T[written], k_TGd[written])
    value_slots.index_copy_(0, slots_T[written], v_TGd[written])
    return q_THd


def rounds_norm(params: QKNormRopeParams, dtype: torch.dtype) -> bool:
    """Whether normalized values are rounded to ``dtype`` before the weight is applied: if the weight is as narrow."""
    if params.q_weight_d is None:
        return False
    weight_dtype = params.q_weight_d.dtype
    scale_dtype = torch.promote_types(weight_dtype, torch.float32) if params.offset else weight_dtype
    return torch.promote_types(scale_dtype, dtype) == dtype


def select_pdl_options(qkv_TN: Tensor, positions_T: Tensor | None) -> dict[str, bool]:
    """PDL options of both engine and trainer in batch-invariant mode; rotations that were just computed are not read
    early.
    """
    return {"PDL": False} if positions_T is None else pdl_options_inference(qkv_TN.device)


def _apply_rope(x_TNd: Tensor, rotation_T2r: Tensor, interleaved: bool) -> Tensor:
    rotary_dim = rotation_T2r.shape[-1]
    x_TNr, rest_TN = x_TNd.split((rotary_dim, x_TNd.shape[-1] - rotary_dim), dim=-1)
    cos_T1r, sin_T1r = rotation_T2r.split(1, dim=1)
    swapped_TNr = x_TNr.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x_TNr.roll(rotary_dim // 2, -1)
    return torch.cat((torch.addcmul(x_TNr * cos_T1r, swapped_TNr, sin_T1r), rest_TN), -1)


def launch_qk_norm_rope(
    qkv_TN: Tensor,
    params: QKNormRopeParams,
    key_slots: Tensor,
    value_slots: Tensor,
    slots_T: Tensor,
    gated: bool,
    pdl: Mapping[str, bool],
    scales: KVScales | None = None,
) -> Tensor:
    """``qk_norm_rope_write_kv`` as a Triton kernel, launched with the options ``pdl``."""
    heads, kv_heads, head_dim, rotation = params.heads, params.kv_heads, params.head_dim, params.rotation
    assert qkv_TN.stride(1) == 1 and (rotation is None or rotation.is_contiguous())
    assert key_slots.stride()[1:] == value_slots.stride()[1:] == (head_dim, 1)
    q_THd = torch.empty(len(qkv_TN), heads, head_dim, dtype=qkv_TN.dtype, device=qkv_TN.device)
    block_d = triton.next_power_of_2(head_dim)
    block_n = max(1, min(_BLOCK // block_d, triton.next_power_of_2(heads + 2 * kv_heads)))
    qk_norm_rope_kernel[(len(qkv_TN), triton.cdiv(heads + 2 * kv_heads, block_n))](
        qkv_TN,
        rotation,
        params.positions_T,
        params.q_weight_d,
        params.k_weight_d,
        slots_T,
        q_THd,
        key_slots,
        value_slots,
        None if scales is None else scales.keys_PGp,
        None if scales is None else scales.values_PGp,
        qkv_TN.stride(0),
        key_slots.stride(0),
        value_slots.stride(0),
        params.eps,
        params.offset,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=head_dim,
        ROTARY_DIM=0 if rotation is None else rotation.shape[-1],
        INTERLEAVED=params.interleaved,
        HAS_POSITIONS=params.positions_T is not None,
        NORM=params.q_weight_d is not None,
        ROUND_NORM=rounds_norm(params, qkv_TN.dtype),
        STEP=2 if gated else 1,
        FP8_PAGE=0 if scales is None else scales.keys_PGp.shape[-1],
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=4,
        **pdl,
    )
    return q_THd


@jit
def qk_norm_rope_kernel(
    qkv_ptr: tl.tensor,
    rotation_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    NORM: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    STEP: tl.constexpr,
    FP8_PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    head_N1, column_1d = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None], tl.arange(0, BLOCK_D)[None, :]
    query_N1, is_qk_N1 = head_N1 < HEADS, head_N1 < HEADS + KV_HEADS
    cos_1d, sin_1d = load_rotation(rotation_ptr, positions_ptr, token, column_1d, ROTARY_DIM, HAS_POSITIONS)
    columns_1d = column_1d, column_1d < DIM, column_1d < ROTARY_DIM
    q_own_1d, q_other_1d = load_norm_weights(q_weight_ptr, *columns_1d, ROTARY_DIM, INTERLEAVED, NORM)
    k_own_1d, k_other_1d = load_norm_weights(k_weight_ptr, *columns_1d, ROTARY_DIM, INTERLEAVED, NORM)
    if PDL:
        gdc_wait()
    start_N1 = tl.where(query_N1, head_N1 * STEP, head_N1 + (STEP - 1) * HEADS) * DIM
    valid_Nd, rotary_Nd = (head_N1 < HEADS + 2 * KV_HEADS) & (column_1d < DIM), is_qk_N1 & (column_1d < ROTARY_DIM)
    qkv_ptr += token * qkv_stride + start_N1
    loaded = load_heads(qkv_ptr, column_1d, valid_Nd, valid_Nd & rotary_Nd, ROTARY_DIM, INTERLEAVED)
    norm_weights = tl.where(query_N1, q_own_1d, k_own_1d), tl.where(query_N1, q_other_1d, k_other_1d)
    x_Nd = norm_and_rotate(
        *loaded, is_qk_N1, rotary_Nd, cos_1d, sin_1d, *norm_weights, eps, offset, DIM, ROTARY_DIM, NORM, ROUND_NORM
    )
    tl.store(q_ptr + (token * HEADS + head_N1) * DIM + column_1d, x_Nd, valid_Nd & query_N1)
    key_N1, value_N1 = head_N1 - HEADS, head_N1 - HEADS - KV_HEADS
    written_Nd = valid_Nd & (slot >= 0)
    if FP8_PAGE > 0:
        x_Nd, scale_N1, _ = quantize_rows(x_Nd)
        scale_at_N1, scaled_N1 = scale_offset(slot, FP8_PAGE, KV_HEADS), (slot >= 0) & (value_N1 < KV_HEADS)
        tl.store(key_scales_ptr + scale_at_N1 + key_N1 * FP8_PAGE, scale_N1, scaled_N1 & is_qk_N1 & (key_N1 >= 0))
        tl.store(value_scales_ptr + scale_at_N1 + value_N1 * FP8_PAGE, scale_N1, scaled_N1 & (value_N1 >= 0))
    tl.store(keys_ptr + slot * key_stride + key_N1 * DIM + column_1d, x_Nd, written_Nd & is_qk_N1 & (key_N1 >= 0))
    tl.store(values_ptr + slot * value_stride + value_N1 * DIM + column_1d, x_Nd, written_Nd & (value_N1 >= 0))


@jit
def load_heads(
    base_ptr: tl.tensor,
    column_Nd: tl.tensor,
    valid_Nd: tl.tensor,
    rotary_Nd: tl.tensor,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> Any:
    """Channels of heads, one head per row from ``base_ptr`` on, and their RoPE partners, loaded at once."""
    own_weight_Nd = tl.load(base_ptr + column_Nd, valid_Nd, other=0.0)
    partner_Nd = own_weight_Nd
    if ROTARY_DIM > 0:
        partner_Nd = tl.load(base_ptr + rope_partner(column_Nd, ROTARY_DIM, INTERLEAVED), rotary_Nd, other=0.0)
    return own_weight_Nd, partner_Nd


@jit
def load_norm_weights(
    weight_ptr: tl.tensor,
    column_Nd: tl.tensor,
    valid_Nd: tl.tensor,
    rotary_Nd: tl.tensor,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
) -> Any:
    """Norm weights of channels and of their RoPE partners; unused values if there is no norm."""
    own_weight_Nd, partner_Nd = column_Nd * 0.0, column_Nd * 0.0
    if NORM:
        own_weight_Nd, partner_Nd = load_heads(weight_ptr, column_Nd, valid_Nd, rotary_Nd, ROTARY_DIM, INTERLEAVED)
    return own_weight_Nd.to(tl.float32), partner_Nd.to(tl.float32)


@jit
def norm_and_rotate(
    x_Nd: tl.tensor,
    partner_Nd: tl.tensor,
    is_qk_Nd: tl.tensor,
    rotary_Nd: tl.tensor,
    cos_Nd: tl.tensor,
    sin_Nd: tl.tensor,
    own_weight_Nd: tl.tensor,
    partner_weight_Nd: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr,
    ROUND_NORM: tl.constexpr,
) -> Any:
    """QK-norm of the heads selected by ``is_qk`` and of their RoPE partners, then RoPE.

    ``own_weight`` and ``partner_weight`` are the norm weights of the channels and of their partners.
    """
    if NORM:
        wide_Nd = x_Nd.to(tl.float32)
        scale_N1 = tl.rsqrt(tl.sum(wide_Nd * wide_Nd, 1, keep_dims=True) / DIM + eps)
        x_Nd = tl.where(is_qk_Nd, _normalize(x_Nd, scale_N1, own_weight_Nd + offset, ROUND_NORM), x_Nd)
        partner_Nd = _normalize(partner_Nd, scale_N1, partner_weight_Nd + offset, ROUND_NORM)
    if ROTARY_DIM > 0:
        if x_Nd.dtype == tl.float32:
            # State explicitly which product is rounded before the sum.
            rotated_Nd = tl.fma(x_Nd, cos_Nd, partner_Nd * sin_Nd)
        else:
            cos_part_Nd = (x_Nd.to(tl.float32) * cos_Nd).to(x_Nd.dtype).to(tl.float32)
            rotated_Nd = (cos_part_Nd + partner_Nd.to(tl.float32) * sin_Nd).to(x_Nd.dtype)
        x_Nd = tl.where(rotary_Nd, rotated_Nd, x_Nd)
    return x_Nd


@jit
def load_rotation(
    rotation_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    token: tl.tensor,
    column_1d: tl.tensor,
    ROTARY_DIM: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
) -> Any:
    """Cosines and signed sines of a token's position, which are known before its projection."""
    cos_1d, sin_1d = column_1d * 0.0, column_1d * 0.0
    if ROTARY_DIM > 0:
        position = tl.load(positions_ptr + token).to(tl.int64) if HAS_POSITIONS else token
        rotation_ptr += position * (2 * ROTARY_DIM) + column_1d
        cos_1d = tl.load(rotation_ptr, column_1d < ROTARY_DIM, other=0.0).to(tl.float32)
        sin_1d = tl.load(rotation_ptr + ROTARY_DIM, column_1d < ROTARY_DIM, other=0.0).to(tl.float32)
    return cos_1d, sin_1d


@jit
def rope_partner(column_1d: tl.tensor, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr) -> tl.tensor:
    """The channel each channel is rotated with: its neighbour, or the one half the rotary dim away."""
    if INTERLEAVED:
        return column_1d ^ 1
    return tl.where(column_1d < ROTARY_DIM // 2, column_1d + ROTARY_DIM // 2, column_1d - ROTARY_DIM // 2)


@jit
def _normalize(x_Nd: tl.tensor, scale_N1: tl.tensor, weight_Nd: tl.tensor, ROUND_NORM: tl.constexpr) -> tl.tensor:
    """Scaled by its head's ``scale``, times the weight; rounded in between if ROUND_NORM."""
    normed_Nd = x_Nd.to(tl.float32) * scale_N1
    if ROUND_NORM:
        normed_Nd = normed_Nd.to(x_Nd.dtype).to(tl.float32)
    return (normed_Nd * weight_Nd).to(x_Nd.dtype)
