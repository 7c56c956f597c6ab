"""Health monitor: starts the servers of a pool, checks their health, and restarts those that are dead or stuck.

Each server has a task of its own. Who waits for whom: the task for its server (with deadlines), and for its turn to be
sent weights; requests wait for none of this as long as another server is free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from miles.backends.remote.client import ServerLost, SglangClient, UntrustedServer
from miles.backends.remote.pool.engine_pool import EnginePool, EngineSlot, SlotState
from miles.backends.remote.process.server import ServerHost
from miles.backends.remote.weight_update import RemoteWeightUpdate
from miles.cluster.process import restart_delay
from miles.core.errors import EngineError, MilesError

_POLL_SECONDS = 0.1
_FAILED_CHECKS = 2
SETTLED_SECONDS = 600.0
"""The restarts of a server that was healthy for so long are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """Seconds between health checks, their timeout, the delay of the first one; how often a server is restarted."""

    interval: float
    timeout: float
    first_wait: float
    max_restarts: int
    backoff: float = 1.0
    longest_backoff: float = 60.0


class HealthMonitor:
    """``servers`` maps the slots of the pool to their servers. ``log`` is called with a sentence about each change."""

    def __init__(
        self,
        pool: EnginePool,
        servers: Mapping[EngineSlot, ServerHost],
        sync: RemoteWeightUpdate,
        config: HealthConfig,
        log: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._servers = dict(servers)
        self._sync = sync
        self._config = config
        self._log = log
        self._failures: dict[EngineSlot, ServerLost] = {}
        self._healthy: set[EngineSlot] = set()
        self._alarms: dict[EngineSlot, asyncio.Event] = {slot: asyncio.Event() for slot in servers}
        self._tasks: dict[EngineSlot, asyncio.Task[None]] = {}
        self.restarts = 0
        pool.on_failure = self._record_failure

    async def start(self) -> None:
        """Start all servers at once; raises the first error."""
        clients: dict[EngineSlot, SglangClient] = {}

        async def start_one(slot: EngineSlot, server: ServerHost) -> None:
            clients[slot] = await server.open()
            await self._sync.join(slot, clients[slot])

        try:
            async with asyncio.TaskGroup() as group:
                for slot, server in self._servers.items():
                    group.create_task(start_one(slot, server))
        except* MilesError as errors:
            await self.close()
            raise errors.exceptions[0] from errors
        for slot in self._servers:
            self._watch(slot, clients[slot])

    async def add(self, slot: EngineSlot, server: ServerHost) -> None:
        """Start one more server, send it the last weights and monitor it; its slot is removed if that fails."""
        self._servers[slot], self._alarms[slot] = server, asyncio.Event()
        try:
            client = await server.open()
            await self._sync.join(slot, client)
        except BaseException:
            await self._forget(slot)
            raise
        self._watch(slot, client)
        self._log(f"{slot.name} has joined.")

    async def remove(self, slot: EngineSlot, seconds: float) -> None:
        """Remove a server: its requests may end there for so many seconds, and then continue on other servers."""
        task = self._tasks.pop(slot, None)
        if task is not None:
            await _cancel_all([task])
        await self._pool.drain(slot, seconds)
        await self._forget(slot)
        self._log(f"{slot.name} has left.")

    async def _forget(self, slot: EngineSlot) -> None:
        self._sync.leave(slot)
        self._pool.remove(slot)
        self._healthy.discard(slot)
        await self._servers.pop(slot).close()

    def _watch(self, slot: EngineSlot, client: SglangClient) -> None:
        monitor = self._monitor(slot, self._servers[slot], client)
        self._tasks[slot] = asyncio.create_task(monitor, name=f"health of {slot.name}")

    async def close(self) -> None:
        await _cancel_all(list(self._tasks.values()))
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    def _record_failure(self, slot: EngineSlot, error: ServerLost) -> None:
        if slot in self._servers:  # a server that was removed may fail once more
            self._failures.setdefault(slot, error)
            self._alarms[slot].set()

    def _take_failure(self, slot: EngineSlot) -> ServerLost | None:
        """The first failure recorded since the last call."""
        self._alarms[slot].clear()
        return self._failures.pop(slot, None)

    # -- one server -------------------------------------------------------------------------

    async def _monitor(self, slot: EngineSlot, server: ServerHost, client: SglangClient) -> None:
        restarts = failures = 0
        while True:
            started = time.monotonic()
            self._healthy.discard(slot)
            why = await self._wait_for_failure(slot, server, client)
            if time.monotonic() - started > SETTLED_SECONDS:
                restarts = 0
            if slot in self._healthy:  # it had recovered, so this failure is a new one
                failures = 0
            while True:
                self._sync.leave(slot)
                self._pool.mark_failed(slot, why)
                if self._give_up_external():
                    return
                restarts += 1
                failures += 1
                if restarts > self._config.max_restarts:
                    self._pool.mark_failed(slot, why, dead=True)
                    self._log(f"{slot.name} is given up after {restarts - 1} restarts (--rollout-max-restarts): {why}")
                    await server.close()
                    return
                self._log(f"{why}; restarting it (restart {restarts} of at most {self._config.max_restarts}).")
                try:
                    client = await self._restart(slot, server, failures)
                    break
                except EngineError as error:
                    why = str(error)
            self.restarts += 1
            self._log(f"{slot.name} is back.")

    def _give_up_external(self) -> bool:
        """Give up all servers when none is left and none of them is started here; requests then fail at once."""
        slots = self._pool.slots
        if any(slot.state not in (SlotState.FAILED, SlotState.DEAD) for slot in slots):
            return False
        if any(slot not in self._servers or self._servers[slot].starts_here for slot in slots):
            return False
        for slot in slots:
            self._pool.mark_failed(slot, slot.why, dead=True)
        self._log("No server is left, and this run starts none (--rollout-external-engine-addrs).")
        return True

    async def _restart(self, slot: EngineSlot, server: ServerHost, failures: int) -> SglangClient:
        """Start it again after a pause, and send it the last weights."""
        await server.close()
        await asyncio.sleep(restart_delay(failures, base=self._config.backoff, longest=self._config.longest_backoff))
        client = await server.open()
        self._take_failure(slot)
        await self._sync.join(slot, client)
        return client

    async def _wait_for_failure(self, slot: EngineSlot, server: ServerHost, client: SglangClient) -> str:
        """Watch a server until it fails, and return why; one that passes a check before then is noted as healthy."""
        alarm, failed_checks = self._alarms[slot], 0
        due = time.monotonic() + self._config.first_wait + self._config.interval
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(alarm.wait(), _POLL_SECONDS)
            if (why := server.exit_reason()) is not None:
                return why
            if not alarm.is_set() and time.monotonic() < due:
                continue
            failure = self._take_failure(slot)
            if isinstance(failure, UntrustedServer) or (failure is not None and slot.state is SlotState.FAILED):
                return str(failure)
            # After a lost request the process may be about to be found dead; paused servers sample no token.
            generate = failure is None and not self._pool.is_paused and not slot.asleep
            why = await client.check_health(self._config.timeout, generate=generate)
            if why is None and failure is None:
                self._healthy.add(slot)
            if generate and self._pool.is_paused:
                why = None  # all servers were paused during the check
            failed_checks = 0 if why is None else failed_checks + 1
            if why is not None and (failure is not None or failed_checks >= _FAILED_CHECKS):
                return f"{slot.name} is not healthy: {why}"
            due = time.monotonic() + (self._config.interval if why is None else 0.0)


async def _cancel_all(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks, and return when they are done."""
    # Again and again: asyncio.wait_for may lose a cancellation that comes together with what it waits for.
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=1.0)
