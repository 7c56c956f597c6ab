"""Over-sampling and partial rollout: groups beyond those a step needs are interrupted, then dropped or resumed.

Where planes overlap they go on, and the late ones are cancelled before they would break the staleness bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from miles.core.protocols import InterruptibleRollout
from miles.core.types import Group, Status

PARTIAL = "partial"
ABORTED = "aborted"
OVERSAMPLED = "oversampled"
LEFTOVER = "leftover"
STALE = "stale"


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


class LateGroups:
    """Groups by the step whose weights were live when they were admitted, for the staleness bound of a run."""

    def __init__(self, max_staleness: int) -> None:
        self.live_step = 0
        self._max_staleness = max_staleness
        self._admitted: dict[int, int] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def admit(self, ticket: int, task: asyncio.Task[None]) -> None:
        """Count a group from now on; it may be cancelled until its ``task`` is done."""
        self._admitted.setdefault(ticket, self.live_step)
        self._tasks[ticket] = task
        task.add_done_callback(lambda _: self._tasks.pop(ticket, None))

    def forget(self, ticket: int) -> None:
        """Do not count a group that was trained on or dropped."""
        self._admitted.pop(ticket, None)

    def list_late(self, step: int) -> list[int]:
        """Return the tickets that would be too stale for the step after ``step``, oldest first."""
        return sorted(t for t, live in self._admitted.items() if live < step - self._max_staleness)

    async def cancel(self, tickets: Collection[int]) -> None:
        """Cancel those that are in flight, and wait until they have ended."""
        tasks = [self._tasks[ticket] for ticket in tickets if ticket in self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
