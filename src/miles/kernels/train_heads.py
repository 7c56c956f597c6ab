"""From a fused projection to what attention takes, in training: norms of heads and the rotation, one pass each way.

Shapes: T tokens, H query heads, G key-value heads, N = H + 2G, d head_dim, r <= d rotated channels, P programs.

Rounded as ``prepare`` rounds it, so that engine and trainer agree. The backward writes the gradient of the whole
projection at once, that of the values with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.device_code import jit, on, tl, triton
from miles.kernels.prepare import partner

# Numbers a program takes at once, and the most programs a backward gives each block of heads.
_TILE = 2048
_PROGRAMS = 264


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a projection is made up; ``interleaved`` rotations pair neighbours and not halves."""

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


def heads_in_training(
    qkv_TN: Tensor,
    rotation_T2r: Tensor | None,
    q_weight_d: Tensor | None,
    k_weight_d: Tensor | None,
    shape: Shape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, d] and keys [T, G, d], normalised with weights and rotated with a rotation; and the values.

    ``rotation_T2r`` holds cosines and signed sines of each token, as ``rope.rotation`` gives them.
    """
    assert (q_weight_d is None) == (k_weight_d is None)
    return _Heads.apply(qkv_TN, rotation_T2r, q_weight_d, k_weight_d, shape)  # pyright: ignore[reportReturnType]


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TN: Tensor,
        rotation_T2r: Tensor | None,
        q_weight_d: Tensor | None,
        k_weight_d: Tensor | None,
        shape: Shape,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_TN = qkv_TN if qkv_TN.stride(1) == 1 else qkv_TN.contiguous()
        rotation_T2r = None if rotation_T2r is None else rotation_T2r.contiguous()
        ctx.shape = shape
        # Rotating back needs nothing of what was rotated; only a norm does.
        kept_TN = qkv_TN if q_weight_d is not None else None
        ctx.save_for_backward(kept_TN, rotation_T2r, q_weight_d, k_weight_d)
        tokens = len(qkv_TN)
        made = {"dtype": qkv_TN.dtype, "device": qkv_TN.device}
        q_THd = torch.empty(tokens, shape.heads, shape.head_dim, **made)
        k_TGd = torch.empty(tokens, shape.kv_heads, shape.head_dim, **made)
        v_TGd = torch.empty_like(k_TGd)
        narrow = q_weight_d is not None and not (shape.offset or q_weight_d.dtype != qkv_TN.dtype)
        block_n, block_d, warps = _tile(shape)
        if tokens:
            with on(qkv_TN):
                _heads_forward[(tokens, triton.cdiv(shape.rows, block_n))](
                    *(qkv_TN, rotation_T2r, q_weight_d, k_weight_d, q_THd, k_TGd, v_TGd),
                    *(qkv_TN.stride(0), shape.eps, shape.offset),
                    **_kind(shape, rotation_T2r, q_weight_d),
                    NARROW=narrow,
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
        return heads_backward(q_THd, k_TGd, v_TGd, ctx.saved_tensors, ctx.shape)


def heads_backward(
    q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, saved: Sequence[Tensor | None], shape: Shape
) -> tuple[Tensor, None, Tensor | None, Tensor | None, None]:
    """The gradients of the projection and of the norms' weights, out of those of queries, keys and values.

    ``saved`` are the projection, where there are norms, the rotation and the weights.
    """
    qkv_TN, rotation_T2r, q_weight_d, k_weight_d = saved
    tokens = len(q_THd)
    q_THd, k_TGd, v_TGd = (_packed(x) for x in (q_THd, k_TGd, v_TGd))
    back_TN = torch.empty(tokens, shape.rows * shape.head_dim, dtype=q_THd.dtype, device=q_THd.device)
    block_n, block_d, warps = _tile(shape)
    blocks, programs = -(-shape.rows // block_n), min(tokens, _PROGRAMS)
    parts = torch.empty(programs * blocks, 2, shape.head_dim, dtype=torch.float32, device=q_THd.device)
    source_TN = back_TN if qkv_TN is None else qkv_TN
    if tokens:
        with on(q_THd):
            _heads_backward[(programs, blocks)](
                *(q_THd, k_TGd, v_TGd, source_TN, rotation_T2r, q_weight_d, k_weight_d, back_TN, parts),
                *(q_THd.stride(0), k_TGd.stride(0), v_TGd.stride(0), source_TN.stride(0)),
                *(tokens, programs, shape.eps, shape.offset),
                **_kind(shape, rotation_T2r, q_weight_d),
                BLOCK_N=block_n,
                BLOCK_D=block_d,
                num_warps=warps,
            )
    if q_weight_d is None or k_weight_d is None:
        return back_TN, None, None, None, None
    q_d, k_d = parts.sum(0).unbind()
    return back_TN, None, q_d.to(q_weight_d.dtype), k_d.to(k_weight_d.dtype), None


def _packed(x_THd: Tensor) -> Tensor:
    """Heads side by side; tokens may lie apart."""
    return x_THd if x_THd.stride()[1:] == (x_THd.shape[2], 1) else x_THd.contiguous()


def _tile(shape: Shape) -> tuple[int, int, int]:
    """Heads and channels a program takes at once, and its warps."""
    block_d = 1 << (shape.head_dim - 1).bit_length()
    block_n = max(1, min(_TILE // block_d, 1 << (shape.rows - 1).bit_length()))
    return block_n, block_d, min(max(block_n * block_d // 512, 1), 8)


def _kind(shape: Shape, rotation_T2r: Tensor | None, q_weight_d: Tensor | None) -> dict[str, Any]:
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "DIM": shape.head_dim,
        "TURNED": 0 if rotation_T2r is None else rotation_T2r.shape[-1],
        "INTERLEAVED": shape.interleaved,
        "NORM": q_weight_d is not None,
    }


@jit
def _weights(
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    column_1d: tl.tensor,
    query_N1: tl.tensor,
    offset: tl.tensor,
    DIM: tl.constexpr,
) -> tl.tensor:
    inside_1d = (column_1d >= 0) & (column_1d < DIM)
    q_weight_1d = tl.load(q_weight_ptr + column_1d, inside_1d, other=0.0).to(tl.float32)
    k_weight_1d = tl.load(k_weight_ptr + column_1d, inside_1d, other=0.0).to(tl.float32)
    return tl.where(query_N1, q_weight_1d, k_weight_1d) + offset


@jit
def _scaled(x_Nd: tl.tensor, scale_N1: tl.tensor, weight_Nd: tl.tensor, NARROW: tl.constexpr) -> tl.tensor:
    """Normalised by its head's ``scale``, times the weight; rounded in between where the weight is as narrow."""
    normed_Nd = x_Nd.to(tl.float32) * scale_N1
    if NARROW:
        normed_Nd = normed_Nd.to(x_Nd.dtype).to(tl.float32)
    return (normed_Nd * weight_Nd).to(x_Nd.dtype)


@jit
def _heads_forward(
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
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head_N1, column_1d = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None], tl.arange(0, BLOCK_D)[None, :]
    query_N1, early_N1 = head_N1 < HEADS, head_N1 < HEADS + KV_HEADS
    inside_Nd = (head_N1 < HEADS + 2 * KV_HEADS) & (column_1d < DIM)
    qkv_ptr += token * qkv_stride + head_N1 * DIM
    x_Nd = tl.load(qkv_ptr + column_1d, inside_Nd, other=0.0)
    scale_N1 = 1.0
    if NORM:
        wide_Nd = x_Nd.to(tl.float32)
        scale_N1 = tl.rsqrt(tl.sum(wide_Nd * wide_Nd, 1, keep_dims=True) / DIM + eps)
        weight_Nd = _weights(q_weight_ptr, k_weight_ptr, column_1d, query_N1, offset, DIM)
        x_Nd = tl.where(early_N1, _scaled(x_Nd, scale_N1, weight_Nd, NARROW), x_Nd)
    if TURNED > 0:
        turned_1d = column_1d < TURNED
        rotation_ptr += token * (2 * TURNED) + column_1d
        cos_1d = tl.load(rotation_ptr, turned_1d, other=0.0).to(tl.float32)
        sin_1d = tl.load(rotation_ptr + TURNED, turned_1d, other=0.0).to(tl.float32)
        other_1d = partner(column_1d, TURNED, INTERLEAVED)
        other_Nd = tl.load(qkv_ptr + other_1d, inside_Nd & turned_1d & early_N1, other=0.0)
        if NORM:
            weight_Nd = _weights(q_weight_ptr, k_weight_ptr, other_1d, query_N1, offset, DIM)
            other_Nd = _scaled(other_Nd, scale_N1, weight_Nd, NARROW)
        first_Nd = (x_Nd.to(tl.float32) * cos_1d).to(x_Nd.dtype).to(tl.float32)
        rotated_Nd = (first_Nd + other_Nd.to(tl.float32) * sin_1d).to(x_Nd.dtype)
        x_Nd = tl.where(turned_1d & early_N1, rotated_Nd, x_Nd)
    key_N1, value_N1 = head_N1 - HEADS, head_N1 - HEADS - KV_HEADS
    tl.store(q_ptr + (token * HEADS + head_N1) * DIM + column_1d, x_Nd, inside_Nd & query_N1)
    tl.store(k_ptr + (token * KV_HEADS + key_N1) * DIM + column_1d, x_Nd, inside_Nd & early_N1 & (key_N1 >= 0))
    tl.store(v_ptr + (token * KV_HEADS + value_N1) * DIM + column_1d, x_Nd, inside_Nd & (value_N1 >= 0))


@jit
def _three(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    head_N1: tl.tensor,
    column_1d: tl.tensor,
    wanted_Nd: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """The gradients of heads of any kind; each is of one, and the other two add nothing."""
    key_N1, value_N1 = head_N1 - HEADS, head_N1 - HEADS - KV_HEADS
    q_Nd = tl.load(q_ptr + head_N1 * DIM + column_1d, wanted_Nd & (head_N1 < HEADS), other=0.0)
    is_key_N1 = (key_N1 >= 0) & (key_N1 < KV_HEADS)
    k_Nd = tl.load(k_ptr + key_N1 * DIM + column_1d, wanted_Nd & is_key_N1, other=0.0)
    v_Nd = tl.load(v_ptr + value_N1 * DIM + column_1d, wanted_Nd & (value_N1 >= 0), other=0.0)
    return q_Nd.to(tl.float32) + k_Nd.to(tl.float32) + v_Nd.to(tl.float32)


@jit
def _turned_back(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    head_N1: tl.tensor,
    column_1d: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """One token's gradients as they were before the rotation."""
    early_N1 = head_N1 < HEADS + KV_HEADS
    inside_Nd = (head_N1 < HEADS + 2 * KV_HEADS) & (column_1d < DIM)
    grad_Nd = _three(q_ptr, k_ptr, v_ptr, head_N1, column_1d, inside_Nd, HEADS, KV_HEADS, DIM)
    if TURNED > 0:
        turned_1d = column_1d < TURNED
        other_1d = partner(column_1d, TURNED, INTERLEAVED)
        cos_1d = tl.load(table_ptr + column_1d, turned_1d, other=0.0).to(tl.float32)
        sin_1d = tl.load(table_ptr + TURNED + other_1d, turned_1d, other=0.0).to(tl.float32)
        wanted_Nd = inside_Nd & turned_1d & early_N1
        other_Nd = _three(q_ptr, k_ptr, v_ptr, head_N1, other_1d, wanted_Nd, HEADS, KV_HEADS, DIM)
        grad_Nd = tl.where(turned_1d & early_N1, grad_Nd * cos_1d + other_Nd * sin_1d, grad_Nd)
    return grad_Nd


@jit
def _heads_backward(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    rotation_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    back_ptr: tl.tensor,
    parts_ptr: tl.tensor,
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
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Turned back, then through the norm: dx = s (w dz - n mean(n w dz)) with n = s x."""
    program, block = tl.program_id(0), tl.program_id(1)
    head_N1, column_1d = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None], tl.arange(0, BLOCK_D)[None, :]
    query_N1, early_N1 = head_N1 < HEADS, head_N1 < HEADS + KV_HEADS
    inside_Nd = (head_N1 < HEADS + 2 * KV_HEADS) & (column_1d < DIM)
    q_sum_d, k_sum_d = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for at in range(program, tokens, programs):
        token = tl.cast(at, tl.int64)
        q_at, k_at, v_at = q_ptr + token * q_stride, k_ptr + token * k_stride, v_ptr + token * v_stride
        table = rotation_ptr + token * (2 * TURNED) if TURNED > 0 else rotation_ptr
        grad_Nd = _turned_back(q_at, k_at, v_at, table, head_N1, column_1d, HEADS, KV_HEADS, DIM, TURNED, INTERLEAVED)
        if NORM:
            x_Nd = tl.load(qkv_ptr + token * qkv_stride + head_N1 * DIM + column_1d, inside_Nd & early_N1, other=0.0)
            x_Nd = x_Nd.to(tl.float32)
            scale_N1 = tl.rsqrt(tl.sum(x_Nd * x_Nd, 1, keep_dims=True) / DIM + eps)
            normed_Nd = x_Nd * scale_N1
            share_Nd = grad_Nd * normed_Nd
            q_sum_d += tl.sum(tl.where(query_N1, share_Nd, 0.0), 0)
            k_sum_d += tl.sum(tl.where(early_N1 & (head_N1 >= HEADS), share_Nd, 0.0), 0)
            slope_Nd = grad_Nd * _weights(q_weight_ptr, k_weight_ptr, column_1d, query_N1, offset, DIM)
            mean_N1 = tl.sum(slope_Nd * normed_Nd, 1, keep_dims=True) / DIM
            grad_Nd = tl.where(early_N1, (slope_Nd - normed_Nd * mean_N1) * scale_N1, grad_Nd)
        out = back_ptr + token * ((HEADS + 2 * KV_HEADS) * DIM) + head_N1 * DIM + column_1d
        tl.store(out, grad_Nd, inside_Nd)
    if NORM:
        channel_d = tl.arange(0, BLOCK_D)
        parts_ptr += (program * tl.num_programs(1) + block) * 2 * DIM + channel_d
        tl.store(parts_ptr, q_sum_d, channel_d < DIM)
        tl.store(parts_ptr + DIM, k_sum_d, channel_d < DIM)
