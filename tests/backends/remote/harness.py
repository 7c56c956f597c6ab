"""Test harness of remote engines: native servers in threads, weights, and a proxy that disconnects in mid-response."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import torch
from aiohttp import web
from tests.server_api.live_servers import Hosted
from tests.server_api.tiny import END, VOCABULARY

from miles.backends.remote.client import PauseMode, SglangClient
from miles.backends.remote.pool.engine_pool import EnginePool, EngineSlot, SlotState
from miles.backends.remote.transports.senders import HttpTransport, WeightTransport
from miles.backends.remote.weight_update import RemoteWeightUpdate
from miles.cluster.executor import InlineExecutor
from miles.core.protocols import SamplingParams
from miles.core.types import Version
from miles.models.checkpoint import hf
from miles.models.resolve import resolve_spec

PROMPT = np.array([5, 17, 300, 44, 8, 99, 120], np.int32)
SHORT = SamplingParams(max_new_tokens=24, ignore_eos=True, seed=11)
LONG = SamplingParams(max_new_tokens=300, ignore_eos=True, seed=11)


def weights_of(folder) -> dict[str, torch.Tensor]:
    return dict(hf.load_slices(folder, rank=0, world=1, device="cpu", dtype=torch.float32))


def client_of(url: str, name: str) -> SglangClient:
    return SglangClient(url, name, vocab_size=VOCABULARY)


class PoolHarness:
    """A fleet of servers at these addresses, and the weights they are to have."""

    def __init__(
        self,
        folder,
        urls,
        *,
        transport: WeightTransport | None = None,
        bucket_bytes: int = 30_000,
        mode: PauseMode = "abort",
    ) -> None:
        self.current = weights_of(folder)
        self.pool = EnginePool([f"engine {i}" for i in range(len(urls))], eos_token_ids=frozenset([END]), mode=mode)
        self.failures: list[tuple[str, str]] = []
        self.pool.on_failure = self._record_failure
        self.clients = [client_of(url, slot.name) for url, slot in zip(urls, self.pool.slots, strict=True)]
        self.said: list[str] = []
        self.pool.log = self.said.append
        self.sync = RemoteWeightUpdate(
            self.pool,
            weights=lambda: self.current,
            spec=resolve_spec(folder, "auto"),
            transport=transport or HttpTransport(),
            executor=InlineExecutor(),
            bucket_bytes=bucket_bytes,
            seconds=60.0,
            log=self.said.append,
        )

    def _record_failure(self, slot: EngineSlot, why: Exception) -> None:
        self.failures.append((slot.name, str(why)))
        if slot.state is SlotState.SERVING:
            self.pool.mark_failed(slot, str(why))

    async def open(self) -> None:
        for slot, client in zip(self.pool.slots, self.clients, strict=True):
            await self.sync.join(slot, client)

    async def close(self) -> None:
        await self.sync.close()
        for client in self.clients:
            await client.close()


@asynccontextmanager
async def running_pool(folder, urls, **how) -> AsyncIterator[PoolHarness]:
    """All of it, with version 0 published."""
    made = PoolHarness(folder, urls, **how)
    try:
        await made.open()
        await made.sync.publish(Version())
        yield made
    finally:
        await made.close()


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)


def url_of(hosted: Hosted) -> str:
    return f"http://127.0.0.1:{hosted.port}"


@asynccontextmanager
async def serve_app(app: web.Application) -> AsyncIterator[str]:
    """The address of an application on a free port of loopback."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def mortal(url: str, after: int) -> AsyncIterator[str]:
    """A proxy to ``url`` that hangs up on every answer behind its ``after``-th event, and says all else truly."""
    async with aiohttp.ClientSession() as session:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            kind = {"Content-Type": request.content_type}
            async with session.request(request.method, f"{url}{request.path}", data=body, headers=kind) as answer:
                if request.path != "/generate":
                    return web.Response(body=await answer.read(), status=answer.status)
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                for _ in range(after):
                    await response.write(await answer.content.readuntil(b"\n\n"))
                assert request.transport is not None
                request.transport.abort()
                return response

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", pass_on)
        async with serve_app(app) as address:
            yield address
