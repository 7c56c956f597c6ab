"""Admission control: how far the rollout plane may run ahead of training.

A prompt takes a slot when it is admitted; the slot is released when its group is dropped, or when weights
trained on it are live. With ``(staleness + 1) * groups_per_step`` slots and batches formed in
ticket order, no token is ever more than ``staleness`` versions old, by construction.
A reorder buffer that lets ``window - 1`` tickets overtake a late one costs as many slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection


def compute_admission_slots(*, groups_per_step: int, max_staleness: int, window: int = 1) -> int:
    """Return how many prompts may be in flight so that no group exceeds the staleness bound.

    Between a group's admission and its training at most ``slots - 1 + window - 1`` other groups are
    trained on; that must stay below ``max_staleness + 1`` steps.
    """
    extra = max_staleness * groups_per_step - (window - 1)
    assert extra >= 0, "the reorder window is too wide for the staleness bound"
    return groups_per_step + extra


class AdmissionControl:
    """Numbers tickets from ``first`` on, and stops when the run needs no more groups.

    ``needed`` is how many kept groups the rest of the run will consume; a dropped group releases its slot.
    ``skip`` are ticket numbers that were consumed before the run was resumed.
    """

    def __init__(self, *, slots: int, needed: int, first: int = 0, skip: Collection[int] = ()) -> None:
        self._free = slots
        self._needed = needed
        self._next = first
        self._skip = frozenset(skip)
        self._closed = False
        self._changed = asyncio.Event()

    async def admit(self) -> int:
        """Wait for a free slot; returns the ticket number."""
        while self._closed or not (self._free and self._needed):
            self._changed.clear()
            await self._changed.wait()
        self._free -= 1
        self._needed -= 1
        while self._next in self._skip:
            self._next += 1
        ticket = self._next
        self._next += 1
        return ticket

    def drop(self) -> None:
        """Release the slot of a dropped group; another group is needed in its place."""
        self._free += 1
        self._needed += 1
        self._changed.set()

    def close(self) -> None:
        """Admit nothing until slots are released."""
        self._closed = True

    def release(self, count: int) -> None:
        """Release ``count`` slots, because weights trained on as many groups are live."""
        self._closed = False
        self._free += count
        self._changed.set()
