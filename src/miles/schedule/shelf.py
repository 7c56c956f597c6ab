"""Finished work, handed on in ticket order whatever order it finished in.

Order is what makes the gate's bound hold, and what makes two runs with one seed the same run. A
``window`` above 1 lets up to that many tickets overtake one that is late: throughput for order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from miles.core.types import Group, Sample, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A group that came back; ``rows`` is None when it was dropped, for ``reason``."""

    ticket: int
    group: Group
    rows: Sequence[Sample] | None
    reason: str


class Shelf:
    """``first`` is the ticket that is waited for; ``skip`` those that will never come."""

    def __init__(self, *, window: int = 1, first: int = 0, skip: Sequence[int] = ()) -> None:
        self._window = window
        self._next = first
        self._done: dict[int, Finished] = {}
        self._taken: set[int] = set(skip)
        self._changed = asyncio.Event()

    def put(self, finished: Finished) -> None:
        self._done[finished.ticket] = finished
        self._changed.set()

    async def take(self) -> Finished:
        """The next group in line, kept or dropped."""
        while (ticket := self._ready()) is None:
            self._changed.clear()
            await self._changed.wait()
        self._taken.add(ticket)
        self._pass_over_taken()
        return self._done.pop(ticket)

    def fresh(self, version: Version, count: int) -> tuple[Sample, ...]:
        """Up to ``count`` waiting rows that ``version`` alone wrote."""
        waiting = (row for finished in self._done.values() for row in finished.rows or ())
        return tuple(islice((row for row in waiting if row.oldest == version.number), count))

    @property
    def cursor(self) -> tuple[int, tuple[int, ...]]:
        """The oldest ticket not yet taken, and those above it that were."""
        self._pass_over_taken()
        return self._next, tuple(sorted(self._taken))

    def _ready(self) -> int | None:
        self._pass_over_taken()
        reach = range(self._next, self._next + self._window)
        return next((t for t in reach if t in self._done), None)

    def _pass_over_taken(self) -> None:
        while self._next in self._taken:
            self._taken.remove(self._next)
            self._next += 1
