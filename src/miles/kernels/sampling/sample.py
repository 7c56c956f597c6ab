"""Fused sampling: one token per row from its logits, by temperature, top-k/top-p/min-p and the inverse CDF at a given
uniform.

Shapes: B rows, V vocabulary, C chunks of a row. All arithmetic is float32.

The Triton kernels read a row once for the maxima and sums of its chunks, and one chunk again for the token. Filters add
a search for the threshold logit (``top_k_top_p``), and one more read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.runtime.triton_compat import jit, tl, triton, use_triton_inference
from miles.kernels.sampling.top_k_top_p import find_thresholds

# Logits per program. Constant: a row's token must not depend on the other rows of the batch.
CHUNK = 4096


def sample_tokens(
    logits_BV: Tensor,
    temperature_B: Tensor,
    uniform_B: Tensor,
    *,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    filters: bool,
    tokens_out_B: Tensor,
    logprobs_out_B: Tensor,
) -> None:
    """Write sampled tokens (int64) and their log-probs under the temperature (1 if it is 0: greedy), before any filter.

    A log-prob is NaN if a row's logits are broken: any NaN or +inf, or all of them -inf. Filters are applied only with
    ``filters``; a row has none if its top-k is 0, its top-p 1 and its min-p 0. They keep the k likeliest; of these the
    fewest that hold the fraction p; of these, none below min-p of the best.

    Triton and torch agree up to rounding, except that with filters Triton drops tokens e^40 times less likely than the
    best.
    """
    if len(logits_BV) == 0:
        return
    limits = (top_k_B, top_p_B, min_p_B)
    if use_triton_inference(logits_BV):
        launch_sampling(logits_BV, temperature_B, uniform_B, limits if filters else None, tokens_out_B, logprobs_out_B)
        return
    greedy_B1 = (temperature_B == 0)[:, None]
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature_B[:, None].masked_fill(greedy_B1, 1.0), -1)
    probs_BV = logprobs_BV.exp()
    kept_BV = filter_probs(probs_BV, *limits) if filters else probs_BV
    tokens_B1 = torch.where(greedy_B1, logprobs_BV.argmax(-1, keepdim=True), invert_cdf(kept_BV, uniform_B))
    tokens_out_B.copy_(tokens_B1.squeeze(1))
    logprobs_out_B.copy_(logprobs_BV.gather(1, tokens_B1).squeeze(1))


def invert_cdf(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform number; never one of probability zero."""
    cdf_BV = probs_BV.cumsum(-1)
    target_B1 = uniform_B[:, None] * cdf_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cdf_BV, target_B1, right=True).clamp_(max=probs_BV.shape[1] - 1)
    # The product, or a parallel cumsum, may have been rounded up to the total.
    impossible_B1 = probs_BV.gather(1, tokens_B1) <= 0
    return torch.where(impossible_B1, probs_BV.argmax(-1, keepdim=True), tokens_B1)


def filter_probs(probs_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    """Apply the filters to each row, in torch."""
    sorted_BV, indices_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_BV.shape[1], device=probs_BV.device)
    keep_BV = (rank_V < top_k_B[:, None]) | (top_k_B[:, None] <= 0)
    sorted_BV = sorted_BV * keep_BV
    sum_BV = sorted_BV.cumsum(-1)
    keep_BV &= (sum_BV - sorted_BV < top_p_B[:, None] * sum_BV[:, -1:]) | (top_p_B[:, None] >= 1)
    keep_BV &= sorted_BV >= min_p_B[:, None] * sorted_BV[:, :1]
    keep_BV[:, 0] = True
    return torch.zeros_like(probs_BV).scatter_(1, indices_BV, sorted_BV * keep_BV)


# -- Triton ---------------------------------------------------------------------------------


def launch_sampling(
    logits_BV: Tensor,
    temperature_B: Tensor,
    uniform_B: Tensor,
    limits: tuple[Tensor, Tensor, Tensor] | None,
    tokens_out_B: Tensor,
    logprobs_out_B: Tensor,
    chunks: tuple[Tensor, Tensor] | None = None,
) -> None:
    """``sample_tokens`` in Triton, with or without filters.

    ``chunks`` are the maxima and sums of the rows' chunks if they are known already.
    """
    per_row = (temperature_B, uniform_B, *(limits or ()), tokens_out_B, logprobs_out_B)
    assert logits_BV.stride(1) == 1 and all(each_B.is_contiguous() for each_B in per_row)
    rows, size = logits_BV.shape
    stride, count = logits_BV.stride(0), -(-size // CHUNK)
    shape = {"CHUNKS": triton.next_power_of_2(count), "CHUNK": CHUNK}
    if chunks is None:
        max_BC, sums_BC = (torch.empty(rows, count, device=logits_BV.device) for _ in range(2))
        _reduce_chunks_kernel[(rows, count)](
            logits_BV, temperature_B, max_BC, sums_BC, stride, size, CHUNK=CHUNK, num_warps=4
        )
    else:
        max_BC, sums_BC = chunks
    threshold_B = max_BC
    ties_kept_B = max_BC
    kept_BC = sums_BC
    ties_BC = sums_BC
    if limits is not None:
        threshold_B, ties_kept_B = find_thresholds(logits_BV, temperature_B, max_BC, sums_BC, *limits)
        kept_BC, ties_BC = torch.empty_like(sums_BC), torch.empty_like(sums_BC, dtype=torch.int32)
        tensors = (logits_BV, temperature_B, max_BC, sums_BC, threshold_B, kept_BC, ties_BC)
        scalars = (stride, size, count)
        _reduce_kept_kernel[(rows, count)](
            *tensors,
            *scalars,
            **shape,
            num_warps=4,
        )
    _pick_token_kernel[(rows,)](
        logits_BV,
        temperature_B,
        uniform_B,
        max_BC,
        sums_BC,
        threshold_B,
        ties_kept_B,
        kept_BC,
        ties_BC,
        tokens_out_B,
        logprobs_out_B,
        stride,
        size,
        count,
        **shape,
        FILTERS=limits is not None,
        num_warps=8,
    )


@jit
def _reduce_chunks_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """The maximum of each chunk, and the sum of its exponentials relative to it."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    x_V = _load_chunk(logits_ptr, temperature_ptr, row, chunk, stride, size, CHUNK)
    row_max = tl.max(x_V, 0)
    total = tl.sum(tl.exp(x_V - tl.where(row_max == float("-inf"), 0.0, row_max)), 0)
    index = row * tl.num_programs(1) + chunk
    tl.store(max_ptr + index, row_max)
    tl.store(sums_ptr + index, total)


@jit
def _reduce_kept_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    ties_ptr: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """The sum of exponentials above the threshold in each chunk, and how many logits equal the threshold."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    index = row * chunks + chunk
    index_C = tl.arange(0, CHUNKS)
    row_max = tl.max(tl.load(max_ptr + row * chunks + index_C, index_C < chunks, other=float("-inf")), 0)
    threshold = tl.load(threshold_ptr + row)
    if threshold == float("-inf"):
        tl.store(kept_ptr + index, tl.load(sums_ptr + index) * tl.exp(tl.load(max_ptr + index) - row_max))
        tl.store(ties_ptr + index, 0)
    else:
        x_V = _load_chunk(logits_ptr, temperature_ptr, row, chunk, stride, size, CHUNK)
        tl.store(kept_ptr + index, tl.sum(tl.where(x_V > threshold, tl.exp(x_V - row_max), 0.0), 0))
        tl.store(ties_ptr + index, tl.sum((x_V == threshold).to(tl.int32), 0))


@jit
def _pick_token_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    ties_kept_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    ties_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    FILTERS: tl.constexpr,
) -> None:
    """The chunk that holds the target, then the token in it."""
    row = tl.program_id(0)
    index_C = tl.arange(0, CHUNKS)
    valid_C = index_C < chunks
    max_C = tl.load(max_ptr + row * chunks + index_C, valid_C, other=float("-inf"))
    row_max = tl.max(max_C, 0)
    mass_C = tl.load(sums_ptr + row * chunks + index_C, valid_C, other=0.0) * tl.exp(max_C - row_max)
    total = tl.sum(mass_C, 0)
    if FILTERS:
        threshold, ties_kept = tl.load(threshold_ptr + row), tl.load(ties_kept_ptr + row)
        ties_C = tl.load(ties_ptr + row * chunks + index_C, valid_C, other=0)
        ties_before_C = tl.cumsum(ties_C, 0) - ties_C
        kept_ties_C = tl.minimum(tl.maximum(ties_kept - ties_before_C, 0), ties_C)
        kept_C = tl.load(kept_ptr + row * chunks + index_C, valid_C, other=0.0)
        mass_C = kept_C + tl.where(kept_ties_C > 0, kept_ties_C * tl.exp(threshold - row_max), 0.0)
    greedy = tl.load(temperature_ptr + row) == 0.0
    sum_C = tl.cumsum(mass_C, 0)
    target = tl.load(uniform_ptr + row) * tl.max(sum_C, 0)
    best_index = tl.min(tl.where(max_C == row_max, index_C, chunks - 1), 0)
    chunk = tl.where(greedy, best_index, _first_above(sum_C, mass_C, index_C, target, CHUNKS))
    x_V = _load_chunk(logits_ptr, temperature_ptr, row, chunk, stride, size, CHUNK)
    index_V = tl.arange(0, CHUNK)
    mass_V = tl.exp(x_V - row_max)
    if FILTERS:
        tie_V = (x_V == threshold).to(tl.int32)
        rank_V = tl.sum(tl.where(index_C == chunk, ties_before_C, 0), 0) + tl.cumsum(tie_V, 0)
        mass_V = tl.where((x_V > threshold) | ((tie_V > 0) & (rank_V <= ties_kept)), mass_V, 0.0)
    mass_before = tl.max(tl.where(index_C < chunk, sum_C, 0.0), 0)
    sampled = _first_above(mass_before + tl.cumsum(mass_V, 0), mass_V, index_V, target, CHUNK)
    best_index = tl.min(tl.where(x_V == row_max, index_V, CHUNK - 1), 0)
    index = tl.where(greedy, best_index, sampled)
    x = tl.sum(tl.where(index_V == index, x_V, 0.0), 0)
    tl.store(tokens_ptr + row, tl.minimum(chunk * CHUNK + index, size - 1).to(tl.int64))
    tl.store(logprobs_ptr + row, x - row_max - tl.log(total))


@jit
def _load_chunk(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    row: tl.tensor,
    chunk: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """A chunk's logits over the row's temperature; -inf beyond the last."""
    temperature = tl.load(temperature_ptr + row)
    factor = tl.where(temperature == 0.0, 1.0, 1.0 / temperature)
    index_V = chunk * CHUNK + tl.arange(0, CHUNK)
    x_V = tl.load(logits_ptr + row.to(tl.int64) * stride + index_V, index_V < size, other=float("-inf"))
    return x_V.to(tl.float32) * factor


@jit
def _first_above(
    sum_N: tl.tensor, mass_N: tl.tensor, index_N: tl.tensor, target: tl.tensor, NONE: tl.constexpr
) -> tl.tensor:
    """The first index with mass whose cumulative sum exceeds the target; if rounding left none, the last with mass."""
    first = tl.min(tl.where((sum_N > target) & (mass_N > 0.0), index_N, NONE), 0)
    return tl.where(first < NONE, first, tl.maximum(tl.max(tl.where(mass_N > 0.0, index_N, -1), 0), 0))
