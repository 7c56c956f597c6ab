"""Data-parallel load balancing: partitions a global batch into micro-batches of every rank. No torch.

Ranks wait for each other at every micro-batch, so two things are balanced: simultaneous micro-batches, and the total
of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from miles.models.accounting.params import forward_flops_per_token
from miles.models.accounting.vision import vision_flops_per_feature
from miles.models.spec import DecoderSpec
from miles.train.micro_batching import PatchLimit, split_by_count, split_by_tokens

Partition = list[list[list[int]]]


class CostFn(Protocol):
    """Cost of a unit: of its tokens, and of the features that the vision tower computes for its images."""

    def __call__(self, tokens: int, features: int = 0, /) -> float: ...


def partition_micro_batches(
    lengths: Sequence[int],
    *,
    dp_size: int,
    budget: int,
    cp_size: int = 1,
    count: int | None = None,
    costs: Sequence[float] | None = None,
    balanced: bool = True,
    unit_name: str = "sample",
    patch_limit: PatchLimit | None = None,
) -> Partition:
    """Return the micro-batches of every rank, as indices of units (samples, or samples that must stay together).

    ``lengths`` are the token counts of the units; a micro-batch has at most ``budget`` times ``cp_size`` tokens, and
    the image patches of ``patch_limit``, or ``count`` units if given. Every unit is in one micro-batch of one rank, and
    all ranks have the same number of micro-batches, as few as first-fit decreasing finds; one is empty only if there
    are fewer units than micro-batches. ``costs`` (default: the lengths) are balanced; if not ``balanced``, ranks take
    contiguous units. With one rank the result is that of ``split_by_tokens`` or ``split_by_count``. It is
    deterministic.

    >>> partition_micro_batches([5, 3, 2, 6], dp_size=2, budget=8)
    [[[0, 1]], [[2, 3]]]
    """
    if dp_size == 1:
        return [_pack(lengths, budget, cp_size, count, unit_name, patch_limit)]
    # With a fixed count every unit has size 1.
    sizes, capacity = (list(lengths), budget * cp_size) if count is None else ([1] * len(lengths), count)
    if not balanced:

        def pack(run: Sequence[int]) -> list[list[int]]:
            limit = None if patch_limit is None else patch_limit.select(run)
            return _pack([lengths[i] for i in run], budget, cp_size, count, unit_name, limit)

        return _partition_contiguous(lengths, dp_size, pack)
    packed = _pack(lengths, budget, cp_size, count, unit_name, patch_limit)
    total = -(-len(packed) // dp_size) * dp_size
    weights = list(costs if costs is not None else lengths)
    limit = patch_limit if count is None else None
    bins = _fill_cheapest(sizes, weights, total, capacity, limit) or _split_to_total(packed, total, weights)
    return _assign_to_ranks(bins, weights, dp_size)


def build_flops_cost(spec: DecoderSpec) -> CostFn:
    """Return a cost function in FLOPs of a sample: matmuls and causal attention, and the vision tower's matmuls."""

    per_feature = vision_flops_per_feature(spec)

    def cost(tokens: int, features: int = 0) -> float:
        return tokens * forward_flops_per_token(spec, tokens / 2) + features * per_feature

    return cost


def build_token_cost(spec: DecoderSpec) -> CostFn:
    """Return a cost function in tokens: a feature of an image counts as many as its matmuls are those of a token."""
    ratio = vision_flops_per_feature(spec) / forward_flops_per_token(spec, 0.0)

    def cost(tokens: int, features: int = 0) -> float:
        return tokens + features * ratio

    return cost


def _pack(
    lengths: Sequence[int],
    budget: int,
    cp_size: int,
    count: int | None,
    unit_name: str,
    patch_limit: PatchLimit | None,
) -> list[list[int]]:
    if count is not None:
        return split_by_count(len(lengths), count)
    return split_by_tokens(lengths, budget, unit_name, cp_size, patch_limit)


def _fill_cheapest(
    sizes: Sequence[int], costs: Sequence[float], total: int, capacity: int, patch_limit: PatchLimit | None
) -> list[list[int]] | None:
    """Put units, by decreasing cost, into the cheapest of ``total`` bins with capacity; None if one fits nowhere."""
    bins: list[list[int]] = [[] for _ in range(total)]
    cost, free = np.zeros(total), np.full(total, capacity)
    for index in sorted(range(len(sizes)), key=lambda i: (-costs[i], -sizes[i], i)):
        fits = free >= sizes[index]
        if patch_limit is not None:
            fits &= [patch_limit.fits([*each, index]) for each in bins]
        if not fits.any():
            return None
        cheapest = int(np.where(fits, cost, np.inf).argmin())
        bins[cheapest].append(index)
        cost[cheapest] += costs[index]
        free[cheapest] -= sizes[index]
    # Units of cost 0 may leave bins empty.
    return _split_to_total(bins, total, costs)


def _split_to_total(bins: Sequence[Sequence[int]], total: int, costs: Sequence[float]) -> list[list[int]]:
    """Return ``total`` bins: the most expensive bin with several units is split while there are too few."""
    out = [list(b) for b in bins if b]
    while len(out) < total:
        splittable = [b for b in out if len(b) > 1]
        if not splittable:
            break
        largest = max(splittable, key=lambda b: (sum(costs[i] for i in b), -min(b)))
        out.remove(largest)
        halves: tuple[list[int], list[int]] = ([], [])
        loads = [0.0, 0.0]
        for index in sorted(largest, key=lambda i: (-costs[i], i)):
            half = 0 if (loads[0], len(halves[0])) <= (loads[1], len(halves[1])) else 1
            halves[half].append(index)
            loads[half] += costs[index]
        out += halves
    return out + [[] for _ in range(total - len(out))]


def _assign_to_ranks(bins: Sequence[list[int]], costs: Sequence[float], dp_size: int) -> Partition:
    """Run bins of similar cost at the same time, and give the largest of each round to the least loaded rank."""
    bin_cost = [sum(costs[i] for i in b) for b in bins]
    order = sorted(range(len(bins)), key=lambda n: (-bin_cost[n], min(bins[n], default=len(costs))))
    out: Partition = [[] for _ in range(dp_size)]
    load = [0.0] * dp_size
    for start in range(0, len(order), dp_size):
        ranks = sorted(range(dp_size), key=lambda rank: (load[rank], rank))
        for number, rank in zip(order[start : start + dp_size], ranks, strict=True):
            out[rank].append(sorted(bins[number]))
            load[rank] += bin_cost[number]
    return out


def _partition_contiguous(
    lengths: Sequence[int], dp_size: int, pack: Callable[[Sequence[int]], list[list[int]]]
) -> Partition:
    """Give each rank a contiguous run of units, of equal number up to one."""
    bounds = [len(lengths) * rank // dp_size for rank in range(dp_size + 1)]
    runs = [range(bounds[rank], bounds[rank + 1]) for rank in range(dp_size)]
    packed = [[[run[i] for i in indices] for indices in pack(run)] for run in runs]
    num_bins = max(map(len, packed))
    return [sorted(map(sorted, _split_to_total(bins, num_bins, lengths)), key=_sort_key) for bins in packed]


def _sort_key(bin_: Sequence[int]) -> tuple[bool, list[int]]:
    """Sort bins by their first unit, empty ones last."""
    return not bin_, list(bin_)
