"""Over-sampling and partial rollout: groups beyond those a step needs are interrupted, then dropped or resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miles.core.protocols import InterruptibleRollout
from miles.core.types import Group, Status

PARTIAL = "partial"
ABORTED = "aborted"
OVERSAMPLED = "oversampled"
LEFTOVER = "leftover"


class Oversampling:
    """Tracks the groups in flight; without an ``interruptible`` rollout nothing is ever interrupted."""

    def __init__(self, interruptible: InterruptibleRollout | None, *, partial: bool) -> None:
        self._interruptible = interruptible
        self._partial = partial
        self._interrupting = False
        self._interrupted_count = 0
        self._partial_groups: dict[int, Group] = {}
        self._in_flight: set[asyncio.Task[None]] = set()

    def watch(self, task: asyncio.Task[None]) -> None:
        """Track one more group in flight."""
        if self._interruptible is not None:
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    async def interrupt(self) -> int:
        """Interrupt all groups in flight; returns how many did not finish as usual."""
        assert self._interruptible is not None
        self._interrupting, self._interrupted_count = True, 0
        if self._in_flight:
            await self._interruptible.interrupt()
        if self._in_flight:  # some or all may have finished meanwhile
            await asyncio.wait(self._in_flight)
        self._interrupting = False
        return self._interrupted_count

    def classify(self, ticket: int, group: Group) -> str | None:
        """Return why a group that returned during an interrupt is not used now; None if it is a regular group."""
        if not self._interrupting:
            return None
        complete = all(trajectory.status is not Status.ABORTED for trajectory in group.trajectories)
        if complete and self._partial:
            return None
        self._interrupted_count += 1
        if self._partial:
            self._partial_groups[ticket] = group
            return PARTIAL
        return OVERSAMPLED if complete else ABORTED

    def pop_partial(self) -> Sequence[tuple[int, Group]]:
        """Remove and return the interrupted groups to resume, oldest first."""
        groups = sorted(self._partial_groups.items())
        self._partial_groups.clear()
        return groups
