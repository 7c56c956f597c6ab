"""The servers of a run as one engine: the fleet, who looks after it, and how weights get there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from miles.backends.sglang.buckets import Weights
from miles.backends.sglang.carriers import Carrier
from miles.backends.sglang.fleet import Fleet, Seat
from miles.backends.sglang.keeper import Care, Keeper
from miles.backends.sglang.launch import Home
from miles.backends.sglang.weights import ServerPublication
from miles.cluster.local import Run
from miles.core.protocols import Completion, Hear, Sampling
from miles.core.types import Tokens, Version
from miles.models.spec import DecoderSpec

LEAVE_SECONDS = 30.0
"""How long the requests of a server that is to leave may take to end there."""


class Servers:
    """Implements core.protocols.Engine and EngineControl. They start when ``sync`` says whose weights they get.

    ``tell`` is given a sentence whenever one comes or goes.
    """

    def __init__(self, fleet: Fleet, homes: Sequence[Home], care: Care, tell: Callable[[str], None]) -> None:
        self.fleet = fleet
        self._homes, self._care, self._tell = homes, care, tell
        self._keeper: Keeper | None = None
        self._publication: ServerPublication | None = None
        self._starting: asyncio.Task[None] | None = None

    def sync(
        self,
        weights: Weights,
        spec: DecoderSpec,
        *,
        carrier: Carrier,
        run: Run,
        bucket_bytes: int,
        seconds: float,
    ) -> ServerSync:
        """Start the servers in the background; the first publication waits for them, and raises what went wrong."""
        assert self._keeper is None, "servers get weights from one place"
        self._publication = ServerPublication(
            self.fleet,
            weights=weights,
            spec=spec,
            carrier=carrier,
            run=run,
            bucket_bytes=bucket_bytes,
            seconds=seconds,
            tell=self._tell,
        )
        homes = dict(zip(self.fleet.seats, self._homes, strict=True))
        self._keeper = Keeper(self.fleet, homes, self._publication, self._care, self._tell)
        self._starting = asyncio.create_task(self._keeper.start(), name="servers start")
        return ServerSync(self._publication, self._starting)

    async def add(self, name: str, home: Home) -> Seat:
        """One more server, with the last weights; returns when it takes requests, or raises why it does not."""
        keeper = await self._started()
        seat = self.fleet.seat(name)
        await keeper.add(seat, home)
        return seat

    async def remove(self, seat: Seat, seconds: float = LEAVE_SECONDS) -> None:
        """Have one leave for good; requests that have not ended in so many seconds go on at the others."""
        await (await self._started()).remove(seat, seconds)

    async def _started(self) -> Keeper:
        assert self._keeper is not None and self._starting is not None, "sync comes first"
        await asyncio.shield(self._starting)
        return self._keeper

    @property
    def restarts(self) -> int:
        """How often a server was brought back."""
        return 0 if self._keeper is None else self._keeper.restarts

    async def generate(self, tokens: Tokens, sampling: Sampling) -> Completion:
        return await self.fleet.generate(tokens, sampling)

    async def generate_aloud(self, tokens: Tokens, sampling: Sampling, hear: Hear) -> Completion:
        return await self.fleet.generate_aloud(tokens, sampling, hear)

    async def pause(self) -> None:
        await self.fleet.pause()

    async def resume(self) -> None:
        await self.fleet.resume()

    async def abort(self) -> None:
        await self.fleet.abort()

    async def sleep(self) -> None:
        await self.fleet.sleep()

    async def wake(self) -> None:
        await self.fleet.wake()

    async def health(self) -> Mapping[str, float]:
        return {**await self.fleet.health(), "engines_restarted": float(self.restarts)}

    async def close(self) -> None:
        """End what was started here; what runs elsewhere goes on."""
        if self._starting is not None:
            self._starting.cancel()
            with suppress(asyncio.CancelledError, Exception):  # whoever published has heard of it
                await self._starting
        if self._publication is not None:
            await self._publication.close()
        if self._keeper is not None:
            await self._keeper.close()


class ServerSync:
    """Implements core.protocols.WeightSync: a publication that begins when all servers have started."""

    def __init__(self, publication: ServerPublication, starting: asyncio.Task[None]) -> None:
        self._publication, self._starting = publication, starting

    async def publish(self, version: Version) -> Mapping[str, float]:
        await asyncio.shield(self._starting)
        return await self._publication.publish(version)
