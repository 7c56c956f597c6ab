"""Admission: how far the rollout plane may run ahead.

A ticket is taken when a prompt enters and given back when its group is dropped, or when weights
trained on it are live. With ``(staleness + 1) * groups_per_step`` places and batches formed in
ticket order, no token is ever more than ``staleness`` versions old: the bound holds by construction.
A shelf that lets ``window - 1`` tickets overtake a late one costs as many places (see ``places``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection


def places(*, groups_per_step: int, max_staleness: int, window: int = 1) -> int:
    """How many prompts may be inside at once so that nothing is trained on too late.

    Between a group's entry and its training at most ``places - 1 + window - 1`` other groups are
    trained on; that must stay below ``max_staleness + 1`` steps' worth.
    """
    spare = max_staleness * groups_per_step - (window - 1)
    assert spare >= 0, "a window this wide cannot keep the staleness bound"
    return groups_per_step + spare


class Gate:
    """Numbers tickets from ``first`` on, and stops when the run needs no more groups.

    ``wanted`` is how many kept groups the rest of the run will eat; a dropped group gives its place
    back. ``skip`` are ticket numbers an earlier life of this run has already dealt with.
    """

    def __init__(self, *, places: int, wanted: int, first: int = 0, skip: Collection[int] = ()) -> None:
        self._free = places
        self._wanted = wanted
        self._next = first
        self._skip = frozenset(skip)
        self._shut = False
        self._changed = asyncio.Event()

    async def admit(self) -> int:
        """Wait for a free place; the ticket's number is its place in line."""
        while self._shut or not (self._free and self._wanted):
            self._changed.clear()
            await self._changed.wait()
        self._free -= 1
        self._wanted -= 1
        while self._next in self._skip:
            self._next += 1
        number, self._next = self._next, self._next + 1
        return number

    def drop(self) -> None:
        """A group was dropped: its place is free at once, and another group is wanted in its stead."""
        self._free += 1
        self._wanted += 1
        self._changed.set()

    def shut(self) -> None:
        """Nobody enters until places are given back."""
        self._shut = True

    def release(self, count: int) -> None:
        """Weights trained on ``count`` groups are live: as many prompts may enter."""
        self._shut = False
        self._free += count
        self._changed.set()
