"""Dealing a global batch out over the data-parallel ranks, micro-batch by micro-batch. No torch.

Ranks wait for each other at every micro-batch, so two things are evened out: what the ranks do at the same time, and
what each does in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from miles.models.footprint import forward_flops_per_token
from miles.models.spec import DecoderSpec
from miles.train.pack import by_count, by_tokens

Dealt = list[list[list[int]]]
Price = Callable[[int], float]
"""What a unit of so many tokens costs."""


def deal(
    lengths: Sequence[int],
    *,
    parts: int,
    budget: int,
    context: int = 1,
    count: int | None = None,
    costs: Sequence[float] | None = None,
    balanced: bool = True,
    what: str = "sample",
) -> Dealt:
    """The micro-batches of every part: indices of units, which are samples or what must stay together.

    ``lengths`` are the tokens of the units; a micro-batch has ``budget`` times ``context`` of them at most, or
    ``count`` units where that is given. Every unit is in one micro-batch of one part, and all parts have as many
    micro-batches, as few as first-fit decreasing finds; one is empty only where there are fewer units than
    micro-batches. ``costs`` (the lengths when not given) are evened out; not ``balanced``, parts take runs of
    neighbours. One part has exactly what ``by_tokens`` or ``by_count`` gives. The result is a function of the
    arguments alone.

    >>> deal([5, 3, 2, 6], parts=2, budget=8)
    [[[0, 1]], [[2, 3]]]
    """
    if parts == 1:
        return [_packed(lengths, budget, context, count, what)]
    # Of a fixed count every unit takes one place.
    sizes, room = (list(lengths), budget * context) if count is None else ([1] * len(lengths), count)
    if not balanced:
        return _in_order(lengths, parts, lambda some: _packed(some, budget, context, count, what))
    packed = _packed(lengths, budget, context, count, what)
    total = -(-len(packed) // parts) * parts
    weights = list(costs if costs is not None else lengths)
    bins = _even(sizes, weights, total, room) or _filled(packed, total, weights)
    return _dealt(bins, weights, parts)


def flops_of(spec: DecoderSpec) -> Price:
    """Operations of a sample: its tokens' products, and attention from each to those before it."""

    def price(length: int) -> float:
        return length * forward_flops_per_token(spec, length / 2)

    return price


def _packed(lengths: Sequence[int], budget: int, context: int, count: int | None, what: str) -> list[list[int]]:
    return by_count(len(lengths), count) if count is not None else by_tokens(lengths, budget, what, context)


def _even(sizes: Sequence[int], costs: Sequence[float], total: int, room: int) -> list[list[int]] | None:
    """The dearest unit first, into the cheapest of ``total`` bins that has room; None where one finds none."""
    bins: list[list[int]] = [[] for _ in range(total)]
    cost, free = np.zeros(total), np.full(total, room)
    for index in sorted(range(len(sizes)), key=lambda i: (-costs[i], -sizes[i], i)):
        fits = free >= sizes[index]
        if not fits.any():
            return None
        at = int(np.where(fits, cost, np.inf).argmin())
        bins[at].append(index)
        cost[at] += costs[index]
        free[at] -= sizes[index]
    # A unit that costs nothing leaves its bin as cheap as an empty one.
    return _filled(bins, total, costs)


def _filled(bins: Sequence[Sequence[int]], total: int, costs: Sequence[float]) -> list[list[int]]:
    """``total`` bins of these: the dearest that has several units shares them with an empty one."""
    out = [list(b) for b in bins if b]
    while len(out) < total:
        several = [b for b in out if len(b) > 1]
        if not several:
            break
        dearest = max(several, key=lambda b: (sum(costs[i] for i in b), -min(b)))
        out.remove(dearest)
        halves: tuple[list[int], list[int]] = ([], [])
        loads = [0.0, 0.0]
        for index in sorted(dearest, key=lambda i: (-costs[i], i)):
            at = 0 if (loads[0], len(halves[0])) <= (loads[1], len(halves[1])) else 1
            halves[at].append(index)
            loads[at] += costs[index]
        out += halves
    return out + [[] for _ in range(total - len(out))]


def _dealt(bins: Sequence[list[int]], costs: Sequence[float], parts: int) -> Dealt:
    """Bins of like cost at the same time, and of each round the dearest to the part that has done least."""
    price = [sum(costs[i] for i in b) for b in bins]
    order = sorted(range(len(bins)), key=lambda n: (-price[n], min(bins[n], default=len(costs))))
    out: Dealt = [[] for _ in range(parts)]
    done = [0.0] * parts
    for start in range(0, len(order), parts):
        free = sorted(range(parts), key=lambda part: (done[part], part))
        for number, part in zip(order[start : start + parts], free, strict=True):
            out[part].append(sorted(bins[number]))
            done[part] += price[number]
    return out


def _in_order(lengths: Sequence[int], parts: int, packed: Callable[[Sequence[int]], list[list[int]]]) -> Dealt:
    """Parts of neighbours, as many units each, give or take one."""
    bounds = [len(lengths) * part // parts for part in range(parts + 1)]
    runs = [range(bounds[part], bounds[part + 1]) for part in range(parts)]
    found = [[[run[i] for i in chosen] for chosen in packed([lengths[i] for i in run])] for run in runs]
    most = max(map(len, found))
    return [sorted(map(sorted, _filled(bins, most, lengths)), key=_order) for bins in found]


def _order(chosen: Sequence[int]) -> tuple[bool, list[int]]:
    """By their first; empty ones behind."""
    return not chosen, list(chosen)
