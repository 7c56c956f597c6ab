"""Servers of ours in threads of the test, weights to give them, and a proxy that hangs up in mid-answer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import torch
from aiohttp import web
from tests.wire.served import Hosted
from tests.wire.tiny import END, VOCABULARY

from miles.backends.sglang.carriers import Carrier, InRequests
from miles.backends.sglang.client import Client, PauseMode
from miles.backends.sglang.fleet import Fleet, Seat, State
from miles.backends.sglang.weights import ServerPublication
from miles.cluster.local import Inline
from miles.core.protocols import Sampling
from miles.core.types import Version
from miles.models import hub
from miles.models.choice import chosen_spec

PROMPT = np.array([5, 17, 300, 44, 8, 99, 120], np.int32)
DRAWN = Sampling(max_new_tokens=24, ignore_eos=True, seed=11)
LONG = Sampling(max_new_tokens=300, ignore_eos=True, seed=11)


def weights_of(folder) -> dict[str, torch.Tensor]:
    return dict(hub.load_slices(folder, rank=0, world=1, device="cpu", dtype=torch.float32))


def client_of(url: str, name: str) -> Client:
    return Client(url, name, vocabulary=VOCABULARY)


class Stand:
    """A fleet of servers at these addresses, and the weights they are to have."""

    def __init__(
        self,
        folder,
        urls,
        *,
        carrier: Carrier | None = None,
        bucket_bytes: int = 30_000,
        mode: PauseMode = "abort",
    ) -> None:
        self.current = weights_of(folder)
        self.fleet = Fleet([f"engine {i}" for i in range(len(urls))], ends=frozenset([END]), mode=mode)
        self.troubles: list[tuple[str, str]] = []
        self.fleet.trouble = self._trouble
        self.clients = [client_of(url, seat.name) for url, seat in zip(urls, self.fleet.seats, strict=True)]
        self.said: list[str] = []
        self.fleet.tell = self.said.append
        self.sync = ServerPublication(
            self.fleet,
            weights=lambda: self.current,
            spec=chosen_spec(folder, "auto"),
            carrier=carrier or InRequests(),
            run=Inline(),
            bucket_bytes=bucket_bytes,
            seconds=60.0,
            tell=self.said.append,
        )

    def _trouble(self, seat: Seat, why: Exception) -> None:
        self.troubles.append((seat.name, str(why)))
        if seat.state is State.SERVING:
            self.fleet.drop(seat, str(why))

    async def open(self) -> None:
        for seat, client in zip(self.fleet.seats, self.clients, strict=True):
            await self.sync.join(seat, client)

    async def close(self) -> None:
        await self.sync.close()
        for client in self.clients:
            await client.close()


@asynccontextmanager
async def stand(folder, urls, **how) -> AsyncIterator[Stand]:
    """All of it, with version 0 published."""
    made = Stand(folder, urls, **how)
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
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
