"""Reorder buffer: finished groups are handed on in ticket order, whatever order they finish in.

Order makes the staleness bound of admission control hold, and makes two runs with one seed identical. A
``window`` above 1 lets up to that many tickets overtake a late one: throughput at the cost of order.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from miles.core.errors import HookError
from miles.core.hooks import DataBuffer
from miles.core.protocols import FilterResult
from miles.core.types import Group, Sample, Version

_KEEP = FilterResult(keep=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A finished group; ``samples`` is None if it was dropped, for ``reason``."""

    ticket: int
    group: Group
    samples: Sequence[Sample] | None
    reason: str


class ReorderBuffer:
    """``first`` is the next ticket to take; ``skip`` are tickets that will never arrive.

    ``data_buffer`` chooses among several groups that may be taken; without it, the lowest ticket is taken.
    """

    def __init__(
        self, *, window: int = 1, first: int = 0, skip: Sequence[int] = (), data_buffer: DataBuffer | None = None
    ) -> None:
        self._window = window
        self._data_buffer = data_buffer
        self._next = first
        self._finished: dict[int, FinishedGroup] = {}
        self._heap: list[int] = []  # tickets of finished groups, some of them already taken
        self._taken: set[int] = set(skip)
        self._changed = asyncio.Event()

    def skip(self, ticket: int) -> None:
        """Mark a ticket as never arriving."""
        self._taken.add(ticket)
        self._changed.set()

    def put(self, finished: FinishedGroup) -> None:
        self._finished[finished.ticket] = finished
        heapq.heappush(self._heap, finished.ticket)
        self._changed.set()

    async def take(self, version: Version | None = None) -> FinishedGroup:
        """Wait for the next group in order, kept or dropped, to be trained at ``version``."""
        while (ticket := self._find_ready(version or Version())) is None:
            self._changed.clear()
            await self._changed.wait()
        self._taken.add(ticket)
        self._advance()
        return self._finished.pop(ticket)

    def pop_kept(self, ticket: int) -> Group | None:
        """Remove and return a waiting group; None if it is not here, or was dropped by its filter."""
        finished = self._finished.get(ticket)
        if finished is None or finished.samples is None:
            return None
        return self._finished.pop(ticket).group

    def drain(self) -> Sequence[FinishedGroup]:
        """Remove and return all waiting groups."""
        groups = [self._finished[ticket] for ticket in sorted(self._finished)]
        self._finished.clear()
        self._heap.clear()
        return groups

    def select_fresh(self, version: Version, count: int) -> tuple[Sample, ...]:
        """Return up to ``count`` waiting samples sampled entirely by ``version``; of other policies, any sample."""
        waiting = (sample for finished in self._finished.values() for sample in finished.samples or ())
        fresh = (s for s in waiting if s.policy != version.policy or s.oldest_version == version.number)
        return tuple(islice(fresh, count))

    @property
    def cursor(self) -> tuple[int, tuple[int, ...]]:
        """The lowest ticket not yet taken, and the taken tickets above it."""
        self._advance()
        return self._next, tuple(sorted(self._taken))

    def _find_ready(self, version: Version) -> int | None:
        self._advance()
        end = self._next + self._window
        while self._heap and self._heap[0] not in self._finished:
            heapq.heappop(self._heap)
        if self._data_buffer is None or not self._heap:
            return self._heap[0] if self._heap and self._heap[0] < end else None
        return self._choose(self._data_buffer, version, end)

    def _choose(self, data_buffer: DataBuffer, version: Version, end: int) -> int | None:
        if self._window <= len(self._finished):
            ready = [t for t in range(self._next, end) if t in self._finished]
        else:
            ready = sorted(t for t in self._finished if t < end)
        dropped = next((t for t in ready if self._finished[t].samples is None), None)
        if dropped is not None or not ready:  # a dropped group frees its slot at once
            return dropped
        return ready[choose_group(data_buffer, [self._finished[t].group for t in ready], version)]

    def _advance(self) -> None:
        while self._next in self._taken:
            self._taken.remove(self._next)
            self._next += 1


# -- data buffer hooks ------------------------------------------------------------------------


def keep_all(group: Group, version: Version) -> FilterResult:
    """Default buffer filter: every buffered group is trained on."""
    return _KEEP


def freshest(waiting: Sequence[Group], version: Version) -> int:
    """Data buffer that takes the group whose oldest token is newest; on ties, the one admitted first."""
    numbers = [
        [t.oldest_version.number for t in group.trajectories if t.oldest_version is not None] for group in waiting
    ]
    oldest = [min(versions, default=version.number) for versions in numbers]
    return oldest.index(max(oldest))


def choose_group(data_buffer: DataBuffer, waiting: Sequence[Group], version: Version) -> int:
    """Return the index chosen by ``data_buffer``; HookError if there is no such group."""
    index = data_buffer(waiting, version)
    if not isinstance(index, int) or not 0 <= index < len(waiting):
        raise HookError(
            f"The data buffer returned {index!r} for {len(waiting)} waiting groups; return an index from 0 to "
            f"{len(waiting) - 1}."
        )
    return index
