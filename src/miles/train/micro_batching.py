"""Micro-batching: splits a global batch by a token budget, or by a fixed count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from miles.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchLimit:
    """At most ``limit`` image patches per micro-batch; ``patches`` are those of the images of each unit, by digest.

    An image of several units of a micro-batch counts once, because it is encoded once.
    """

    patches: Sequence[Mapping[str, int]]
    limit: int

    def fits(self, units: Iterable[int]) -> bool:
        """Return whether some units may be one micro-batch."""
        return self.count(units) <= self.limit

    def count(self, units: Iterable[int]) -> int:
        """Return the number of patches of the different images of some units."""
        found: dict[str, int] = {}
        for unit in units:
            found |= self.patches[unit]
        return sum(found.values())

    def select(self, units: Iterable[int]) -> PatchLimit:
        """Return the limit for some of the units, numbered in their order."""
        return PatchLimit(patches=[self.patches[unit] for unit in units], limit=self.limit)


def split_by_tokens(
    lengths: Sequence[int],
    budget: int,
    unit_name: str = "sample",
    cp_size: int = 1,
    patch_limit: PatchLimit | None = None,
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
    if patch_limit is not None:
        _check_patches(patch_limit, unit_name)
    if sum(lengths) <= budget and (patch_limit is None or patch_limit.fits(range(len(lengths)))):
        return [list(range(len(lengths)))] if lengths else []
    bins: list[list[int]] = []
    free_tokens: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size = lengths[index]
        for number, free in enumerate(free_tokens):
            if size <= free and (patch_limit is None or patch_limit.fits([*bins[number], index])):
                bins[number].append(index)
                free_tokens[number] -= size
                break
        else:
            bins.append([index])
            free_tokens.append(budget - size)
    return sorted(sorted(indices) for indices in bins)


def _check_patches(patch_limit: PatchLimit, unit_name: str) -> None:
    most = max((patch_limit.count([unit]) for unit in range(len(patch_limit.patches))), default=0)
    if most > patch_limit.limit:
        raise UsageError(
            f"a {unit_name} with {most} image patches does not fit --max-patches-per-gpu {patch_limit.limit}; "
            f"raise it to {most} or more, or use smaller images"
        )


def split_by_count(number: int, size: int) -> list[list[int]]:
    """Split into runs of ``size`` indices in order; the last may be shorter.

    >>> split_by_count(3, 2)
    [[0, 1], [2]]
    """
    return [list(range(start, min(start + size, number))) for start in range(0, number, size)]
