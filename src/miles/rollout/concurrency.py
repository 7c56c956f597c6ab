"""Concurrency of rollouts: limits of running trajectories, fixed or adapted to preemptions, and awaitables begun early.

The adaptive limit falls by a tenth whenever the engine preempted a request since the last check; while no request is
preempted or waiting, it rises by one each time that many trajectories have finished.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Generic, Literal, TypeVar, cast

Granularity = Literal["group", "sample"]
EngineLoad = Callable[[], Awaitable[Mapping[str, float]]]

_DECREASE = 0.9

T = TypeVar("T")


class ConcurrencyLimiter:
    """Slots for at most ``limit`` trajectories, assigned in request order.

    All trajectories of a ``group`` enter together, or each ``sample`` by itself. With ``load``, which reports an
    engine's ``preemptions`` and ``waiting`` requests, the limit varies between 1 (or one group) and ``limit``.
    """

    def __init__(self, limit: int, *, granularity: Granularity = "group", load: EngineLoad | None = None) -> None:
        assert limit > 0
        self._level = float(limit)
        self._max = limit
        self.running = 0
        self._granularity = granularity
        self._load = load
        self._preemptions = 0.0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def limit(self) -> int:
        """How many may run now."""
        return int(self._level)

    def group(self, group_size: int) -> AbstractAsyncContextManager[object]:
        """The slots of a whole group, where groups are admitted together."""
        return self._slots(group_size) if self._granularity == "group" else nullcontext()

    def sample(self) -> AbstractAsyncContextManager[object]:
        """The slot of one trajectory, where each is admitted by itself."""
        return self._slots(1) if self._granularity == "sample" else nullcontext()

    @asynccontextmanager
    async def _slots(self, count: int) -> AsyncIterator[None]:
        await self._enter(count)
        try:
            yield
        finally:
            self.running -= count
            if self._load is not None:
                self._adapt(await self._load())
            self._admit()

    async def _enter(self, count: int) -> None:
        if not self._waiting and self._fits(count):
            self.running += count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was admitted meanwhile
                self.running -= count
            self._admit()
            raise

    def _fits(self, count: int) -> bool:
        """A group larger than the limit enters when nothing else runs."""
        return self.running + count <= self.limit or not self.running

    def _admit(self) -> None:
        while self._waiting:
            count, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
                continue
            if not self._fits(count):
                return
            self._waiting.popleft()
            self.running += count
            turn.set_result(None)

    def _adapt(self, metrics: Mapping[str, float]) -> None:
        preemptions = metrics.get("preemptions", 0.0)
        if preemptions > self._preemptions:
            self._level = max(1.0, _DECREASE * min(self._level, max(self.running, 1)))
        elif not metrics.get("waiting", 0.0):
            self._level = min(float(self._max), self._level + 1 / self._level)
        self._preemptions = preemptions


class StartedAwaitable(Generic[T]):
    """An awaitable that has run, in the current task, until it waits for something or is done.

    What has to be set up for a wait can be left out where there is none. Await it at once if it is not done.
    """

    def __init__(self, awaitable: Awaitable[T]) -> None:
        is_coroutine = asyncio.iscoroutine(awaitable)
        self._steps: Coroutine[Any, Any, T] = awaitable if is_coroutine else _as_coroutine(awaitable)
        self._result: T | None = None
        self._waits_for: Any = None
        try:
            self._waits_for = self._steps.send(None)
            self.is_done = False
        except StopIteration as stop:
            self._result, self.is_done = stop.value, True

    def result(self) -> T:
        """Return the result of one that is done."""
        assert self.is_done, "it waits"
        return cast("T", self._result)

    def __await__(self) -> Generator[Any, Any, T]:
        while not self.is_done:
            try:
                try:
                    value = yield self._waits_for
                except BaseException as error:  # a cancellation, and the end of the generator
                    self._waits_for = self._steps.throw(error)
                else:
                    self._waits_for = self._steps.send(value)
            except StopIteration as stop:
                self._result, self.is_done = stop.value, True
        return self.result()


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable
