"""Finished work, handed on in ticket order whatever order it finished in.

Order is what makes the gate's bound hold, and what makes two runs with one seed the same run. A
``window`` above 1 lets up to that many tickets overtake one that is late: throughput for order.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from miles.core.plugs import DataBuffer
from miles.core.types import Group, Sample, Version
from miles.schedule.buffer import chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A group that came back; ``rows`` is None when it was dropped, for ``reason``."""

    ticket: int
    group: Group
    rows: Sequence[Sample] | None
    reason: str


class Shelf:
    """``first`` is the ticket that is waited for; ``skip`` those that will never come.

    ``choose`` says which of several that may be taken is; without it, the one that came first in line.
    """

    def __init__(
        self, *, window: int = 1, first: int = 0, skip: Sequence[int] = (), choose: DataBuffer | None = None
    ) -> None:
        self._window, self._choose = window, choose
        self._next = first
        self._done: dict[int, Finished] = {}
        self._line: list[int] = []  # a heap of what is done, and of what was and is taken
        self._taken: set[int] = set(skip)
        self._changed = asyncio.Event()

    def pass_over(self, ticket: int) -> None:
        """It will never come."""
        self._taken.add(ticket)
        self._changed.set()

    def put(self, finished: Finished) -> None:
        self._done[finished.ticket] = finished
        heapq.heappush(self._line, finished.ticket)
        self._changed.set()

    async def take(self, version: Version | None = None) -> Finished:
        """The next group in line, kept or dropped; it is chosen for weights of ``version``."""
        while (ticket := self._ready(version or Version())) is None:
            self._changed.clear()
            await self._changed.wait()
        self._taken.add(ticket)
        self._pass_over_taken()
        return self._done.pop(ticket)

    def rest(self) -> Sequence[Finished]:
        """Everything that waits, taken all at once."""
        rest = [self._done[ticket] for ticket in sorted(self._done)]
        self._done.clear()
        self._line.clear()
        return rest

    def fresh(self, version: Version, count: int) -> tuple[Sample, ...]:
        """Up to ``count`` waiting rows that ``version`` alone wrote; of other policies, rows whoever wrote them."""
        waiting = (row for finished in self._done.values() for row in finished.rows or ())
        fresh = (row for row in waiting if row.policy != version.policy or row.oldest == version.number)
        return tuple(islice(fresh, count))

    @property
    def cursor(self) -> tuple[int, tuple[int, ...]]:
        """The oldest ticket not yet taken, and those above it that were."""
        self._pass_over_taken()
        return self._next, tuple(sorted(self._taken))

    def _ready(self, version: Version) -> int | None:
        self._pass_over_taken()
        end = self._next + self._window
        while self._line and self._line[0] not in self._done:
            heapq.heappop(self._line)
        if self._choose is None or not self._line:
            return self._line[0] if self._line and self._line[0] < end else None
        return self._chosen(self._choose, version, end)

    def _chosen(self, choose: DataBuffer, version: Version, end: int) -> int | None:
        if self._window <= len(self._done):
            done = [t for t in range(self._next, end) if t in self._done]
        else:
            done = sorted(t for t in self._done if t < end)
        dropped = next((t for t in done if self._done[t].rows is None), None)
        if dropped is not None or not done:  # what was dropped makes room at once
            return dropped
        return done[chosen(choose, [self._done[t].group for t in done], version)]

    def _pass_over_taken(self) -> None:
        while self._next in self._taken:
            self._taken.remove(self._next)
            self._next += 1
