"""Where top-k, top-p and min-p cut a row of logits, found by narrowing an interval instead of sorting.

Shapes: B rows, V vocabulary, C chunks of a row, K pivots, W columns of a step, R most undecided logits.

Device code alone: the search serves ``draw``, whose torch version sorts. A row's kept tokens are those above its cutoff
and the first few that meet it, so ties are broken as a stable sort breaks them. Both filters ask for the largest cutoff
that keeps enough: at least k tokens, or at least the fraction p of the mass that top-k kept. A pass over the row weighs
what lies above each of K pivots between a bound that keeps enough and one that does not, and these move to the pivots
on both sides. When few logits are left between, they are gathered, and halving ends the search.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.device_code import jit, tl, triton

# One program a row, as many threads as a row's share of the machine can hold; sixteen bytes for each at a time.
_PIVOTS = 8
_WARPS = 16
_COLUMNS = 128 * _WARPS
_GATHERED = 16384


def find_cutoffs(
    logits_BV: Tensor,
    temperature_B: Tensor,
    tops_BC: Tensor,
    sums_BC: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """The cutoff of each row, of logits over their temperature, and how many of those that meet it are kept (int32).

    It is minus infinity for a row that has no filter or is greedy. ``tops_BC`` and ``sums_BC`` are the largest logits
    of the chunks of a row, and the sums of exponentials under these.
    """
    rows, size = logits_BV.shape
    cutoff_B = torch.empty(rows, device=logits_BV.device)
    spare_B = torch.empty(rows, device=logits_BV.device, dtype=torch.int32)
    few = min(_GATHERED, 1 << (size - 1).bit_length())
    gathered_BR = torch.empty(rows, few, device=logits_BV.device)
    _find_cutoff[(rows,)](
        *(logits_BV, temperature_B, tops_BC, sums_BC, top_k_B, top_p_B, min_p_B, gathered_BR, cutoff_B, spare_B),
        *(logits_BV.stride(0), size, tops_BC.shape[1]),
        CHUNKS=triton.next_power_of_2(tops_BC.shape[1]),
        K=_PIVOTS,
        W=_COLUMNS,
        R=few,
        num_warps=_WARPS,
    )
    return cutoff_B, spare_B


@jit
def _find_cutoff(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    gathered_ptr: tl.tensor,
    cutoff_ptr: tl.tensor,
    spare_ptr: tl.tensor,
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
    tops_C = tl.load(tops_ptr + row * chunks + index_C, index_C < chunks, other=float("-inf"))
    top = tl.max(tops_C, 0)
    mass = tl.sum(tl.load(sums_ptr + row * chunks + index_C, index_C < chunks, other=0.0) * tl.exp(tops_C - top), 0)
    heat = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    # Some number must come of a row that is broken, since nobody waits to see it.
    sound = (heat != 0.0) & (mass > 0.0) & (mass < float("inf"))
    cutoff, spare = tl.full((), float("-inf"), tl.float32), tl.full((), size, tl.int32)
    logits_ptr += row.to(tl.int64) * stride
    gathered_ptr += row * R
    for by_mass in range(2):
        wanted = tl.where(by_mass == 1, top_p * mass, top_k.to(tl.float32))
        asked = tl.where(by_mass == 1, top_p < 1.0, (top_k > 0) & (top_k < size))
        if asked & sound:
            low = tl.maximum(cutoff, top - 40.0)
            found, above, count, ties = _search(
                logits_ptr, gathered_ptr, size, 1.0 / heat, top, low, wanted, by_mass == 1, K, W, R
            )
            each = tl.exp(found - top)
            needed = tl.where(by_mass == 1, tl.ceil((wanted - above) / each), wanted - count)
            # What the first filter spared of its cutoff, the second may not spare again.
            most = tl.where(found == cutoff, spare, ties)
            spare = tl.minimum(tl.maximum(tl.minimum(needed, size * 1.0).to(tl.int32), 1), most)
            cutoff = found
            mass = above + spare * each
    floor = top + tl.log(min_p)
    raised = sound & (min_p > 0.0) & (floor > cutoff)
    tl.store(cutoff_ptr + row, tl.where(raised, floor, cutoff))
    tl.store(spare_ptr + row, tl.where(raised, size, spare))


@jit
def _search(
    logits_ptr: tl.tensor,
    gathered_ptr: tl.tensor,
    size: tl.tensor,
    factor: tl.tensor,
    top: tl.tensor,
    low: tl.tensor,
    wanted: tl.tensor,
    by_mass: tl.tensor,
    K: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The largest cutoff from ``low`` on that keeps enough, the mass and the number above it, the number that meet it.

    If even ``low`` keeps too little it is the cutoff, and all that meet it are kept.
    """
    # Above the top, also where that is a zero of either sign.
    high = tl.maximum(_number(_rank(top) + 1), top + 1e-30)
    high_mass, high_count = tl.zeros((), tl.float32), tl.zeros((), tl.int32)
    between = tl.full((), size, tl.int32)
    steps = 0
    while (between > R) & (_rank(high) - _rank(low) > 1) & (steps < 40):
        pivot_K = _pivots(low, high, steps, K)
        mass_K, count_K = _weigh(logits_ptr, size, factor, top, pivot_K, K, W)
        index_K = tl.arange(0, K)
        # The more lies above the smaller a pivot is, so those that keep enough come first, the lower bound always.
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
        mass_R = tl.exp(x_R - top)
        low = _halve(x_R, tl.where(by_mass, mass_R, 1.0), low, high, tl.where(by_mass, high_mass, high_count), wanted)
        high_mass += tl.sum(tl.where(x_R > low, mass_R, 0.0), 0)
        high_count += tl.sum((x_R > low).to(tl.int32), 0)
        between = tl.sum((x_R == low).to(tl.int32), 0)
    return low, high_mass, high_count, between


@jit
def _pivots(low: tl.tensor, high: tl.tensor, steps: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Evenly spaced from ``low`` on; after a few steps evenly among the floats, so that an end is certain."""
    index_K = tl.arange(0, K)
    ranks = _rank(high) - _rank(low)
    return tl.where(steps < 3, low + (high - low) * (index_K / K), _number(_rank(low) + ranks * index_K // K))


@jit
def _weigh(
    logits_ptr: tl.tensor,
    size: tl.tensor,
    factor: tl.tensor,
    top: tl.tensor,
    pivot_K: tl.tensor,
    K: tl.constexpr,
    W: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The mass and the number of all logits that are no smaller than each pivot."""
    mass_KW = tl.zeros((K, W), tl.float32)
    count_KW = tl.zeros((K, W), tl.int32)
    for start in tl.range(0, size, W, loop_unroll_factor=4):
        x_1W = _read(logits_ptr, start + tl.arange(0, W)[None, :], size, factor)
        above_KW = x_1W >= pivot_K[:, None]
        mass_KW += tl.where(above_KW, tl.exp(x_1W - top), 0.0)
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
    """Write what lies from ``low`` to below ``high`` side by side, and say how much that is."""
    total = tl.zeros((), tl.int32)
    for start in tl.range(0, size, W):
        x_W = _read(logits_ptr, start + tl.arange(0, W), size, factor)
        between_W = ((x_W >= low) & (x_W < high)).to(tl.int32)
        place_W = total + tl.cumsum(between_W, 0) - 1
        tl.store(gathered_ptr + place_W, x_W, (between_W > 0) & (place_W < R))
        total += tl.sum(between_W, 0)
    return total


@jit
def _halve(
    x_R: tl.tensor, weight_R: tl.tensor, low: tl.tensor, high: tl.tensor, base: tl.tensor, wanted: tl.tensor
) -> tl.tensor:
    """The largest number below ``high`` for which the weight of all that are no smaller, and ``base``, are enough."""
    low_rank, high_rank = _rank(low), _rank(high)
    while high_rank - low_rank > 1:
        middle = low_rank + (high_rank - low_rank) // 2
        enough = base + tl.sum(tl.where(x_R >= _number(middle), weight_R, 0.0), 0) >= wanted
        low_rank = tl.where(enough, middle, low_rank)
        high_rank = tl.where(enough, high_rank, middle)
    return _number(low_rank)


@jit
def _read(logits_ptr: tl.tensor, place: tl.tensor, size: tl.tensor, factor: tl.tensor) -> tl.tensor:
    return tl.load(logits_ptr + place, place < size, other=float("-inf")).to(tl.float32) * factor


@jit
def _rank(x: tl.tensor) -> tl.tensor:
    """The place of a float among all floats, as an integer."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def _number(rank: tl.tensor) -> tl.tensor:
    """The float at that place."""
    bits = rank.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
