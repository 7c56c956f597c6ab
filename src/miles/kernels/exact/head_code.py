"""Log-sums and entropies of rows of logits as device code: a read of the row by chunks, and one to join these.

Shapes: R rows, V vocabulary, C chunks of it, B logits of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.device_code import jit, on, tl, triton


def sum_chunks(logits_RV: Tensor, heat_R: Tensor, size: int, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tops, sums and means of the chunks of the first ``size`` columns; ``heat_R`` are temperatures, one or each."""
    assert logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1
    rows, chunks = len(logits_RV), -(-size // chunk)
    tops_RC, sums_RC, means_RC = (
        torch.empty(rows, chunks, dtype=torch.float32, device=logits_RV.device) for _ in range(3)
    )
    if rows and chunks:
        with on(logits_RV):
            _sum_chunks[(rows, chunks)](
                *(logits_RV, heat_R, tops_RC, sums_RC, means_RC, logits_RV.stride(0), int(len(heat_R) > 1), size),
                CHUNK=chunk,
                num_warps=4,
            )
    return tops_RC, sums_RC, means_RC


def join_chunks(tops_RC: Tensor, sums_RC: Tensor, means_RC: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum and the entropy of each row."""
    rows, chunks = tops_RC.shape
    lse_R, entropy_R = (torch.empty(rows, dtype=torch.float32, device=tops_RC.device) for _ in range(2))
    if rows:
        with on(tops_RC):
            _join_chunks[(rows,)](
                *(tops_RC.contiguous(), sums_RC.contiguous(), means_RC.contiguous(), lse_R, entropy_R, chunks),
                CHUNKS=triton.next_power_of_2(chunks),
                num_warps=1,
            )
    return lse_R, entropy_R


def find_targets(logits_RV: Tensor, heat_R: Tensor, target_R: Tensor, lse_R: Tensor, logp_R: Tensor) -> None:
    """Write the log-prob of each target; of a negative one it is zero's, less the log-sum."""
    assert logits_RV.stride(1) == 1 and logp_R.is_contiguous() and logp_R.dtype == torch.float32
    rows, block = len(logits_RV), 128
    if rows:
        with on(logits_RV):
            _find_targets[(triton.cdiv(rows, block),)](
                *(logits_RV, heat_R, target_R.contiguous(), lse_R, logp_R, rows),
                *(logits_RV.stride(0), int(len(heat_R) > 1)),
                BLOCK=block,
                num_warps=4,
            )


@jit
def _sharpness(heat: tl.tensor) -> tl.tensor:
    """One over a temperature, correctly rounded; 1 where that is 0."""
    one = tl.full(heat.shape, 1.0, tl.float32)
    return tl.div_rn(one, tl.where(heat == 0.0, one, heat))


# How rows lie must not be known when it is compiled: it would decide in which order threads add.
@jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["logits_ptr"])
def _sum_chunks(
    logits_ptr: tl.tensor,
    heat_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    means_ptr: tl.tensor,
    stride: tl.tensor,
    each: tl.tensor,
    size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sharpness = _sharpness(tl.load(heat_ptr + row * each))
    place_B = chunk * CHUNK + tl.arange(0, CHUNK)
    x_B = tl.load(logits_ptr + row * stride + place_B, place_B < size, other=float("-inf")) * sharpness
    top = tl.max(x_B, 0)
    low_B = x_B - tl.where(top == float("-inf"), 0.0, top)
    power_B = tl.exp(low_B)
    place = row * tl.num_programs(1) + chunk
    tl.store(tops_ptr + place, top)
    tl.store(sums_ptr + place, tl.sum(power_B, 0))
    tl.store(means_ptr + place, tl.sum(tl.where(power_B == 0.0, 0.0, low_B) * power_B, 0))


@jit
def _join_chunks(
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    means_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
) -> None:
    row, index_C = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    here_C, at_C = index_C < chunks, row * chunks + index_C
    top_C = tl.load(tops_ptr + at_C, here_C, other=float("-inf"))
    sum_C = tl.load(sums_ptr + at_C, here_C, other=0.0)
    mean_C = tl.load(means_ptr + at_C, here_C, other=0.0)
    top = tl.max(top_C, 0)
    shift_C = top_C - tl.where(top == float("-inf"), 0.0, top)
    fade_C = tl.exp(shift_C)
    # A chunk without any weight has nothing to be shifted.
    moved_C = tl.where(fade_C * sum_C == 0.0, 0.0, shift_C) * sum_C
    total = tl.sum(fade_C * sum_C, 0)
    mean = tl.sum(fade_C * (mean_C + moved_C), 0)
    log = tl.log(total)
    tl.store(lse_ptr + row, top + log)
    tl.store(entropy_ptr + row, log - mean / total)


@jit
def _find_targets(
    logits_ptr: tl.tensor,
    heat_ptr: tl.tensor,
    target_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    logp_ptr: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    each: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here_B = row_B < rows
    heat_B = tl.load(heat_ptr + row_B * each, here_B, other=1.0)
    target_B = tl.load(target_ptr + row_B, here_B, other=0)
    x_B = tl.load(logits_ptr + row_B * stride + target_B, here_B & (target_B >= 0), other=0.0)
    # One rounding, as it is written: the compiler is left no choice.
    lse_B = tl.load(lse_ptr + row_B, here_B, other=0.0)
    tl.store(logp_ptr + row_B, tl.fma(x_B, _sharpness(heat_B), -lse_B), here_B)
