"""Looks after the servers of a fleet: starts them, watches their health, and replaces one that is dead or stuck.

Each server has a task of its own. Who waits for whom: the task for its server (with deadlines), and for its turn to be
given weights; requests wait for none of this as long as another server is free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from miles.backends.sglang.client import Client, Distrusted, Lost
from miles.backends.sglang.fleet import Fleet, Seat, State
from miles.backends.sglang.launch import Home
from miles.backends.sglang.weights import ServerPublication
from miles.core.errors import EngineError, MilesError

_TICK = 0.1
_LATE_TWICE = 2
SETTLED_SECONDS = 600.0
"""A server that did well for so long has its restarts forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """How servers are looked after. ``pause`` is how long one that failed ``failures`` times in a row is let be."""

    interval: float
    timeout: float
    first_wait: float
    max_restarts: int
    backoff: float = 1.0
    longest_backoff: float = 60.0

    def pause(self, failures: int) -> float:
        return 0.0 if failures < 2 else min(self.longest_backoff, self.backoff * 2 ** (failures - 2))


class Keeper:
    """``homes`` are where the servers of the fleet's seats live. ``tell`` is given a sentence about each change."""

    def __init__(
        self,
        fleet: Fleet,
        homes: Mapping[Seat, Home],
        sync: ServerPublication,
        care: Care,
        tell: Callable[[str], None],
    ) -> None:
        self._fleet, self._homes, self._sync, self._care, self._tell = fleet, dict(homes), sync, care, tell
        self._troubles: dict[Seat, Lost] = {}
        self._well: set[Seat] = set()
        self._alarms: dict[Seat, asyncio.Event] = {seat: asyncio.Event() for seat in homes}
        self._lives: dict[Seat, asyncio.Task[None]] = {}
        self.restarts = 0
        fleet.trouble = self._trouble

    async def start(self) -> None:
        """Bring all servers up at once; the first that cannot be is raised."""
        clients: dict[Seat, Client] = {}

        async def up(seat: Seat, home: Home) -> None:
            clients[seat] = await home.open()
            await self._sync.join(seat, clients[seat])

        try:
            async with asyncio.TaskGroup() as group:
                for seat, home in self._homes.items():
                    group.create_task(up(seat, home))
        except* MilesError as errors:
            await self.close()
            raise errors.exceptions[0] from errors
        for seat in self._homes:
            self._begin(seat, clients[seat])

    async def add(self, seat: Seat, home: Home) -> None:
        """Bring one more server up, give it the last weights, and look after it; one that cannot be has no seat."""
        self._homes[seat], self._alarms[seat] = home, asyncio.Event()
        try:
            client = await home.open()
            await self._sync.join(seat, client)
        except BaseException:
            await self._forget(seat)
            raise
        self._begin(seat, client)
        self._tell(f"{seat.name} has joined.")

    async def remove(self, seat: Seat, seconds: float) -> None:
        """Have a server leave for good: what it has under way may end there for so long, and then goes on elsewhere."""
        life = self._lives.pop(seat, None)
        if life is not None:
            await _ended([life])
        await self._fleet.empty(seat, seconds)
        await self._forget(seat)
        self._tell(f"{seat.name} has left.")

    async def _forget(self, seat: Seat) -> None:
        self._sync.leave(seat)
        self._fleet.remove(seat)
        self._well.discard(seat)
        await self._homes.pop(seat).close()

    def _begin(self, seat: Seat, client: Client) -> None:
        life = self._life(seat, self._homes[seat], client)
        self._lives[seat] = asyncio.create_task(life, name=f"life of {seat.name}")

    async def close(self) -> None:
        await _ended(list(self._lives.values()))
        await asyncio.gather(*(home.close() for home in self._homes.values()))

    def _trouble(self, seat: Seat, why: Lost) -> None:
        if seat in self._homes:  # one that has left may be heard of once more
            self._troubles.setdefault(seat, why)
            self._alarms[seat].set()

    def _calm(self, seat: Seat) -> Lost | None:
        """What was heard of it since this was last asked."""
        self._alarms[seat].clear()
        return self._troubles.pop(seat, None)

    # -- one server -------------------------------------------------------------------------

    async def _life(self, seat: Seat, home: Home, client: Client) -> None:
        restarts = failures = 0
        while True:
            began = time.monotonic()
            self._well.discard(seat)
            why = await self._illness(seat, home, client)
            if time.monotonic() - began > SETTLED_SECONDS:
                restarts = 0
            if seat in self._well:  # it had come back, and what ended it is another's doing
                failures = 0
            while True:
                self._sync.leave(seat)
                self._fleet.drop(seat, why)
                restarts, failures = restarts + 1, failures + 1
                if restarts > self._care.max_restarts:
                    self._fleet.drop(seat, why, gone=True)
                    self._tell(f"{seat.name} is given up after {restarts - 1} restarts (--rollout-max-restarts): {why}")
                    await home.close()
                    return
                self._tell(f"{why}; it is brought back ({restarts} of at most {self._care.max_restarts} times).")
                try:
                    client = await self._again(seat, home, self._care.pause(failures))
                    break
                except EngineError as error:
                    why = str(error)
            self.restarts += 1
            self._tell(f"{seat.name} is back.")

    async def _again(self, seat: Seat, home: Home, pause: float) -> Client:
        """Start it once more after a pause; it gets weights first."""
        await home.close()
        await asyncio.sleep(pause)
        client = await home.open()
        self._calm(seat)
        await self._sync.join(seat, client)
        return client

    async def _illness(self, seat: Seat, home: Home, client: Client) -> str:
        """Watch until something is wrong, and say what; one that was found healthy before then is noted as well."""
        alarm, late = self._alarms[seat], 0
        due = time.monotonic() + self._care.first_wait + self._care.interval
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(alarm.wait(), _TICK)
            if (why := home.alive()) is not None:
                return why
            if not alarm.is_set() and time.monotonic() < due:
                continue
            trouble = self._calm(seat)
            if isinstance(trouble, Distrusted) or (trouble is not None and seat.state is State.ILL):
                return str(trouble)
            # Where a request was lost, the process may be about to be found dead; held servers draw no token.
            generate = trouble is None and not self._fleet.held and not seat.asleep
            why = await client.healthy(self._care.timeout, generate=generate)
            if why is None and trouble is None:
                self._well.add(seat)
            if generate and self._fleet.held:
                why = None  # everyone was told to hold still meanwhile
            late = 0 if why is None else late + 1
            if why is not None and (trouble is not None or late >= _LATE_TWICE):
                return f"{seat.name} is not well: {why}"
            due = time.monotonic() + (self._care.interval if why is None else 0.0)


async def _ended(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel them, and return when they are over."""
    # Told again and again: asyncio.wait_for may lose a cancellation that comes together with what it waits for.
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=1.0)
