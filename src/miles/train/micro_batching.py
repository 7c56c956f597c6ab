"""Micro-batching: splits a global batch by a token budget, or by a fixed count."""

from __future__ import annotations

from collections.abc import Sequence

from miles.core.errors import UsageError


def split_by_tokens(
    lengths: Sequence[int], budget: int, unit_name: str = "sample", cp_size: int = 1
) -> list[list[int]]:
    """First-fit decreasing bin packing of indices into ``lengths``, with at most ``budget`` tokens per context rank.

    Indices ascend within a bin, and between bins by their first; the result is deterministic.

    >>> split_by_tokens([5, 3, 2, 6], budget=8)
    [[0, 1], [2, 3]]
    """
    longest = max(lengths, default=0)
    if longest > budget * cp_size:
        ranks = f" on {cp_size} context-parallel ranks" if cp_size > 1 else ""
        raise UsageError(
            f"a {unit_name} of {longest} tokens does not fit --max-tokens-per-gpu {budget}{ranks}; "
            f"raise it to {-(-longest // cp_size)} or more, or lower --rollout-max-response-len"
        )
    budget *= cp_size
    if sum(lengths) <= budget:
        return [list(range(len(lengths)))] if lengths else []
    bins: list[list[int]] = []
    free_tokens: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size = lengths[index]
        for number, free in enumerate(free_tokens):
            if size <= free:
                bins[number].append(index)
                free_tokens[number] -= size
                break
        else:
            bins.append([index])
            free_tokens.append(budget - size)
    return sorted(sorted(indices) for indices in bins)


def split_by_count(number: int, size: int) -> list[list[int]]:
    """Split into runs of ``size`` indices in order; the last may be shorter.

    >>> split_by_count(3, 2)
    [[0, 1], [2]]
    """
    return [list(range(start, min(start + size, number))) for start in range(0, number, size)]
