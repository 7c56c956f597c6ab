"""Data-parallel group as one rank sees it, and the group of a single rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class DataParallelGroup(Protocol):
    """``dp_size`` ranks (or groups of ranks) train one part of a batch each; ranks of one part share all its data.

    ``cp_size`` context-parallel ranks share the tokens of a micro-batch; the trainer has ``world_size`` ranks. All
    ranks make the same calls in the same order. ``is_lead`` is true on one rank.
    """

    @property
    def dp_rank(self) -> int: ...

    @property
    def dp_size(self) -> int: ...

    @property
    def cp_size(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def is_lead(self) -> bool: ...

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over data-parallel ranks, bitwise equal on every rank."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over data-parallel ranks."""
        ...

    def union_names(self, own: Sequence[str]) -> list[str]:
        """Return the union of all ranks' names, in one order."""
        ...

    def sum_world(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks of the trainer, also those that share a part, bitwise equal on every rank."""
        ...


class SingleRank:
    """A group of one rank, which trains the whole batch."""

    dp_rank = 0
    dp_size = 1
    cp_size = 1
    world_size = 1
    is_lead = True

    def sum(self, x: Tensor) -> Tensor:
        return x

    def max(self, x: Tensor) -> Tensor:
        return x

    def union_names(self, own: Sequence[str]) -> list[str]:
        return list(own)

    def sum_world(self, x: Tensor) -> Tensor:
        return x


SINGLE_RANK = SingleRank()
