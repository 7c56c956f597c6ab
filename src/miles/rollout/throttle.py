"""How many attempts are under way at once: so many at most, fewer where the engine's memory is short.

A fixed limit is a number. An adaptive one follows the engine: each time it had to take memory away from a request since
the last look the limit falls by a tenth; while requests neither lose memory nor wait for it, it rises by one each time
as many attempts have ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Literal

Granularity = Literal["group", "sample"]
Pressure = Callable[[], Awaitable[Mapping[str, float]]]

_FALL = 0.9


class Throttle:
    """Places for at most ``limit`` attempts, given out in the order they were asked for.

    All attempts of a ``group`` enter together, or each ``sample`` by itself. With ``pressure``, which tells of an
    engine's ``preemptions`` and ``waiting`` requests, the limit moves between one (a group) and ``limit``.
    """

    def __init__(self, limit: int, *, by: Granularity = "group", pressure: Pressure | None = None) -> None:
        assert limit > 0
        self._level, self._most = float(limit), limit
        self.inside = 0
        self._by = by
        self._pressure = pressure
        self._preempted = 0.0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def limit(self) -> int:
        """How many may be inside now."""
        return int(self._level)

    def group(self, attempts: int) -> AbstractAsyncContextManager[object]:
        """The place of a whole group, where those are admitted together."""
        return self._places(attempts) if self._by == "group" else nullcontext()

    def sample(self) -> AbstractAsyncContextManager[object]:
        """The place of one attempt, where each is admitted by itself."""
        return self._places(1) if self._by == "sample" else nullcontext()

    @asynccontextmanager
    async def _places(self, count: int) -> AsyncIterator[None]:
        await self._enter(count)
        try:
            yield
        finally:
            self.inside -= count
            if self._pressure is not None:
                self._adapt(await self._pressure())
            self._admit()

    async def _enter(self, count: int) -> None:
        if not self._waiting and self._fits(count):
            self.inside += count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had come all the same
                self.inside -= count
            self._admit()
            raise

    def _fits(self, count: int) -> bool:
        """A group larger than the limit enters when it is alone."""
        return self.inside + count <= self.limit or not self.inside

    def _admit(self) -> None:
        while self._waiting:
            count, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
                continue
            if not self._fits(count):
                return
            self._waiting.popleft()
            self.inside += count
            turn.set_result(None)

    def _adapt(self, told: Mapping[str, float]) -> None:
        preempted = told.get("preemptions", 0.0)
        if preempted > self._preempted:
            self._level = max(1.0, _FALL * min(self._level, max(self.inside, 1)))
        elif not told.get("waiting", 0.0):
            self._level = min(float(self._most), self._level + 1 / self._level)
        self._preempted = preempted
