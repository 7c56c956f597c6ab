"""Dense prefill attention (cuDNN SDPA) of long prompt chunks, over keys and values gathered from their pages.

Shapes: T new tokens, n of a chunk, H query heads, G key-value heads, d channels, S slots of the KV cache, I tiles.

cuDNN's kernel reads contiguous keys and is about 1.6 times as fast on Hopper as the paged one, but takes some 50 ms to
plan attention of new sizes. So it gets chunks and blocks of earlier keys that are multiples of ``UNIT`` tokens; the
results for the blocks are merged by their log-sum-exps. All other tokens are left to the paged kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.attention.params import PagedAttentionParams
from miles.kernels.runtime.kv_cache import Ints
from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton

# Tokens of chunks and of blocks of keys are multiples of it, so that there are few plans; a paged tile divides it.
UNIT = 4096
# The most earlier keys that are gathered at once.
_MAX_BLOCK = 8 * UNIT
# Pairs of a query and a key from which on a chunk's first use pays for its plans.
_MIN_PAIRS = 1 << 26
_MAX_HEAD_DIM = 128
_MERGED_ROWS = 16

AttendFn = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
"""Attention of queries [1, H, n, d] to keys and values [1, G, c, d], causal or not, with a softmax scale: the output
and the log-sum-exps [1, H, n, 1].
"""


class DenseChunk(NamedTuple):
    """``length`` new tokens from query row ``row`` on, behind ``start`` cached ones; ``slots`` are those of all."""

    row: int
    length: int
    start: int
    slots: Tensor


@dataclass(frozen=True, slots=True)
class DensePrefill:
    """The dense chunks of a step, and the paged tiles of the tokens that are in none, on the device."""

    chunks: Sequence[DenseChunk]
    tiles: Tensor | None


class ChunkRows(NamedTuple):
    """The new tokens of a sequence that are one dense chunk: its number, first query row, tokens, and those before."""

    sequence: int
    row: int
    length: int
    start: int


def find_dense_chunks(starts_B: Ints, counts_B: Ints, first_row: int) -> list[ChunkRows]:
    """The dense chunks of sequences with ``counts_B`` new tokens behind ``starts_B`` cached ones.

    >>> find_dense_chunks(np.array([16384, 100]), np.array([9000, 16384]), 3)
    [ChunkRows(sequence=0, row=3, length=8192, start=16384)]
    """
    chunks: list[ChunkRows] = []
    rows_B = first_row + np.cumsum(counts_B) - counts_B
    for sequence, (start, count, row) in enumerate(
        zip(starts_B.tolist(), counts_B.tolist(), rows_B.tolist(), strict=True)
    ):
        count = count // UNIT * UNIT
        if start % UNIT == 0 and count * (start + count // 2) >= _MIN_PAIRS:
            chunks.append(ChunkRows(sequence, row, count, start))
    return chunks


def drop_dense_tiles(tiles_I4: NDArray[np.int32], chunks: Sequence[ChunkRows]) -> NDArray[np.int32]:
    """The paged tiles of tokens that are in no dense chunk."""
    keep_I = np.ones(len(tiles_I4), np.bool_)
    for chunk in chunks:
        keep_I &= (tiles_I4[:, 1] < chunk.row) | (tiles_I4[:, 1] >= chunk.row + chunk.length)
    return tiles_I4[keep_I]


def has_dense_prefill(device: torch.device) -> bool:
    """Whether dense prefill is used on a device: an NVIDIA GPU from Hopper on, with cuDNN."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def dense_prefill_unit(device: torch.device) -> int:
    """The multiple of tokens at which chunks of long prompts should end on a device."""
    return UNIT if has_dense_prefill(device) else 1


def can_attend_dense(q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, params: PagedAttentionParams) -> bool:
    """Whether a layer's attention is plain: full, in half precision, of heads that cuDNN takes."""
    is_plain = params.window is params.chunk is params.softcap is params.sinks_H is params.kv_scales is None
    width = q_THd.shape[-1]
    is_half = q_THd.dtype in (torch.bfloat16, torch.float16) and k_SGd.dtype == q_THd.dtype
    return is_plain and is_half and v_SGd.shape[-1] == width <= _MAX_HEAD_DIM and width % 8 == 0


def attend_cudnn(q_1Hnd: Tensor, k_1Gcd: Tensor, v_1Gcd: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """``AttendFn`` of cuDNN."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_1Hnd, k_1Gcd, v_1Gcd, None, True, 0.0, causal, False, scale=scale
    )
    return found[0], found[1]


def dense_prefill_attention(
    q_THd: Tensor,
    k_SGd: Tensor,
    v_SGd: Tensor,
    chunk: DenseChunk,
    scale: float,
    out_THd: Tensor,
    attend: AttendFn = attend_cudnn,
) -> None:
    """Write the attention of a chunk's tokens to their rows of ``out``; their keys and values are in their slots."""
    rows = slice(chunk.row, chunk.row + chunk.length)
    q_1Hnd, out_nHd = q_THd[rows].transpose(0, 1)[None], out_THd[rows]

    def attend_slots(begin: int, end: int, causal: bool) -> tuple[Tensor, Tensor]:
        slots_c = chunk.slots[begin:end]
        k_1Gcd, v_1Gcd = (x_SGd.index_select(0, slots_c).transpose(0, 1)[None] for x_SGd in (k_SGd, v_SGd))
        return attend(q_1Hnd, k_1Gcd, v_1Gcd, causal, scale)

    part_1Hnd, lse_1Hn1 = attend_slots(chunk.start, chunk.start + chunk.length, True)
    out_nHd.copy_(part_1Hnd[0].transpose(0, 1))
    for begin in range(0, chunk.start, _MAX_BLOCK):
        part = attend_slots(begin, min(begin + _MAX_BLOCK, chunk.start), False)
        merge_partial_attention(out_nHd, lse_1Hn1, *part)


def merge_partial_attention(out_nHd: Tensor, lse_1Hn1: Tensor, part_1Hnd: Tensor, part_lse_1Hn1: Tensor) -> None:
    """Merge attention to further keys into ``out`` and its log-sum-exps, in place."""
    rows, heads, width = out_nHd.shape
    assert lse_1Hn1.is_contiguous() and part_lse_1Hn1.is_contiguous(), "log-sum-exps must be contiguous"
    assert out_nHd.stride()[1:] == (width, 1) and part_1Hnd.stride(3) == 1, "the channels of a head must be contiguous"
    with device_guard(out_nHd):
        _merge_kernel[(triton.cdiv(rows, _MERGED_ROWS), heads)](
            out_nHd,
            lse_1Hn1,
            part_1Hnd,
            part_lse_1Hn1,
            rows,
            out_nHd.stride(0),
            part_1Hnd.stride(2),
            part_1Hnd.stride(1),
            WIDTH=width,
            CHANNELS=triton.next_power_of_2(width),
            ROWS=_MERGED_ROWS,
            num_warps=4,
        )


@jit
def _merge_kernel(
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    part_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    rows: tl.tensor,
    out_stride: tl.tensor,
    part_stride: tl.tensor,
    part_head_stride: tl.tensor,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    head = tl.program_id(1).to(tl.int64)
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real_R = row_R < rows
    channel_C = tl.arange(0, CHANNELS)
    real_RC = real_R[:, None] & (channel_C < WIDTH)[None, :]
    at_RC = (row_R * out_stride + head * WIDTH)[:, None] + channel_C[None, :]
    part_RC = (row_R * part_stride + head * part_head_stride)[:, None] + channel_C[None, :]
    lse_R = tl.load(lse_ptr + head * rows + row_R, real_R, other=0.0)
    more_R = tl.load(part_lse_ptr + head * rows + row_R, real_R, other=0.0)
    max_R = tl.maximum(lse_R, more_R)
    own_R, other_R = tl.exp(lse_R - max_R), tl.exp(more_R - max_R)
    total_R = own_R + other_R
    out_RC = tl.load(out_ptr + at_RC, real_RC, other=0.0).to(tl.float32) * (own_R / total_R)[:, None]
    out_RC += tl.load(part_ptr + part_RC, real_RC, other=0.0).to(tl.float32) * (other_R / total_R)[:, None]
    tl.store(out_ptr + at_RC, out_RC, real_RC)
    tl.store(lse_ptr + head * rows + row_R, max_R + tl.log(total_R), real_R)
