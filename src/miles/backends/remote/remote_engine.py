"""Remote engine: the servers of a run as one engine, with their pool, their health monitor and their weight updates."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from miles.backends.remote.pool.engine_pool import EnginePool, EngineSlot
from miles.backends.remote.pool.health_monitor import HealthConfig, HealthMonitor
from miles.backends.remote.process.server import ServerHost
from miles.backends.remote.transports.buckets import GetWeights, QuantizedLayout
from miles.backends.remote.transports.senders import WeightTransport
from miles.backends.remote.weight_update import RemoteWeightUpdate
from miles.cluster.executor import Executor
from miles.core.media import Images
from miles.core.protocols import Completion, OnTokens, SamplingParams
from miles.core.types import Tokens, Version
from miles.models.spec import DecoderSpec

_GAUGE_SECONDS = 1.0
LEAVE_SECONDS = 30.0
"""How long the requests of a server that is removed may take to end there."""


class RemoteEngine:
    """Implements core.protocols.Engine and EngineControl. The servers start when ``sync`` is called.

    ``log`` is called with a sentence whenever a server joins or leaves.
    """

    def __init__(
        self, pool: EnginePool, servers: Sequence[ServerHost], health: HealthConfig, log: Callable[[str], None]
    ) -> None:
        self.pool = pool
        self._servers = servers
        self._health = health
        self._log = log
        self._monitor: HealthMonitor | None = None
        self._weight_update: RemoteWeightUpdate | None = None
        self._starting: asyncio.Task[None] | None = None

    def sync(
        self,
        weights: GetWeights,
        spec: DecoderSpec,
        *,
        transport: WeightTransport,
        executor: Executor,
        bucket_bytes: int,
        seconds: float,
        layout: QuantizedLayout = "packed",
        self_test: bool | None = None,
        num_versions: int = 0,
    ) -> DeferredWeightSync:
        """Start the servers in the background; the first publication waits for them, and raises their errors.

        ``num_versions``: how many versions of the run's adapters servers of ours hold by name; 0 if they do not.
        """
        assert self._monitor is None, "sync is called once"
        self._weight_update = RemoteWeightUpdate(
            self.pool,
            weights=weights,
            spec=spec,
            transport=transport,
            executor=executor,
            bucket_bytes=bucket_bytes,
            seconds=seconds,
            layout=layout,
            self_test=self_test,
            num_versions=num_versions,
            log=self._log,
        )
        servers = dict(zip(self.pool.slots, self._servers, strict=True))
        self._monitor = HealthMonitor(self.pool, servers, self._weight_update, self._health, self._log)
        self._starting = asyncio.create_task(self._monitor.start(), name="start servers")
        return DeferredWeightSync(self._weight_update, self._starting)

    async def add(self, name: str, server: ServerHost) -> EngineSlot:
        """Add a server with the last weights; returns when it takes requests, or raises why it does not."""
        monitor = await self._started_monitor()
        slot = self.pool.add_slot(name)
        await monitor.add(slot, server)
        return slot

    async def remove(self, slot: EngineSlot, seconds: float = LEAVE_SECONDS) -> None:
        """Remove a server; requests that have not ended in so many seconds continue on the others."""
        await (await self._started_monitor()).remove(slot, seconds)

    async def _started_monitor(self) -> HealthMonitor:
        assert self._monitor is not None and self._starting is not None, "sync comes first"
        await asyncio.shield(self._starting)
        return self._monitor

    @property
    def restarts(self) -> int:
        """How often a server was restarted."""
        return 0 if self._monitor is None else self._monitor.restarts

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images: Images = ()) -> Completion:
        return await self.pool.generate(tokens, sampling, images)

    async def generate_stream(
        self, tokens: Tokens, sampling: SamplingParams, on_tokens: OnTokens, images: Images = ()
    ) -> Completion:
        return await self.pool.generate_stream(tokens, sampling, on_tokens, images)

    async def pause(self) -> None:
        await self.pool.pause()

    async def resume(self) -> None:
        await self.pool.resume()

    async def abort(self) -> None:
        await self.pool.abort()

    async def sleep(self) -> None:
        await self.pool.sleep()

    async def wake(self) -> None:
        await self.pool.wake()

    def read_gauges(self) -> Mapping[str, Mapping[str, float]]:
        """Return the requests, pages and counters of each server by its name; blocks, so a thread calls it."""
        return {slot.name: {"running": float(slot.load), **_read_server(slot)} for slot in self.pool.serving()}

    async def health(self) -> Mapping[str, float]:
        return {**await self.pool.health(), "engines_restarted": float(self.restarts)}

    async def close(self) -> None:
        """End the servers that were started here; external servers keep running."""
        if self._starting is not None:
            self._starting.cancel()
            with suppress(asyncio.CancelledError, Exception):  # the publication has raised it
                await self._starting
        if self._weight_update is not None:
            await self._weight_update.close()
        if self._monitor is not None:
            await self._monitor.close()


def _read_server(slot: EngineSlot) -> dict[str, float]:
    """Return the numbers in a server's own state; none where it does not answer within a second."""
    client = slot.client
    if client is None:
        return {}
    request = urllib.request.Request(f"{client.url}/server_info", headers=client.headers)
    try:
        with urllib.request.urlopen(request, timeout=_GAUGE_SECONDS) as answer:
            found: Any = json.loads(answer.read())
        state: dict[str, Any] = dict(found["internal_states"][0])
    except (OSError, ValueError, LookupError, TypeError):  # it is down, or another program
        return {}
    numbers = {name: float(value) for name, value in state.items() if type(value) in (int, float)}
    names = {"last_gen_throughput": "tokens_per_second", "token_usage": "kv_used"}  # SGLang's
    return {names.get(name, name): value for name, value in numbers.items()}


class DeferredWeightSync:
    """Implements core.protocols.WeightSync: publishes once all servers have started."""

    def __init__(self, weight_update: RemoteWeightUpdate, starting: asyncio.Task[None]) -> None:
        self._weight_update = weight_update
        self._starting = starting

    async def publish(self, version: Version) -> Mapping[str, float]:
        await asyncio.shield(self._starting)
        return await self._weight_update.publish(version)
