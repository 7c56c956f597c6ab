"""QK-norm + RoPE on a fused QKV projection in training: Triton forward and backward kernels.

Shapes: T tokens, N heads of the projection, H query heads, G key-value heads, d head_dim, r <= d rotated channels, h
channels of half a head, R rows of a tile, one head of one token each, P programs, B blocks of heads.

A program computes tiles of some tokens and of some adjacent heads of one kind. The two channels of each pair that a
rotation mixes are in two tensors, so that each is loaded once; channels beyond the rotated ones form pairs too. Values
are only copied.

Rounded like ``fused.qk_norm_rope``, so that engine and trainer agree. Backward needs the projection (if there is a
norm) and writes the gradient of the whole projection at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.fused.qk_norm_rope import QKVShape
from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton

# Adjacent heads of a tile at most, elements of a tile, its warps, and the most programs of a backward.
_MAX_HEADS = 8
_FORWARD_TILE, _BACKWARD_TILE = 4096, 2048
_WARPS = 4
_MAX_PROGRAMS = 1056


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
        if tokens:
            heads, rows = _select_tile(shape, _FORWARD_TILE)
            tiles = triton.cdiv(tokens, rows) * (shape.rows // heads)
            with device_guard(qkv_TN):
                tensors = (qkv_TN, rotation_T2r, q_weight_d, k_weight_d, q_THd, k_TGd, v_TGd)
                _qk_forward_kernel[(tiles,)](
                    *tensors,
                    qkv_TN.stride(0),
                    tokens,
                    shape.eps,
                    shape.offset,
                    ROUND_NORM=q_weight_d is not None and not (shape.offset or q_weight_d.dtype != qkv_TN.dtype),
                    **_shape_constants(shape, rotation_T2r, q_weight_d, heads, rows),
                    num_warps=_WARPS,
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
    tokens, dim = len(q_THd), shape.head_dim
    q_THd, k_TGd, v_TGd = (_pack_heads(x) for x in (q_THd, k_TGd, v_TGd))
    grad_qkv_TN = torch.empty(tokens, shape.rows * dim, dtype=q_THd.dtype, device=q_THd.device)
    heads, rows = _select_tile(shape, _BACKWARD_TILE)
    blocks = shape.rows // heads
    programs = min(-(-tokens // rows), max(1, _MAX_PROGRAMS // blocks))
    partial_sums_PBd = torch.empty(programs, blocks, dim, dtype=torch.float32, device=q_THd.device)
    if tokens:
        with device_guard(q_THd):
            _qk_backward_kernel[(programs * blocks,)](
                q_THd,
                k_TGd,
                v_TGd,
                grad_qkv_TN if qkv_TN is None else qkv_TN,
                rotation_T2r,
                q_weight_d,
                k_weight_d,
                grad_qkv_TN,
                partial_sums_PBd,
                q_THd.stride(0),
                k_TGd.stride(0),
                v_TGd.stride(0),
                0 if qkv_TN is None else qkv_TN.stride(0),
                tokens,
                programs,
                shape.eps,
                shape.offset,
                **_shape_constants(shape, rotation_T2r, q_weight_d, heads, rows),
                num_warps=_WARPS,
            )
    if q_weight_d is None or k_weight_d is None:
        return grad_qkv_TN, None, None, None, None
    sizes = (shape.heads // heads, shape.kv_heads // heads)
    q_PBd, k_PBd = partial_sums_PBd[:, : sum(sizes)].split(sizes, 1)
    grads = (q_PBd.sum((0, 1)).to(q_weight_d.dtype), k_PBd.sum((0, 1)).to(k_weight_d.dtype))
    return grad_qkv_TN, None, *grads, None


def _pack_heads(x_THd: Tensor) -> Tensor:
    """The heads of a token contiguous; tokens may be strided."""
    return x_THd if x_THd.stride()[1:] == (x_THd.shape[2], 1) else x_THd.contiguous()


def _select_tile(shape: QKVShape, elements: int) -> tuple[int, int]:
    """Adjacent heads of a tile, all of one kind, and its tokens."""
    common = gcd(shape.heads, shape.kv_heads)
    heads = min(common & -common, _MAX_HEADS)
    width = 1 << (shape.head_dim - 1).bit_length()
    return heads, max(1, elements // (width * heads))


def _shape_constants(
    shape: QKVShape, rotation_T2r: Tensor | None, q_weight_d: Tensor | None, heads: int, rows: int
) -> dict[str, Any]:
    assert shape.head_dim % 2 == 0, "channels form pairs"
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "DIM": shape.head_dim,
        "ROTARY_DIM": 0 if rotation_T2r is None else rotation_T2r.shape[-1],
        "INTERLEAVED": shape.interleaved,
        "NORM": q_weight_d is not None,
        "TILE_TOKENS": rows,
        "TILE_HEADS": heads,
        "BLOCK_HALF": 1 << (shape.head_dim // 2 - 1).bit_length(),
    }


@jit
def _pair_columns(
    DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr
) -> tuple:
    """The two channels of each pair, [1, h], and which pairs are there. The pairs of a rotation come first."""
    pair_1h = tl.arange(0, BLOCK_HALF)[None, :]
    if INTERLEAVED:
        low_1h, high_1h = 2 * pair_1h, 2 * pair_1h + 1
    elif ROTARY_DIM == 0 or ROTARY_DIM == DIM:
        low_1h, high_1h = pair_1h, pair_1h + DIM // 2
    else:
        rotated_1h = pair_1h < ROTARY_DIM // 2
        low_1h = tl.where(rotated_1h, pair_1h, pair_1h + ROTARY_DIM // 2)
        high_1h = tl.where(rotated_1h, pair_1h + ROTARY_DIM // 2, pair_1h + DIM // 2)
    return low_1h, high_1h, pair_1h < DIM // 2


@jit
def _load_rotation(
    rotation_ptr: tl.tensor,
    token_R1: tl.tensor,
    valid_R1: tl.tensor,
    low_1h: tl.tensor,
    high_1h: tl.tensor,
    ROTARY_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> tuple:
    """Cosines and sines of pairs: the table has a cosine for both channels, and the sine of the first negated."""
    rotation_ptr += token_R1 * (2 * ROTARY_DIM)
    valid_Rh = valid_R1 & (tl.arange(0, BLOCK_HALF)[None, :] < ROTARY_DIM // 2)
    cos_Rh = tl.load(rotation_ptr + low_1h, valid_Rh, other=1.0).to(tl.float32)
    sin_Rh = tl.load(rotation_ptr + ROTARY_DIM + high_1h, valid_Rh, other=0.0).to(tl.float32)
    return cos_Rh, sin_Rh


@jit
def _scale_and_round(x_Rc: tl.tensor, scale_R1: tl.tensor, weight_1c: tl.tensor, ROUND_NORM: tl.constexpr) -> tl.tensor:
    """Scaled by its head's ``scale``, times the weight; rounded in between if ROUND_NORM."""
    normed_Rc = x_Rc.to(tl.float32) * scale_R1
    if ROUND_NORM:
        normed_Rc = normed_Rc.to(x_Rc.dtype).to(tl.float32)
    return (normed_Rc * weight_1c).to(x_Rc.dtype)


@jit
def _rotate(own_Rh: tl.tensor, partner_Rh: tl.tensor, cos_Rh: tl.tensor, sin_Rh: tl.tensor) -> tl.tensor:
    """One channel of pairs, rounded as ``apply_rotary`` rounds it."""
    cos_part_Rh = (own_Rh.to(tl.float32) * cos_Rh).to(own_Rh.dtype).to(tl.float32)
    return (cos_part_Rh + partner_Rh.to(tl.float32) * sin_Rh).to(own_Rh.dtype)


@jit
def _normalize_and_rotate(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    rotation_ptr: tl.tensor,
    source_R1: tl.tensor,
    target_R1: tl.tensor,
    token_R1: tl.tensor,
    valid_R1: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Rows of queries or keys, from offsets ``source`` to offsets ``target``."""
    low_1h, high_1h, pair_1h = _pair_columns(DIM, ROTARY_DIM, INTERLEAVED, BLOCK_HALF)
    valid_Rh = valid_R1 & pair_1h
    low_Rh = tl.load(source_ptr + source_R1 + low_1h, valid_Rh, other=0.0)
    high_Rh = tl.load(source_ptr + source_R1 + high_1h, valid_Rh, other=0.0)
    if NORM:
        wide_low_Rh, wide_high_Rh = low_Rh.to(tl.float32), high_Rh.to(tl.float32)
        square_R1 = tl.sum(wide_low_Rh * wide_low_Rh + wide_high_Rh * wide_high_Rh, 1, keep_dims=True)
        scale_R1 = tl.rsqrt(square_R1 / DIM + eps)
        low_weight_1h = tl.load(weight_ptr + low_1h, pair_1h, other=0.0).to(tl.float32) + offset
        high_weight_1h = tl.load(weight_ptr + high_1h, pair_1h, other=0.0).to(tl.float32) + offset
        low_Rh = _scale_and_round(low_Rh, scale_R1, low_weight_1h, ROUND_NORM)
        high_Rh = _scale_and_round(high_Rh, scale_R1, high_weight_1h, ROUND_NORM)
    if ROTARY_DIM > 0:
        cos_Rh, sin_Rh = _load_rotation(rotation_ptr, token_R1, valid_R1, low_1h, high_1h, ROTARY_DIM, BLOCK_HALF)
        turned_Rh = _rotate(high_Rh, low_Rh, cos_Rh, sin_Rh)
        low_Rh = _rotate(low_Rh, high_Rh, cos_Rh, -sin_Rh)
        high_Rh = turned_Rh
    tl.store(target_ptr + target_R1 + low_1h, low_Rh, valid_Rh)
    tl.store(target_ptr + target_R1 + high_1h, high_Rh, valid_Rh)


@jit
def _copy_heads(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    source_R1: tl.tensor,
    target_R1: tl.tensor,
    valid_R1: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    column_1d = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    valid_Rd = valid_R1 & (column_1d < DIM)
    x_Rd = tl.load(source_ptr + source_R1 + column_1d, valid_Rd, other=0.0)
    tl.store(target_ptr + target_R1 + column_1d, x_Rd, valid_Rd)


@jit
def _qk_forward_kernel(
    qkv_ptr: tl.tensor,
    rotation_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    tokens: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    BLOCKS: tl.constexpr = (HEADS + 2 * KV_HEADS) // TILE_HEADS
    head = tl.program_id(0) % BLOCKS * TILE_HEADS
    row_R1 = tl.arange(0, TILE_TOKENS * TILE_HEADS)[:, None]
    token_R1 = (tl.program_id(0) // BLOCKS * TILE_TOKENS + row_R1 // TILE_HEADS).to(tl.int64)
    head_R1 = row_R1 % TILE_HEADS
    valid_R1 = token_R1 < tokens
    source_R1 = token_R1 * qkv_stride + (head + head_R1) * DIM
    if head < HEADS:
        target_R1 = (token_R1 * HEADS + head + head_R1) * DIM
        _normalize_and_rotate(
            qkv_ptr,
            q_ptr,
            q_weight_ptr,
            rotation_ptr,
            source_R1,
            target_R1,
            token_R1,
            valid_R1,
            eps,
            offset,
            DIM,
            ROTARY_DIM,
            INTERLEAVED,
            NORM,
            ROUND_NORM,
            BLOCK_HALF,
        )
    elif head < HEADS + KV_HEADS:
        target_R1 = (token_R1 * KV_HEADS + head - HEADS + head_R1) * DIM
        _normalize_and_rotate(
            qkv_ptr,
            k_ptr,
            k_weight_ptr,
            rotation_ptr,
            source_R1,
            target_R1,
            token_R1,
            valid_R1,
            eps,
            offset,
            DIM,
            ROTARY_DIM,
            INTERLEAVED,
            NORM,
            ROUND_NORM,
            BLOCK_HALF,
        )
    else:
        target_R1 = (token_R1 * KV_HEADS + head - HEADS - KV_HEADS + head_R1) * DIM
        _copy_heads(qkv_ptr, v_ptr, source_R1, target_R1, valid_R1, DIM, BLOCK_HALF)


@jit
def _rotate_and_norm_back(
    grad_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    rotation_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    grad_qkv_ptr: tl.tensor,
    partial_sums_ptr: tl.tensor,
    grad_stride: tl.tensor,
    qkv_stride: tl.tensor,
    first_head: tl.tensor,
    head: tl.tensor,
    program: tl.tensor,
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
    TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Queries or keys, whose first head is ``first_head``: rotate back, then through the norm.

    dx = s (w dz - n mean(n w dz)) with n = s x. Gradients of the weight are summed per row of the tile, then once.
    """
    row_R1 = tl.arange(0, TILE_TOKENS * TILE_HEADS)[:, None]
    head_R1 = head + row_R1 % TILE_HEADS
    low_1h, high_1h, pair_1h = _pair_columns(DIM, ROTARY_DIM, INTERLEAVED, BLOCK_HALF)
    low_sum_Rh = tl.zeros((TILE_TOKENS * TILE_HEADS, BLOCK_HALF), tl.float32)
    high_sum_Rh = tl.zeros((TILE_TOKENS * TILE_HEADS, BLOCK_HALF), tl.float32)
    if NORM:
        low_weight_1h = tl.load(weight_ptr + low_1h, pair_1h, other=0.0).to(tl.float32) + offset
        high_weight_1h = tl.load(weight_ptr + high_1h, pair_1h, other=0.0).to(tl.float32) + offset
    for first in range(program * TILE_TOKENS, tokens, programs * TILE_TOKENS):
        token_R1 = (first + row_R1 // TILE_HEADS).to(tl.int64)
        valid_R1 = token_R1 < tokens
        valid_Rh = valid_R1 & pair_1h
        grad_R1 = token_R1 * grad_stride + (head_R1 - first_head) * DIM
        low_Rh = tl.load(grad_ptr + grad_R1 + low_1h, valid_Rh, other=0.0).to(tl.float32)
        high_Rh = tl.load(grad_ptr + grad_R1 + high_1h, valid_Rh, other=0.0).to(tl.float32)
        if ROTARY_DIM > 0:
            cos_Rh, sin_Rh = _load_rotation(rotation_ptr, token_R1, valid_R1, low_1h, high_1h, ROTARY_DIM, BLOCK_HALF)
            turned_Rh = high_Rh * cos_Rh - low_Rh * sin_Rh
            low_Rh = low_Rh * cos_Rh + high_Rh * sin_Rh
            high_Rh = turned_Rh
        if NORM:
            source_R1 = token_R1 * qkv_stride + head_R1 * DIM
            low_x_Rh = tl.load(qkv_ptr + source_R1 + low_1h, valid_Rh, other=0.0).to(tl.float32)
            high_x_Rh = tl.load(qkv_ptr + source_R1 + high_1h, valid_Rh, other=0.0).to(tl.float32)
            square_R1 = tl.sum(low_x_Rh * low_x_Rh + high_x_Rh * high_x_Rh, 1, keep_dims=True)
            scale_R1 = tl.rsqrt(square_R1 / DIM + eps)
            low_x_Rh, high_x_Rh = low_x_Rh * scale_R1, high_x_Rh * scale_R1
            low_sum_Rh += low_Rh * low_x_Rh
            high_sum_Rh += high_Rh * high_x_Rh
            low_Rh, high_Rh = low_Rh * low_weight_1h, high_Rh * high_weight_1h
            mean_R1 = tl.sum(low_Rh * low_x_Rh + high_Rh * high_x_Rh, 1, keep_dims=True) / DIM
            low_Rh = (low_Rh - low_x_Rh * mean_R1) * scale_R1
            high_Rh = (high_Rh - high_x_Rh * mean_R1) * scale_R1
        target_R1 = (token_R1 * (HEADS + 2 * KV_HEADS) + head_R1) * DIM
        tl.store(grad_qkv_ptr + target_R1 + low_1h, low_Rh, valid_Rh)
        tl.store(grad_qkv_ptr + target_R1 + high_1h, high_Rh, valid_Rh)
    if NORM:
        partial_sums_ptr += tl.program_id(0) * DIM
        tl.store(partial_sums_ptr + low_1h, tl.sum(low_sum_Rh, 0)[None, :], pair_1h)
        tl.store(partial_sums_ptr + high_1h, tl.sum(high_sum_Rh, 0)[None, :], pair_1h)


@jit
def _copy_values_back(
    v_ptr: tl.tensor,
    grad_qkv_ptr: tl.tensor,
    v_stride: tl.tensor,
    head: tl.tensor,
    program: tl.tensor,
    tokens: tl.tensor,
    programs: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    row_R1 = tl.arange(0, TILE_TOKENS * TILE_HEADS)[:, None]
    head_R1 = head + row_R1 % TILE_HEADS
    for first in range(program * TILE_TOKENS, tokens, programs * TILE_TOKENS):  # pyright: ignore[reportArgumentType]
        token_R1 = (first + row_R1 // TILE_HEADS).to(tl.int64)
        source_R1 = token_R1 * v_stride + (head_R1 - HEADS - KV_HEADS) * DIM
        target_R1 = (token_R1 * (HEADS + 2 * KV_HEADS) + head_R1) * DIM
        _copy_heads(v_ptr, grad_qkv_ptr, source_R1, target_R1, token_R1 < tokens, DIM, BLOCK_HALF)


@jit
def _qk_backward_kernel(
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
    TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """A program computes one block of heads of every ``programs``-th tile of tokens."""
    BLOCKS: tl.constexpr = (HEADS + 2 * KV_HEADS) // TILE_HEADS
    head = tl.program_id(0) % BLOCKS * TILE_HEADS
    program = tl.program_id(0) // BLOCKS
    if head < HEADS + KV_HEADS:
        grad_ptr, grad_stride = k_ptr, k_stride
        weight_ptr = k_weight_ptr
        if head < HEADS:
            grad_ptr, grad_stride = q_ptr, q_stride
            weight_ptr = q_weight_ptr
        _rotate_and_norm_back(
            grad_ptr,
            qkv_ptr,
            rotation_ptr,
            weight_ptr,
            grad_qkv_ptr,
            partial_sums_ptr,
            grad_stride,
            qkv_stride,
            tl.where(head < HEADS, 0, HEADS),
            head,
            program,
            tokens,
            programs,
            eps,
            offset,
            HEADS,
            KV_HEADS,
            DIM,
            ROTARY_DIM,
            INTERLEAVED,
            NORM,
            TILE_TOKENS,
            TILE_HEADS,
            BLOCK_HALF,
        )
    else:
        _copy_values_back(
            v_ptr,
            grad_qkv_ptr,
            v_stride,
            head,
            program,
            tokens,
            programs,
            HEADS,
            KV_HEADS,
            DIM,
            TILE_TOKENS,
            TILE_HEADS,
            BLOCK_HALF,
        )
