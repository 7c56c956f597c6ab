"""Triton kernels of log-sum-exps and entropies: one pass over the row by chunks, and one to merge these.

Shapes: R rows, V vocabulary, C chunks of it, B logits of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton


def launch_reduce_chunks(
    logits_RV: Tensor, temperature_R: Tensor, size: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Maxima, sums and means of the chunks of the first ``size`` columns; ``temperature_R``: one or per row."""
    assert logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1
    rows, chunks = len(logits_RV), -(-size // chunk)
    max_RC, sums_RC, means_RC = (
        torch.empty(rows, chunks, dtype=torch.float32, device=logits_RV.device) for _ in range(3)
    )
    if rows and chunks:
        with device_guard(logits_RV):
            tensors = (logits_RV, temperature_R, max_RC, sums_RC, means_RC)
            scalars = (logits_RV.stride(0), int(len(temperature_R) > 1), size)
            _reduce_chunks_kernel[(rows, chunks)](
                *tensors,
                *scalars,
                CHUNK=chunk,
                num_warps=4,
            )
    return max_RC, sums_RC, means_RC


def launch_merge_chunks(max_RC: Tensor, sums_RC: Tensor, means_RC: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp and the entropy of each row."""
    rows, chunks = max_RC.shape
    lse_R, entropy_R = (torch.empty(rows, dtype=torch.float32, device=max_RC.device) for _ in range(2))
    if rows:
        with device_guard(max_RC):
            tensors = (max_RC.contiguous(), sums_RC.contiguous(), means_RC.contiguous(), lse_R, entropy_R)
            _merge_chunks_kernel[(rows,)](
                *tensors,
                chunks,
                CHUNKS=triton.next_power_of_2(chunks),
                num_warps=1,
            )
    return lse_R, entropy_R


def launch_target_logprobs(
    logits_RV: Tensor, temperature_R: Tensor, target_R: Tensor, lse_R: Tensor, logp_R: Tensor
) -> None:
    """Write the log-prob of each target; a negative target has logit 0."""
    assert logits_RV.stride(1) == 1 and logp_R.is_contiguous() and logp_R.dtype == torch.float32
    rows, block = len(logits_RV), 128
    if rows:
        with device_guard(logits_RV):
            tensors = (logits_RV, temperature_R, target_R.contiguous(), lse_R, logp_R)
            scalars = (rows, logits_RV.stride(0), int(len(temperature_R) > 1))
            _target_logprobs_kernel[(triton.cdiv(rows, block),)](
                *tensors,
                *scalars,
                BLOCK=block,
                num_warps=4,
            )


@jit
def _inverse_temperature(temperature: tl.tensor) -> tl.tensor:
    """The inverse temperature, correctly rounded; 1 if it is 0."""
    one = tl.full(temperature.shape, 1.0, tl.float32)
    return tl.div_rn(one, tl.where(temperature == 0.0, one, temperature))


# No specialization on strides and alignment: it would decide the order in which threads add.
@jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["logits_ptr"])
def _reduce_chunks_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    means_ptr: tl.tensor,
    stride: tl.tensor,
    per_row: tl.tensor,
    size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inverse_temperature = _inverse_temperature(tl.load(temperature_ptr + row * per_row))
    column_B = chunk * CHUNK + tl.arange(0, CHUNK)
    x_B = tl.load(logits_ptr + row * stride + column_B, column_B < size, other=float("-inf")) * inverse_temperature
    chunk_max = tl.max(x_B, 0)
    shifted_B = x_B - tl.where(chunk_max == float("-inf"), 0.0, chunk_max)
    exp_B = tl.exp(shifted_B)
    index = row * tl.num_programs(1) + chunk
    tl.store(max_ptr + index, chunk_max)
    tl.store(sums_ptr + index, tl.sum(exp_B, 0))
    tl.store(means_ptr + index, tl.sum(tl.where(exp_B == 0.0, 0.0, shifted_B) * exp_B, 0))


@jit
def _merge_chunks_kernel(
    max_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    means_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
) -> None:
    row, index_C = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    valid_C, index_in_row_C = index_C < chunks, row * chunks + index_C
    max_C = tl.load(max_ptr + index_in_row_C, valid_C, other=float("-inf"))
    sum_C = tl.load(sums_ptr + index_in_row_C, valid_C, other=0.0)
    mean_C = tl.load(means_ptr + index_in_row_C, valid_C, other=0.0)
    chunk_max = tl.max(max_C, 0)
    shift_C = max_C - tl.where(chunk_max == float("-inf"), 0.0, chunk_max)
    rescale_C = tl.exp(shift_C)
    # A chunk without any weight has nothing to shift.
    shifted_sum_C = tl.where(rescale_C * sum_C == 0.0, 0.0, shift_C) * sum_C
    total = tl.sum(rescale_C * sum_C, 0)
    mean = tl.sum(rescale_C * (mean_C + shifted_sum_C), 0)
    log = tl.log(total)
    tl.store(lse_ptr + row, chunk_max + log)
    tl.store(entropy_ptr + row, log - mean / total)


@jit
def _target_logprobs_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    target_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    logp_ptr: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    per_row: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid_B = row_B < rows
    temperature_B = tl.load(temperature_ptr + row_B * per_row, valid_B, other=1.0)
    target_B = tl.load(target_ptr + row_B, valid_B, other=0)
    x_B = tl.load(logits_ptr + row_B * stride + target_B, valid_B & (target_B >= 0), other=0.0)
    # An explicit FMA: one rounding, not left to the compiler.
    lse_B = tl.load(lse_ptr + row_B, valid_B, other=0.0)
    tl.store(logp_ptr + row_B, tl.fma(x_B, _inverse_temperature(temperature_B), -lse_B), valid_B)
