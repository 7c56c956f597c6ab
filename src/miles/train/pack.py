"""Cutting a global batch into micro-batches: by a token budget, or by a fixed count."""

from __future__ import annotations

from collections.abc import Sequence

from miles.core.errors import UsageError


def by_tokens(lengths: Sequence[int], budget: int, what: str = "sample", context: int = 1) -> list[list[int]]:
    """First-fit decreasing: indices into ``lengths``, none twice, no bin of more than ``budget`` tokens for each of the
    ``context`` ranks that share it.

    Within a bin, and between bins by their first, indices ascend; the result is a function of the
    arguments alone.

    >>> by_tokens([5, 3, 2, 6], budget=8)
    [[0, 1], [2, 3]]
    """
    longest = max(lengths, default=0)
    if longest > budget * context:
        ranks = f" on {context} context ranks" if context > 1 else ""
        raise UsageError(
            f"a {what} of {longest} tokens does not fit --max-tokens-per-gpu {budget}{ranks}; "
            f"raise it to {-(-longest // context)} or more, or lower --rollout-max-response-len"
        )
    budget *= context
    if sum(lengths) <= budget:
        return [list(range(len(lengths)))] if lengths else []
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size = lengths[index]
        for number, free in enumerate(room):
            if size <= free:
                bins[number].append(index)
                room[number] -= size
                break
        else:
            bins.append([index])
            room.append(budget - size)
    return sorted(sorted(chosen) for chosen in bins)


def by_count(number: int, size: int) -> list[list[int]]:
    """Runs of ``size`` indices in order; the last may be shorter.

    >>> by_count(3, 2)
    [[0, 1], [2]]
    """
    return [list(range(start, min(start + size, number))) for start in range(0, number, size)]
