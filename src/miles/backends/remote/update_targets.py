"""Targets of a weight update: servers that take requests, and those that wait for their first version.

All are sent each step of an update at once. A server that is lost on the way is marked as failed, and does not fail the
others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from miles.backends.remote.client import ServerLost, SglangClient
from miles.backends.remote.pool.engine_pool import EnginePool, EngineSlot, SlotState
from miles.backends.remote.sglang_lora import AdapterFormat
from miles.backends.remote.update_protocols import UpdateProtocol, create_update_protocol
from miles.core.errors import EngineError, SyncError
from miles.core.types import Version

UpdateStep = Callable[[UpdateProtocol], Awaitable[Any]]


class UpdateTargets:
    """The servers of a pool. ``waiting`` have no weights yet; ``connected`` has the protocol of each known server."""

    def __init__(
        self, pool: EnginePool, seconds: float, adapter: AdapterFormat | None, log: Callable[[str], None]
    ) -> None:
        self._pool = pool
        self._seconds = seconds
        self._adapter = adapter
        self._log = log
        self.waiting: dict[EngineSlot, SglangClient] = {}
        self.connected: dict[EngineSlot, UpdateProtocol] = {}

    async def open(self, slot: EngineSlot, client: SglangClient) -> UpdateProtocol:
        """The protocol of one server."""
        client.adapters.on_stuck = lambda name: self._log(
            f"{slot.name} keeps adapter {name} in host memory: a request that named it ended before it ran."
        )
        return await create_update_protocol(slot, client, self._seconds, self._adapter)

    async def connect(self) -> list[UpdateProtocol]:
        """Protocols of all servers that take requests or wait for their first weights."""
        clients = {slot: slot.client for slot in self._pool.serving() if slot.client is not None} | self.waiting
        updates: list[UpdateProtocol] = []

        async def connect_one(slot: EngineSlot, client: SglangClient) -> None:
            try:
                self.connected[slot] = await self.open(slot, client)
                updates.append(self.connected[slot])
            except EngineError as error:
                self.mark_failed(slot, error if isinstance(error, ServerLost) else ServerLost(str(error)))

        await asyncio.gather(*(connect_one(slot, client) for slot, client in clients.items()))
        return sorted(updates, key=lambda update: update.slot.name)

    async def for_each(self, updates: Sequence[UpdateProtocol], step: UpdateStep) -> list[UpdateProtocol]:
        """``run_all``, of which some server must be left; returns those that are."""
        await self.run_all(updates, step)
        return self.require_remaining(updates)

    async def run_all(self, updates: Sequence[UpdateProtocol], step: UpdateStep) -> None:
        """Run a step for all at once; lost servers are marked as failed, other errors raised when all have answered."""
        results = await asyncio.gather(*(step(update) for update in updates), return_exceptions=True)
        errors: list[BaseException] = []
        for update, result in zip(updates, results, strict=True):
            if isinstance(result, ServerLost):
                self.mark_failed(update.slot, result)
            elif isinstance(result, BaseException):
                errors.append(result)
        if errors:
            raise errors[0]

    def remaining(self, updates: Sequence[UpdateProtocol]) -> list[UpdateProtocol]:
        """Those whose servers were not lost."""
        return [update for update in updates if update.slot.open or update.slot in self.waiting]

    def require_remaining(self, updates: Sequence[UpdateProtocol]) -> list[UpdateProtocol]:
        remaining = self.remaining(updates)
        if not remaining:
            raise ServerLost(self.describe_absence())
        return remaining

    async def wait_for_server(self, version: Version) -> None:
        """Wait until a server is there; one that was lost is being restarted, or is dead."""
        while not (self._pool.serving() or self.waiting):
            if all(slot.state is SlotState.DEAD for slot in self._pool.slots):
                raise SyncError(f"{describe_version(version)} was not published: {self.describe_absence()}")
            await self._pool.wait_for_change()

    def mark_failed(self, slot: EngineSlot, error: ServerLost) -> None:
        self.waiting.pop(slot, None)
        self._pool.mark_failed(slot, str(error))
        self._pool.on_failure(slot, error)

    async def check_health(self) -> None:
        """Mark every server as failed that does not answer: one was lost together with what all were sent."""
        for slot, client in [*((slot, slot.client) for slot in self._pool.serving()), *self.waiting.items()]:
            why = None if client is None else await client.check_health(10.0, generate=False)
            if why is not None:
                self.mark_failed(slot, ServerLost(why))

    def describe_absence(self) -> str:
        reasons = [f"{slot.name}: {slot.why}" for slot in self._pool.slots if slot.why]
        return f"no server is left to receive it ({'; '.join(reasons) or 'none has started'})"


def describe_version(version: Version) -> str:
    return f"{version.policy} version {version.number}"
