"""From a fused projection to what attention takes, in one pass: normalise, rotate, remember keys and values.

Shapes: T tokens, H query heads, G key-value heads, N = H + 2G (H more with gates), d head_dim, r <= d rotated channels,
P positions, S slots of a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.arithmetic import exact
from miles.kernels.device_code import early, early_in_engines, gdc_launch_dependents, gdc_wait, jit, ready, tl, triton

# Numbers a program takes at once: sixteen bytes for each thread of four warps.
_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How a layer's projection becomes queries, keys and values: norms of heads where there are weights, a rotation.

    ``rotation`` holds cosines and signed sines, [P, 2, channels that turn]: of all positions, of which those of
    ``positions_T`` are looked up, or without these of every token.
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


def prepare(
    qkv_TN: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotation: Tensor | None,
    positions_T: Tensor | None,
    interleaved: bool,
    q_weight_d: Tensor | None,
    k_weight_d: Tensor | None,
    eps: float,
    offset: float = 0.0,
    key_slots: Tensor,
    value_slots: Tensor,
    slots_T: Tensor,
    gated: bool = False,
) -> Tensor:
    """The queries, [T, H, d], normalised and rotated; keys, treated alike, and values go to their slots [S, G, d].

    A token whose slot is negative leaves nothing. ``rotation`` [P, 2, r] is a table of cosines and signed sines to be
    read at ``positions_T``, or without those has a row for each token; None turns nothing. Without weights there is no
    norm. ``gated`` projections have a gate after each query head, which is passed over.
    """
    assert (q_weight_d is None) == (k_weight_d is None)
    if ready(qkv_TN):
        return launch_heads(
            *(qkv_TN, heads, kv_heads, head_dim, rotation, positions_T, interleaved),
            *(q_weight_d, k_weight_d, eps, offset, key_slots, value_slots, slots_T, gated),
            started=started(qkv_TN, positions_T) if exact() else early(qkv_TN.device),
        )
    qkv_TNd = qkv_TN.unflatten(-1, (-1, head_dim))
    if gated:
        q_THd = qkv_TNd[:, : 2 * heads].unflatten(1, (heads, 2)).select(2, 0)
        qkv_TNd = torch.cat((q_THd, qkv_TNd[:, 2 * heads :]), 1)
    qk_TNd, v_TGd = qkv_TNd.split((heads + kv_heads, kv_heads), dim=1)
    if q_weight_d is not None and k_weight_d is not None:
        scale_Nd = torch.cat((q_weight_d.expand(heads, -1), k_weight_d.expand(kv_heads, -1)))
        if offset:
            scale_Nd = scale_Nd.to(torch.promote_types(scale_Nd.dtype, torch.float32)) + offset
        wide_TNd = qk_TNd.to(torch.promote_types(qk_TNd.dtype, scale_Nd.dtype))
        qk_TNd = (F.rms_norm(wide_TNd, (head_dim,), None, eps) * scale_Nd).to(qk_TNd.dtype)
    if rotation is not None:
        rotation_T2r = rotation if positions_T is None else rotation.index_select(0, positions_T)
        qk_TNd = _turn(qk_TNd, rotation_T2r, interleaved)
    q_THd, k_TGd = qk_TNd.split((heads, kv_heads), dim=1)
    kept = slots_T >= 0
    key_slots.index_copy_(0, slots_T[kept], k_TGd[kept])
    value_slots.index_copy_(0, slots_T[kept], v_TGd[kept])
    return q_THd


def started(qkv_TN: Tensor, positions_T: Tensor | None) -> dict[str, bool]:
    """How both planes start the device code in exact arithmetic; rotations that were just made are not read ahead."""
    return {"EARLY": False} if positions_T is None else early_in_engines(qkv_TN.device)


def _turn(x_TNd: Tensor, rotation_T2r: Tensor, interleaved: bool) -> Tensor:
    turned = rotation_T2r.shape[-1]
    x_TNr, rest_TN = x_TNd.split((turned, x_TNd.shape[-1] - turned), dim=-1)
    cos_T1r, sin_T1r = rotation_T2r.split(1, dim=1)
    swapped_TNr = x_TNr.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x_TNr.roll(turned // 2, -1)
    return torch.cat((torch.addcmul(x_TNr * cos_T1r, swapped_TNr, sin_T1r), rest_TN), -1)


def launch_heads(
    qkv_TN: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotation: Tensor | None,
    positions_T: Tensor | None,
    interleaved: bool,
    q_weight_d: Tensor | None,
    k_weight_d: Tensor | None,
    eps: float,
    offset: float,
    key_slots: Tensor,
    value_slots: Tensor,
    slots_T: Tensor,
    gated: bool,
    *,
    started: Mapping[str, bool],
) -> Tensor:
    """``prepare`` as device code, ``started`` so, whoever asks."""
    assert qkv_TN.stride(1) == 1 and (rotation is None or rotation.is_contiguous())
    assert key_slots.stride()[1:] == value_slots.stride()[1:] == (head_dim, 1)
    q_THd = torch.empty(len(qkv_TN), heads, head_dim, dtype=qkv_TN.dtype, device=qkv_TN.device)
    narrow = False
    if q_weight_d is not None:
        scale = torch.promote_types(q_weight_d.dtype, torch.float32) if offset else q_weight_d.dtype
        narrow = torch.promote_types(scale, qkv_TN.dtype) == qkv_TN.dtype
    block_d = triton.next_power_of_2(head_dim)
    block_n = max(1, min(_BLOCK // block_d, triton.next_power_of_2(heads + 2 * kv_heads)))
    prepare_heads[(len(qkv_TN), triton.cdiv(heads + 2 * kv_heads, block_n))](
        *(qkv_TN, rotation, positions_T, q_weight_d, k_weight_d, slots_T, q_THd, key_slots, value_slots),
        *(qkv_TN.stride(0), key_slots.stride(0), value_slots.stride(0), eps, offset),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=head_dim,
        TURNED=0 if rotation is None else rotation.shape[-1],
        INTERLEAVED=interleaved,
        BY_POSITION=positions_T is not None,
        NORM=q_weight_d is not None,
        NARROW=narrow,
        STEP=2 if gated else 1,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=4,
        **started,
    )
    return q_THd


@jit
def prepare_heads(
    qkv_ptr: tl.tensor,
    rotation_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BY_POSITION: tl.constexpr,
    NORM: tl.constexpr,
    NARROW: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    head_N1, column_1d = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None], tl.arange(0, BLOCK_D)[None, :]
    query_N1, early_N1 = head_N1 < HEADS, head_N1 < HEADS + KV_HEADS
    cos_1d, sin_1d = read_rotation(rotation_ptr, positions_ptr, token, column_1d, TURNED, BY_POSITION)
    which_1d = column_1d, column_1d < DIM, column_1d < TURNED
    q_own_1d, q_other_1d = read_scales(q_weight_ptr, *which_1d, TURNED, INTERLEAVED, NORM)
    k_own_1d, k_other_1d = read_scales(k_weight_ptr, *which_1d, TURNED, INTERLEAVED, NORM)
    if EARLY:
        gdc_wait()
    start_N1 = tl.where(query_N1, head_N1 * STEP, head_N1 + (STEP - 1) * HEADS) * DIM
    inside_Nd, turned_Nd = (head_N1 < HEADS + 2 * KV_HEADS) & (column_1d < DIM), early_N1 & (column_1d < TURNED)
    qkv_ptr += token * qkv_stride + start_N1
    read = read_heads(qkv_ptr, column_1d, inside_Nd, inside_Nd & turned_Nd, TURNED, INTERLEAVED)
    scales = tl.where(query_N1, q_own_1d, k_own_1d), tl.where(query_N1, q_other_1d, k_other_1d)
    x_Nd = ready_heads(*read, early_N1, turned_Nd, cos_1d, sin_1d, *scales, eps, offset, DIM, TURNED, NORM, NARROW)
    tl.store(q_ptr + (token * HEADS + head_N1) * DIM + column_1d, x_Nd, inside_Nd & query_N1)
    key_N1, value_N1 = head_N1 - HEADS, head_N1 - HEADS - KV_HEADS
    kept_Nd = inside_Nd & (slot >= 0)
    tl.store(keys_ptr + slot * key_stride + key_N1 * DIM + column_1d, x_Nd, kept_Nd & early_N1 & (key_N1 >= 0))
    tl.store(values_ptr + slot * value_stride + value_N1 * DIM + column_1d, x_Nd, kept_Nd & (value_N1 >= 0))


@jit
def read_heads(
    from_ptr: tl.tensor,
    column_Nd: tl.tensor,
    inside_Nd: tl.tensor,
    turned_Nd: tl.tensor,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> Any:
    """Channels of heads, each in a row from ``from_ptr`` on, and those they are turned with, asked for at once."""
    own_Nd = tl.load(from_ptr + column_Nd, inside_Nd, other=0.0)
    other_Nd = own_Nd
    if TURNED > 0:
        other_Nd = tl.load(from_ptr + partner(column_Nd, TURNED, INTERLEAVED), turned_Nd, other=0.0)
    return own_Nd, other_Nd


@jit
def read_scales(
    weight_ptr: tl.tensor,
    column_Nd: tl.tensor,
    inside_Nd: tl.tensor,
    turned_Nd: tl.tensor,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
) -> Any:
    """A norm's weights of channels, and of those they are turned with; nothing that is used if there is no norm."""
    own_Nd, other_Nd = column_Nd * 0.0, column_Nd * 0.0
    if NORM:
        own_Nd, other_Nd = read_heads(weight_ptr, column_Nd, inside_Nd, turned_Nd, TURNED, INTERLEAVED)
    return own_Nd.to(tl.float32), other_Nd.to(tl.float32)


@jit
def ready_heads(
    x_Nd: tl.tensor,
    other_Nd: tl.tensor,
    early_Nd: tl.tensor,
    turned_Nd: tl.tensor,
    cos_Nd: tl.tensor,
    sin_Nd: tl.tensor,
    own_Nd: tl.tensor,
    partner_Nd: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    NORM: tl.constexpr,
    NARROW: tl.constexpr,
) -> Any:
    """Heads and the channels they are turned with: what is ``early`` (queries and keys) normed, and then turned.

    ``own`` and ``partner`` are the norm's weights for the one and the other.
    """
    if NORM:
        wide_Nd = x_Nd.to(tl.float32)
        scale_N1 = tl.rsqrt(tl.sum(wide_Nd * wide_Nd, 1, keep_dims=True) / DIM + eps)
        x_Nd = tl.where(early_Nd, _scaled(x_Nd, scale_N1, own_Nd, offset, NARROW), x_Nd)
        other_Nd = _scaled(other_Nd, scale_N1, partner_Nd, offset, NARROW)
    if TURNED > 0:
        if x_Nd.dtype == tl.float32:
            # Which of the products is rounded before their sum is not the compiler's to choose.
            rotated_Nd = tl.fma(x_Nd, cos_Nd, other_Nd * sin_Nd)
        else:
            first_Nd = (x_Nd.to(tl.float32) * cos_Nd).to(x_Nd.dtype).to(tl.float32)
            rotated_Nd = (first_Nd + other_Nd.to(tl.float32) * sin_Nd).to(x_Nd.dtype)
        x_Nd = tl.where(turned_Nd, rotated_Nd, x_Nd)
    return x_Nd


@jit
def read_rotation(
    rotation_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    token: tl.tensor,
    column_1d: tl.tensor,
    TURNED: tl.constexpr,
    BY_POSITION: tl.constexpr,
) -> Any:
    """The cosines and signed sines of a token's position: known before its projection is."""
    cos_1d, sin_1d = column_1d * 0.0, column_1d * 0.0
    if TURNED > 0:
        position = tl.load(positions_ptr + token).to(tl.int64) if BY_POSITION else token
        rotation_ptr += position * (2 * TURNED) + column_1d
        cos_1d = tl.load(rotation_ptr, column_1d < TURNED, other=0.0).to(tl.float32)
        sin_1d = tl.load(rotation_ptr + TURNED, column_1d < TURNED, other=0.0).to(tl.float32)
    return cos_1d, sin_1d


@jit
def partner(column_1d: tl.tensor, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr) -> tl.tensor:
    """The channel each channel is turned with: its neighbour, or the one half of all further."""
    if INTERLEAVED:
        return column_1d ^ 1
    return tl.where(column_1d < TURNED // 2, column_1d + TURNED // 2, column_1d - TURNED // 2)


@jit
def _scaled(
    x_Nd: tl.tensor, scale_N1: tl.tensor, weight_Nd: tl.tensor, offset: tl.tensor, NARROW: tl.constexpr
) -> tl.tensor:
    """Normalised by its head's ``scale``, times the weight; rounded in between where the weight is as narrow."""
    normed_Nd = x_Nd.to(tl.float32) * scale_N1
    if NARROW:
        normed_Nd = normed_Nd.to(x_Nd.dtype).to(tl.float32)
    return (normed_Nd * (weight_Nd + offset)).to(x_Nd.dtype)
