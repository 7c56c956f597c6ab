"""Top-k, top-p and min-p thresholds of a row of logits, found by bisection over pivots instead of sorting.

Shapes: B rows, V vocabulary, C chunks of a row, K pivots, W columns of a step, R most undecided logits.

Triton only: the search serves ``sample_tokens``, whose torch version sorts. A row keeps the tokens above its threshold
and the first few that equal it, so ties are broken like a stable sort. Both filters need the largest threshold that
keeps enough: at least k tokens, or at least the fraction p of the mass that top-k kept. A pass over the row sums what
lies above each of K pivots between a bound that keeps enough and one that does not, and these move to the adjacent
pivots. When few logits are left between them, they are gathered, and bisection ends the search.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.runtime.triton_compat import jit, tl, triton

# One program per row; sixteen bytes per thread at a time.
_PIVOTS = 8
_WARPS = 16
_COLUMNS = 128 * _WARPS
_MAX_GATHERED = 16384


def find_thresholds(
    logits_BV: Tensor,
    temperature_B: Tensor,
    max_BC: Tensor,
    sums_BC: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """The threshold of each row, of logits over their temperature, and how many logits equal to it are kept (int32).

    It is minus infinity for a row that has no filter or is greedy. ``max_BC`` and ``sums_BC`` are the maxima of the
    chunks of a row, and the sums of exponentials relative to these.
    """
    rows, size = logits_BV.shape
    threshold_B = torch.empty(rows, device=logits_BV.device)
    ties_kept_B = torch.empty(rows, device=logits_BV.device, dtype=torch.int32)
    max_gathered = min(_MAX_GATHERED, 1 << (size - 1).bit_length())
    gathered_BR = torch.empty(rows, max_gathered, device=logits_BV.device)
    _find_threshold_kernel[(rows,)](
        logits_BV,
        temperature_B,
        max_BC,
        sums_BC,
        top_k_B,
        top_p_B,
        min_p_B,
        gathered_BR,
        threshold_B,
        ties_kept_B,
        logits_BV.stride(0),
        size,
        max_BC.shape[1],
        CHUNKS=triton.next_power_of_2(max_BC.shape[1]),
        K=_PIVOTS,
        W=_COLUMNS,
        R=max_gathered,
        num_warps=_WARPS,
    )
    return threshold_B, ties_kept_B


@jit
def _find_threshold_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    gathered_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    ties_kept_ptr: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    index_C = tl.arange(0, CHUNKS)
    max_C = tl.load(max_ptr + row * chunks + index_C, index_C < chunks, other=float("-inf"))
    row_max = tl.max(max_C, 0)
    mass = tl.sum(tl.load(sums_ptr + row * chunks + index_C, index_C < chunks, other=0.0) * tl.exp(max_C - row_max), 0)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    # A broken row must still return some number, since no one checks for it.
    is_valid = (temperature != 0.0) & (mass > 0.0) & (mass < float("inf"))
    threshold, ties_kept = tl.full((), float("-inf"), tl.float32), tl.full((), size, tl.int32)
    logits_ptr += row.to(tl.int64) * stride
    gathered_ptr += row * R
    for by_mass in range(2):
        wanted = tl.where(by_mass == 1, top_p * mass, top_k.to(tl.float32))
        has_filter = tl.where(by_mass == 1, top_p < 1.0, (top_k > 0) & (top_k < size))
        if has_filter & is_valid:
            low = tl.maximum(threshold, row_max - 40.0)
            found_threshold, above, count, ties = _search_threshold(
                logits_ptr, gathered_ptr, size, 1.0 / temperature, row_max, low, wanted, by_mass == 1, K, W, R
            )
            tie_mass = tl.exp(found_threshold - row_max)
            ties_needed = tl.where(by_mass == 1, tl.ceil((wanted - above) / tie_mass), wanted - count)
            # Ties dropped by the first filter stay dropped in the second.
            max_ties = tl.where(found_threshold == threshold, ties_kept, ties)
            ties_kept = tl.minimum(tl.maximum(tl.minimum(ties_needed, size * 1.0).to(tl.int32), 1), max_ties)
            threshold = found_threshold
            mass = above + ties_kept * tie_mass
    min_p_logit = row_max + tl.log(min_p)
    uses_min_p = is_valid & (min_p > 0.0) & (min_p_logit > threshold)
    tl.store(threshold_ptr + row, tl.where(uses_min_p, min_p_logit, threshold))
    tl.store(ties_kept_ptr + row, tl.where(uses_min_p, size, ties_kept))


@jit
def _search_threshold(
    logits_ptr: tl.tensor,
    gathered_ptr: tl.tensor,
    size: tl.tensor,
    factor: tl.tensor,
    row_max: tl.tensor,
    low: tl.tensor,
    wanted: tl.tensor,
    by_mass: tl.tensor,
    K: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The largest threshold from ``low`` on that keeps enough, the mass and count above it, and the number of ties.

    If even ``low`` keeps too little it is the threshold, and all ties are kept.
    """
    # Above the maximum, also if that is a zero of either sign.
    high = tl.maximum(_rank_to_float(_float_to_rank(row_max) + 1), row_max + 1e-30)
    high_mass, high_count = tl.zeros((), tl.float32), tl.zeros((), tl.int32)
    between = tl.full((), size, tl.int32)
    steps = 0
    while (between > R) & (_float_to_rank(high) - _float_to_rank(low) > 1) & (steps < 40):
        pivot_K = _pivots(low, high, steps, K)
        mass_K, count_K = _sum_above_pivots(logits_ptr, size, factor, row_max, pivot_K, K, W)
        index_K = tl.arange(0, K)
        # Mass above a pivot decreases with it, so those that keep enough come first; the lower bound always does.
        enough_K = (tl.where(by_mass, mass_K, count_K.to(tl.float32)) >= wanted) | (index_K == 0)
        last = tl.sum(enough_K.to(tl.int32), 0) - 1
        if last + 1 < K:
            next_K = index_K == last + 1
            high = tl.sum(tl.where(next_K, pivot_K, 0.0), 0)
            high_mass = tl.sum(tl.where(next_K, mass_K, 0.0), 0)
            high_count = tl.sum(tl.where(next_K, count_K, 0), 0)
        low = tl.sum(tl.where(index_K == last, pivot_K, 0.0), 0)
        between = tl.sum(tl.where(index_K == last, count_K, 0), 0) - high_count
        steps += 1
    if between <= R:
        between = _gather(logits_ptr, gathered_ptr, size, factor, low, high, R, 2 * W)
        tl.debug_barrier()
        index_R = tl.arange(0, R)
        x_R = tl.load(gathered_ptr + index_R, index_R < between, other=float("-inf"))
        mass_R = tl.exp(x_R - row_max)
        low = _bisect(x_R, tl.where(by_mass, mass_R, 1.0), low, high, tl.where(by_mass, high_mass, high_count), wanted)
        high_mass += tl.sum(tl.where(x_R > low, mass_R, 0.0), 0)
        high_count += tl.sum((x_R > low).to(tl.int32), 0)
        between = tl.sum((x_R == low).to(tl.int32), 0)
    return low, high_mass, high_count, between


@jit
def _pivots(low: tl.tensor, high: tl.tensor, steps: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Evenly spaced from ``low`` on; after a few steps evenly among the floats, so that the search ends."""
    index_K = tl.arange(0, K)
    ranks = _float_to_rank(high) - _float_to_rank(low)
    return tl.where(
        steps < 3, low + (high - low) * (index_K / K), _rank_to_float(_float_to_rank(low) + ranks * index_K // K)
    )


@jit
def _sum_above_pivots(
    logits_ptr: tl.tensor,
    size: tl.tensor,
    factor: tl.tensor,
    row_max: tl.tensor,
    pivot_K: tl.tensor,
    K: tl.constexpr,
    W: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The mass and the count of all logits no smaller than each pivot."""
    mass_KW = tl.zeros((K, W), tl.float32)
    count_KW = tl.zeros((K, W), tl.int32)
    for start in tl.range(0, size, W, loop_unroll_factor=4):
        x_1W = _load_logits(logits_ptr, start + tl.arange(0, W)[None, :], size, factor)
        above_KW = x_1W >= pivot_K[:, None]
        mass_KW += tl.where(above_KW, tl.exp(x_1W - row_max), 0.0)
        count_KW += above_KW.to(tl.int32)
    return tl.sum(mass_KW, 1), tl.sum(count_KW, 1)


@jit
def _gather(
    logits_ptr: tl.tensor,
    gathered_ptr: tl.tensor,
    size: tl.tensor,
    factor: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    R: tl.constexpr,
    W: tl.constexpr,
) -> tl.tensor:
    """Write the logits from ``low`` to below ``high`` contiguously, and return their number."""
    total = tl.zeros((), tl.int32)
    for start in tl.range(0, size, W):
        x_W = _load_logits(logits_ptr, start + tl.arange(0, W), size, factor)
        between_W = ((x_W >= low) & (x_W < high)).to(tl.int32)
        index_W = total + tl.cumsum(between_W, 0) - 1
        tl.store(gathered_ptr + index_W, x_W, (between_W > 0) & (index_W < R))
        total += tl.sum(between_W, 0)
    return total


@jit
def _bisect(
    x_R: tl.tensor, weight_R: tl.tensor, low: tl.tensor, high: tl.tensor, base: tl.tensor, wanted: tl.tensor
) -> tl.tensor:
    """The largest number below ``high`` such that the weight of all logits no smaller, plus ``base``, is enough."""
    low_rank, high_rank = _float_to_rank(low), _float_to_rank(high)
    while high_rank - low_rank > 1:
        middle = low_rank + (high_rank - low_rank) // 2
        enough = base + tl.sum(tl.where(x_R >= _rank_to_float(middle), weight_R, 0.0), 0) >= wanted
        low_rank = tl.where(enough, middle, low_rank)
        high_rank = tl.where(enough, high_rank, middle)
    return _rank_to_float(low_rank)


@jit
def _load_logits(logits_ptr: tl.tensor, index: tl.tensor, size: tl.tensor, factor: tl.tensor) -> tl.tensor:
    return tl.load(logits_ptr + index, index < size, other=float("-inf")).to(tl.float32) * factor


@jit
def _float_to_rank(x: tl.tensor) -> tl.tensor:
    """The index of a float among all floats, as an integer."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def _rank_to_float(rank: tl.tensor) -> tl.tensor:
    """The float at that index."""
    bits = rank.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
