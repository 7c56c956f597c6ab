"""Fused QK-norm + RoPE on a fused QKV projection: with the KV-cache write in the engine, with a backward in training.

Shapes: T tokens, H query heads, G key-value heads, N = H + 2G (H more with gates), d head_dim, r <= d rotated channels,
P positions (in training programs), S slots of a cache.

Training rounds like inference, so that engine and trainer agree. The backward writes the gradient of the whole
projection at once, including that of the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from miles.kernels.fused.kv_cache_fp8 import quantize_rows, scale_offset
from miles.kernels.numerics import Numerics
from miles.kernels.runtime.kv_cache import KVScales, write_fp8
from miles.kernels.runtime.triton_compat import (
    device_guard,
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


# -- training ---------------------------------------------------------------------------------

# Elements per program, and the most programs that share a block of heads in backward.
_TRAINING_TILE = 2048
_MAX_PROGRAMS = 264


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


def qk_norm_rope_training(
    qkv_TN: Tensor,
    rotation_T2r: Tensor | None,
    q_weight_d: Tensor | None,
    k_weight_d: Tensor | None,
    shape: QKVShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, d] and keys [T, G, d] after QK-norm (if there are weights) and RoPE (if there is a rotation), and
    values.

    ``rotation_T2r`` holds cosines and signed sines of each token.
    """
    assert (q_weight_d is None) == (k_weight_d is None)
    return _QKNormRope.apply(qkv_TN, rotation_T2r, q_weight_d, k_weight_d, shape)  # pyright: ignore[reportReturnType]


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TN: Tensor,
        rotation_T2r: Tensor | None,
        q_weight_d: Tensor | None,
        k_weight_d: Tensor | None,
        shape: QKVShape,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_TN = qkv_TN if qkv_TN.stride(1) == 1 else qkv_TN.contiguous()
        rotation_T2r = None if rotation_T2r is None else rotation_T2r.contiguous()
        ctx.shape = shape
        # Only the norm needs its input in backward.
        saved_TN = qkv_TN if q_weight_d is not None else None
        ctx.save_for_backward(saved_TN, rotation_T2r, q_weight_d, k_weight_d)
        tokens = len(qkv_TN)
        q_THd = qkv_TN.new_empty(tokens, shape.heads, shape.head_dim)
        k_TGd = qkv_TN.new_empty(tokens, shape.kv_heads, shape.head_dim)
        v_TGd = torch.empty_like(k_TGd)
        round_norm = q_weight_d is not None and not (shape.offset or q_weight_d.dtype != qkv_TN.dtype)
        block_n, block_d, warps = _select_tile(shape)
        if tokens:
            with device_guard(qkv_TN):
                tensors = (qkv_TN, rotation_T2r, q_weight_d, k_weight_d, q_THd, k_TGd, v_TGd)
                scalars = (qkv_TN.stride(0), shape.eps, shape.offset)
                _training_forward_kernel[(tokens, triton.cdiv(shape.rows, block_n))](
                    *tensors,
                    *scalars,
                    **_shape_constants(shape, rotation_T2r, q_weight_d),
                    ROUND_NORM=round_norm,
                    BLOCK_N=block_n,
                    BLOCK_D=block_d,
                    num_warps=warps,
                )
        return q_THd, k_TGd, v_TGd

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor
    ) -> tuple[Tensor, None, Tensor | None, Tensor | None, None]:
        return qk_norm_rope_backward(q_THd, k_TGd, v_TGd, ctx.saved_tensors, ctx.shape)


def qk_norm_rope_backward(
    q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, saved: Sequence[Tensor | None], shape: QKVShape
) -> tuple[Tensor, None, Tensor | None, Tensor | None, None]:
    """Gradients of the projection and of the norm weights, from those of queries, keys and values.

    ``saved`` are the projection (if there is a norm), the rotation and the weights.
    """
    qkv_TN, rotation_T2r, q_weight_d, k_weight_d = saved
    tokens = len(q_THd)
    q_THd, k_TGd, v_TGd = (_pack_heads(x) for x in (q_THd, k_TGd, v_TGd))
    grad_qkv_TN = torch.empty(tokens, shape.rows * shape.head_dim, dtype=q_THd.dtype, device=q_THd.device)
    block_n, block_d, warps = _select_tile(shape)
    blocks, programs = -(-shape.rows // block_n), min(tokens, _MAX_PROGRAMS)
    partial_sums = torch.empty(programs * blocks, 2, shape.head_dim, dtype=torch.float32, device=q_THd.device)
    saved_or_grad_TN = grad_qkv_TN if qkv_TN is None else qkv_TN
    if tokens:
        with device_guard(q_THd):
            _training_backward_kernel[(programs, blocks)](
                q_THd,
                k_TGd,
                v_TGd,
                saved_or_grad_TN,
                rotation_T2r,
                q_weight_d,
                k_weight_d,
                grad_qkv_TN,
                partial_sums,
                q_THd.stride(0),
                k_TGd.stride(0),
                v_TGd.stride(0),
                saved_or_grad_TN.stride(0),
                tokens,
                programs,
                shape.eps,
                shape.offset,
                **_shape_constants(shape, rotation_T2r, q_weight_d),
                BLOCK_N=block_n,
                BLOCK_D=block_d,
                num_warps=warps,
            )
    if q_weight_d is None or k_weight_d is None:
        return grad_qkv_TN, None, None, None, None
    q_d, k_d = partial_sums.sum(0).unbind()
    return grad_qkv_TN, None, q_d.to(q_weight_d.dtype), k_d.to(k_weight_d.dtype), None


def _pack_heads(x_THd: Tensor) -> Tensor:
    """The heads of a token contiguous; tokens may be strided."""
    return x_THd if x_THd.stride()[1:] == (x_THd.shape[2], 1) else x_THd.contiguous()


def _select_tile(shape: QKVShape) -> tuple[int, int, int]:
    """Heads and channels per program, and its warps."""
    block_d = 1 << (shape.head_dim - 1).bit_length()
    block_n = max(1, min(_TRAINING_TILE // block_d, 1 << (shape.rows - 1).bit_length()))
    return block_n, block_d, min(max(block_n * block_d // 512, 1), 8)


def _shape_constants(shape: QKVShape, rotation_T2r: Tensor | None, q_weight_d: Tensor | None) -> dict[str, Any]:
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "DIM": shape.head_dim,
        "ROTARY_DIM": 0 if rotation_T2r is None else rotation_T2r.shape[-1],
        "INTERLEAVED": shape.interleaved,
        "NORM": q_weight_d is not None,
    }


@jit
def _load_qk_weights(
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    column_1d: tl.tensor,
    query_N1: tl.tensor,
    offset: tl.tensor,
    DIM: tl.constexpr,
) -> tl.tensor:
    valid_1d = (column_1d >= 0) & (column_1d < DIM)
    q_weight_1d = tl.load(q_weight_ptr + column_1d, valid_1d, other=0.0).to(tl.float32)
    k_weight_1d = tl.load(k_weight_ptr + column_1d, valid_1d, other=0.0).to(tl.float32)
    return tl.where(query_N1, q_weight_1d, k_weight_1d) + offset


@jit
def _training_forward_kernel(
    qkv_ptr: tl.tensor,
    rotation_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head_N1, column_1d = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None], tl.arange(0, BLOCK_D)[None, :]
    query_N1, is_qk_N1 = head_N1 < HEADS, head_N1 < HEADS + KV_HEADS
    valid_Nd = (head_N1 < HEADS + 2 * KV_HEADS) & (column_1d < DIM)
    qkv_ptr += token * qkv_stride + head_N1 * DIM
    x_Nd = tl.load(qkv_ptr + column_1d, valid_Nd, other=0.0)
    scale_N1 = 1.0
    if NORM:
        wide_Nd = x_Nd.to(tl.float32)
        scale_N1 = tl.rsqrt(tl.sum(wide_Nd * wide_Nd, 1, keep_dims=True) / DIM + eps)
        weight_Nd = _load_qk_weights(q_weight_ptr, k_weight_ptr, column_1d, query_N1, offset, DIM)
        x_Nd = tl.where(is_qk_N1, _normalize(x_Nd, scale_N1, weight_Nd, ROUND_NORM), x_Nd)
    if ROTARY_DIM > 0:
        rotated_1d = column_1d < ROTARY_DIM
        rotation_ptr += token * (2 * ROTARY_DIM) + column_1d
        cos_1d = tl.load(rotation_ptr, rotated_1d, other=0.0).to(tl.float32)
        sin_1d = tl.load(rotation_ptr + ROTARY_DIM, rotated_1d, other=0.0).to(tl.float32)
        partner_1d = rope_partner(column_1d, ROTARY_DIM, INTERLEAVED)
        partner_Nd = tl.load(qkv_ptr + partner_1d, valid_Nd & rotated_1d & is_qk_N1, other=0.0)
        if NORM:
            weight_Nd = _load_qk_weights(q_weight_ptr, k_weight_ptr, partner_1d, query_N1, offset, DIM)
            partner_Nd = _normalize(partner_Nd, scale_N1, weight_Nd, ROUND_NORM)
        cos_part_Nd = (x_Nd.to(tl.float32) * cos_1d).to(x_Nd.dtype).to(tl.float32)
        rotated_Nd = (cos_part_Nd + partner_Nd.to(tl.float32) * sin_1d).to(x_Nd.dtype)
        x_Nd = tl.where(rotated_1d & is_qk_N1, rotated_Nd, x_Nd)
    key_N1, value_N1 = head_N1 - HEADS, head_N1 - HEADS - KV_HEADS
    tl.store(q_ptr + (token * HEADS + head_N1) * DIM + column_1d, x_Nd, valid_Nd & query_N1)
    tl.store(k_ptr + (token * KV_HEADS + key_N1) * DIM + column_1d, x_Nd, valid_Nd & is_qk_N1 & (key_N1 >= 0))
    tl.store(v_ptr + (token * KV_HEADS + value_N1) * DIM + column_1d, x_Nd, valid_Nd & (value_N1 >= 0))


@jit
def _load_head_grads(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    head_N1: tl.tensor,
    column_1d: tl.tensor,
    masked_Nd: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """Gradients of heads of any kind: each head is of one kind, the other two loads are masked to zero."""
    key_N1, value_N1 = head_N1 - HEADS, head_N1 - HEADS - KV_HEADS
    q_Nd = tl.load(q_ptr + head_N1 * DIM + column_1d, masked_Nd & (head_N1 < HEADS), other=0.0)
    is_key_N1 = (key_N1 >= 0) & (key_N1 < KV_HEADS)
    k_Nd = tl.load(k_ptr + key_N1 * DIM + column_1d, masked_Nd & is_key_N1, other=0.0)
    v_Nd = tl.load(v_ptr + value_N1 * DIM + column_1d, masked_Nd & (value_N1 >= 0), other=0.0)
    return q_Nd.to(tl.float32) + k_Nd.to(tl.float32) + v_Nd.to(tl.float32)


@jit
def _rotate_back(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    head_N1: tl.tensor,
    column_1d: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """One token's gradients before the rotation."""
    is_qk_N1 = head_N1 < HEADS + KV_HEADS
    valid_Nd = (head_N1 < HEADS + 2 * KV_HEADS) & (column_1d < DIM)
    grad_Nd = _load_head_grads(q_ptr, k_ptr, v_ptr, head_N1, column_1d, valid_Nd, HEADS, KV_HEADS, DIM)
    if ROTARY_DIM > 0:
        rotated_1d = column_1d < ROTARY_DIM
        partner_1d = rope_partner(column_1d, ROTARY_DIM, INTERLEAVED)
        cos_1d = tl.load(table_ptr + column_1d, rotated_1d, other=0.0).to(tl.float32)
        sin_1d = tl.load(table_ptr + ROTARY_DIM + partner_1d, rotated_1d, other=0.0).to(tl.float32)
        masked_Nd = valid_Nd & rotated_1d & is_qk_N1
        partner_Nd = _load_head_grads(q_ptr, k_ptr, v_ptr, head_N1, partner_1d, masked_Nd, HEADS, KV_HEADS, DIM)
        grad_Nd = tl.where(rotated_1d & is_qk_N1, grad_Nd * cos_1d + partner_Nd * sin_1d, grad_Nd)
    return grad_Nd


@jit
def _training_backward_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    rotation_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    grad_qkv_ptr: tl.tensor,
    partial_sums_ptr: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    qkv_stride: tl.tensor,
    tokens: tl.tensor,
    programs: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Rotate back, then through the norm: dx = s (w dz - n mean(n w dz)) with n = s x."""
    program, block = tl.program_id(0), tl.program_id(1)
    head_N1, column_1d = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None], tl.arange(0, BLOCK_D)[None, :]
    query_N1, is_qk_N1 = head_N1 < HEADS, head_N1 < HEADS + KV_HEADS
    valid_Nd = (head_N1 < HEADS + 2 * KV_HEADS) & (column_1d < DIM)
    q_sum_d, k_sum_d = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for index in range(program, tokens, programs):
        token = tl.cast(index, tl.int64)
        q_at = q_ptr + token * q_stride
        k_at = k_ptr + token * k_stride
        v_at = v_ptr + token * v_stride
        table = rotation_ptr + token * (2 * ROTARY_DIM) if ROTARY_DIM > 0 else rotation_ptr
        grad_Nd = _rotate_back(
            q_at, k_at, v_at, table, head_N1, column_1d, HEADS, KV_HEADS, DIM, ROTARY_DIM, INTERLEAVED
        )
        if NORM:
            x_Nd = tl.load(qkv_ptr + token * qkv_stride + head_N1 * DIM + column_1d, valid_Nd & is_qk_N1, other=0.0)
            x_Nd = x_Nd.to(tl.float32)
            scale_N1 = tl.rsqrt(tl.sum(x_Nd * x_Nd, 1, keep_dims=True) / DIM + eps)
            normed_Nd = x_Nd * scale_N1
            grad_normed_Nd = grad_Nd * normed_Nd
            q_sum_d += tl.sum(tl.where(query_N1, grad_normed_Nd, 0.0), 0)
            k_sum_d += tl.sum(tl.where(is_qk_N1 & (head_N1 >= HEADS), grad_normed_Nd, 0.0), 0)
            weighted_Nd = grad_Nd * _load_qk_weights(q_weight_ptr, k_weight_ptr, column_1d, query_N1, offset, DIM)
            mean_N1 = tl.sum(weighted_Nd * normed_Nd, 1, keep_dims=True) / DIM
            grad_Nd = tl.where(is_qk_N1, (weighted_Nd - normed_Nd * mean_N1) * scale_N1, grad_Nd)
        out = grad_qkv_ptr + token * ((HEADS + 2 * KV_HEADS) * DIM) + head_N1 * DIM + column_1d
        tl.store(out, grad_Nd, valid_Nd)
    if NORM:
        channel_d = tl.arange(0, BLOCK_D)
        partial_sums_ptr += (program * tl.num_programs(1) + block) * 2 * DIM + channel_d
        tl.store(partial_sums_ptr, q_sum_d, channel_d < DIM)
        tl.store(partial_sums_ptr + DIM, k_sum_d, channel_d < DIM)
