"""Bidirectional varlen attention as a Triton kernel, for head dims that are no power of two.

Shapes: T tokens, H heads, d channels, M queries and N keys of a tile, A + B padded channels.

Vision towers have heads of 72, 80 or 88 channels. Padded to 128, the next power of two, up to 44 % of the work would be
on zeros; so channels are split into a power of two, A, and a padded rest, B: 64 + 16 for 72.

Keys and values are loaded by TMA. The rest of a head then has, instead of zeros, channels of the next one: those of
keys meet zeros of the query, and those of values are not stored.
"""

# Descriptors and bounds of loops are no types that the checker knows.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from miles.kernels.runtime.triton_compat import device_guard, jit, tl, use_triton_inference

# Queries of a tile; its keys, warps and pipeline stages, for padded channels up to 96 and for more.
TILE_QUERIES = 128
TILE_NARROW = (64, 8, 3)
TILE_WIDE = (64, 8, 2)
MAX_HEAD_DIM = 128
_LOG2E = 1.4426950408889634


def split_head_dim(dim: int) -> tuple[int, int]:
    """The two widths that channels are split into, the second 0 if one is enough.

    >>> split_head_dim(72), split_head_dim(88), split_head_dim(64), split_head_dim(120)
    ((64, 16), (64, 32), (64, 0), (128, 0))
    """
    whole = max(16, 1 << (dim - 1).bit_length())
    half = whole // 2
    rest = max(16, 1 << (dim - half - 1).bit_length()) if half >= 16 else half
    return (half, rest) if 0 < rest < half else (whole, 0)


def can_attend_segments(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor) -> bool:
    """Whether the kernel applies: inference in half precision on a GPU with TMA, whose strides TMA can load."""
    if not use_triton_inference(q_THd) or q_THd.dtype.itemsize != 2 or not has_tma(q_THd.device):
        return False
    dim = q_THd.shape[-1]
    return dim <= MAX_HEAD_DIM and all(
        x.stride()[1:] == (dim, 1) and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in (q_THd, k_THd, v_THd)
    )


@cache
def has_tma(device: torch.device) -> bool:
    """Whether a GPU loads tiles by TMA: Hopper and later."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def attend_segments(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, tiles: Tensor, scale: float) -> Tensor:
    """Attention within segments, [T, H, d]. ``tiles`` are the first query, the first key and the end of the segment of
    every tile of TILE_QUERIES queries, [tiles, 3] int32; heads must be contiguous, tokens may be apart.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    tokens, heads, dim = q_THd.shape
    out_THd = torch.empty(tokens, heads, dim, dtype=q_THd.dtype, device=q_THd.device)
    first, rest = split_head_dim(dim)
    keys, warps, stages = TILE_NARROW if first + rest <= 96 else TILE_WIDE
    descriptors = [
        TensorDescriptor(x, [tokens, heads * dim], [x.stride(0), 1], [keys, width])
        for x in (k_THd, v_THd)
        for width in (first, rest or first)
    ]
    with device_guard(q_THd):
        _attend_kernel[(len(tiles), heads)](
            q_THd,
            *descriptors,
            out_THd,
            tiles,
            q_THd.stride(0),
            scale * _LOG2E,
            HEADS=heads,
            DIM=dim,
            A=first,
            B=rest,
            M=TILE_QUERIES,
            N=keys,
            num_warps=warps,
            num_stages=stages,
        )
    return out_THd


@jit
def _attend_kernel(
    q_ptr: tl.tensor,
    k_A: tl.tensor,
    k_B: tl.tensor,
    v_A: tl.tensor,
    v_B: tl.tensor,
    out_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    q_stride: tl.tensor,
    factor: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
) -> None:
    tile, head = tl.program_id(0), tl.program_id(1)
    start, begin = tl.load(tiles_ptr + 3 * tile), tl.load(tiles_ptr + 3 * tile + 1)
    end = tl.load(tiles_ptr + 3 * tile + 2)
    row_M = start + tl.arange(0, M)
    real_M = row_M < end
    column_A, column_B = tl.arange(0, A), A + tl.arange(0, B if B > 0 else 16)
    valid_MA, valid_MB = real_M[:, None] & (column_A[None, :] < DIM), real_M[:, None] & (column_B[None, :] < DIM)
    q_M1 = q_ptr + row_M.to(tl.int64)[:, None] * q_stride + head * DIM
    q_MA = tl.load(q_M1 + column_A[None, :], mask=valid_MA, other=0.0)
    q_MB = tl.load(q_M1 + column_B[None, :], mask=valid_MB, other=0.0)
    state = (
        tl.zeros([M, A], tl.float32),
        tl.zeros([M, B if B > 0 else 16], tl.float32),
        tl.full([M], float("-inf"), tl.float32),
        tl.zeros([M], tl.float32),
    )
    whole = begin + (end - begin) // N * N
    inputs = q_MA, q_MB, k_A, k_B, v_A, v_B, head * DIM
    state = _attend_range(*state, *inputs, begin, whole, end, factor, A, B, N, False)
    out_MA, out_MB, _, sum_M = _attend_range(*state, *inputs, whole, end, end, factor, A, B, N, True)
    dtype = out_ptr.dtype.element_ty
    out_M1 = out_ptr + row_M.to(tl.int64)[:, None] * (HEADS * DIM) + head * DIM
    tl.store(out_M1 + column_A[None, :], (out_MA / sum_M[:, None]).to(dtype), mask=valid_MA)
    if B > 0:
        tl.store(out_M1 + column_B[None, :], (out_MB / sum_M[:, None]).to(dtype), mask=valid_MB)


@jit
def _attend_range(
    out_MA: tl.tensor,
    out_MB: tl.tensor,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    q_MA: tl.tensor,
    q_MB: tl.tensor,
    k_A: tl.tensor,
    k_B: tl.tensor,
    v_A: tl.tensor,
    v_B: tl.tensor,
    column: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    end: tl.tensor,
    factor: tl.tensor,
    A: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> Any:
    """Attend to the keys [begin, stop); without BOUNDED these are whole tiles."""
    for key in range(begin, stop, N):
        score_MN = tl.dot(q_MA, k_A.load([key, column]).T)
        if B > 0:
            score_MN = tl.dot(q_MB, k_B.load([key, column + A]).T, score_MN)
        if BOUNDED:
            valid_N = key + tl.arange(0, N) < end
            score_MN = tl.where(valid_N[None, :], score_MN, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(score_MN, 1))
        p_MN = tl.exp2(score_MN * factor - (new_max_M * factor)[:, None])
        rescale_M = tl.exp2((max_M - new_max_M) * factor)
        sum_M = sum_M * rescale_M + tl.sum(p_MN, 1)
        max_M = new_max_M
        p_MN = p_MN.to(q_MA.dtype)
        v_NA = v_A.load([key, column])
        if BOUNDED:  # the next segment may hold infinities
            v_NA = tl.where(valid_N[:, None], v_NA, 0.0)
        out_MA = tl.dot(p_MN, v_NA, out_MA * rescale_M[:, None])
        if B > 0:
            v_NB = v_B.load([key, column + A])
            if BOUNDED:
                v_NB = tl.where(valid_N[:, None], v_NB, 0.0)
            out_MB = tl.dot(p_MN, v_NB, out_MB * rescale_M[:, None])
    return out_MA, out_MB, max_M, sum_M
