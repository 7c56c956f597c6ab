"""Test harness of the router: scripted engines, a manual clock, and a running router."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from miles.cluster.router.config import RouterConfig
from miles.cluster.router.router import Router

PATIENCE = 20.0  # a test that waits this long has failed
Behave = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ManualClock:
    """Time passes when ``advance`` says so."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._count = itertools.count()
        self._calls: list[tuple[float, int, _Timer]] = []
        self._changed = Arrivals()

    def now(self) -> float:
        return self._now

    def call_later(self, seconds: float, call: Callable[..., Any], /, *args: Any) -> _Timer:
        timer = _Timer(call, args, self._changed.note)
        if seconds <= 0:
            asyncio.get_running_loop().call_soon(timer.fire)
        else:
            heapq.heappush(self._calls, (self._now + seconds, next(self._count), timer))
            self._changed.note()
        return timer

    def pending(self, name: str) -> list[float]:
        """In how many seconds each call of a function of this name is due."""
        return sorted(due - self._now for due, _, timer in self._calls if timer.name == name)

    async def has(self, name: str, count: int) -> None:
        """Wait until so many calls of a function of this name are due some time."""
        while len(self.pending(name)) != count:
            await self._changed.reach(self._changed.count + 1)

    def advance(self, seconds: float) -> None:
        end = self._now + seconds
        while self._calls and self._calls[0][0] <= end:
            self._now, _, timer = heapq.heappop(self._calls)
            timer.fire()
        self._now = end


class _Timer:
    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], changed: Callable[[], None]) -> None:
        self._call: Callable[..., Any] | None = call
        self._args = args
        self._changed = changed

    @property
    def name(self) -> str:
        return "" if self._call is None else self._call.__name__

    def cancel(self) -> None:
        self._call = None
        self._changed()

    def fire(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call(*self._args)


class LogCapture:
    """Hears what the router tells, and waits for a sentence."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    def __call__(self, sentence: str) -> None:
        self.messages.append(sentence)
        for words, future in self._waiting:
            if words in sentence and not future.done():
                future.set_result(None)

    async def wait_for(self, words: str, since: int = 0) -> None:
        """Wait until a log line with these words is printed, unless one was among those after the first ``since``."""
        if any(words in sentence for sentence in self.messages[since:]):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((words, future))
        await asyncio.wait_for(future, PATIENCE)


async def reply(request: web.Request) -> web.StreamResponse:
    """As SGLang answers, in the fields that matter here."""
    asked = json.loads(await request.read() or b"{}")
    meta = {"id": asked.get("rid"), "weight_version": "3", "finish_reason": {"type": "stop"}, "routed_experts": "AAEC"}
    return web.json_response({"text": "hello", "output_ids": [1, 2], "meta_info": meta}, headers={"x-own": "kept"})


class ScriptedEngine:
    """A server on a port of its own; ``behave`` is what it does with whatever is no question after its health."""

    def __init__(self, everywhere: Arrivals) -> None:
        self._everywhere = everywhere
        self.behave: Behave = reply
        self.well = True
        self.parse_bodies = True
        self.version: str | None = "3"
        self.tp_size: int | None = 1
        self.seen: list[tuple[str, str, Mapping[str, str], Any]] = []
        self.arrived = Arrivals()
        self._runner: web.ServerRunner | None = None
        self.port = 0

    async def start(self) -> ScriptedEngine:
        self._runner = web.ServerRunner(
            web.Server(self._serve, access_log=None, handler_cancellation=True), shutdown_timeout=0.0
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """Gone, as a process that was killed is gone: its connections are cut, its port is closed."""
        if self._runner is not None:
            server = self._runner.server
            assert server is not None
            for connection in list(server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        return f"127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        return [path for _, path, _, _ in self.seen]

    def bodies(self, path: str = "/generate") -> list[Any]:
        return [body for _, at, _, body in self.seen if at == path]

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in ("/health", "/health_generate"):
            return web.Response(status=200 if self.well else 503)
        if request.path == "/model_info":
            return web.json_response({"weight_version": self.version, "model_path": "/models/small"})
        if request.path == "/server_info":
            return web.json_response({} if self.tp_size is None else {"tp_size": self.tp_size})
        raw = await request.read()
        body = json.loads(raw) if raw and self.parse_bodies else None
        self.seen.append((request.method, request.path, request.headers, body))
        self.arrived.note()
        self._everywhere.note()
        return await self.behave(request)  # pyright: ignore


class Arrivals:
    """Counts, and lets others wait for a count."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def note(self) -> None:
        self.count += 1
        task = asyncio.get_running_loop().create_task(self._wake())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE), self._changed:
            await self._changed.wait_for(lambda: self.count >= count)


class RouterHarness:
    """A router, its engines, and a client; ``arrived`` counts what came to any engine."""

    def __init__(
        self,
        router: Router,
        port: int,
        engines: list[ScriptedEngine],
        session: aiohttp.ClientSession,
        logs: LogCapture,
        arrived: Arrivals,
    ) -> None:
        self.arrived = arrived
        self.router = router
        self.port = port
        self.engines = engines
        self.session = session
        self.logs = logs
        self.url = f"http://127.0.0.1:{port}"
        self.clock: Any = None

    async def ask(
        self, path: str = "/generate", body: Any = None, method: str = "POST", **more: Any
    ) -> tuple[int, Any, Any]:
        """Status, body and headers of a request to the router."""
        sent = {} if method == "GET" else {"json": body if body is not None else {"text": "hi"}}
        async with self.session.request(method, self.url + path, **sent, **more) as answer:
            raw = await answer.read()
            messages = json.loads(raw) if answer.content_type == "application/json" else raw
            return answer.status, messages, answer.headers

    async def facts(self) -> dict[str, dict[str, Any]]:
        _, messages, _ = await self.ask("/engines", method="GET")
        return {engine["id"]: engine for engine in messages["engines"]}

    async def probe(self, seconds: float, times: int = 1) -> None:
        """Let so much time pass, then wait until every engine has been asked after its health and answered."""
        for _ in range(times):
            await self.clock.has("_start_check", len(self.router.pool.engines))
            self.clock.advance(seconds)
        await self.clock.has("_start_check", len(self.router.pool.engines))

    def engine(self, which: int) -> Any:
        """The router's own view of an engine."""
        return self.router.pool.engines[self.engines[which].id]


@asynccontextmanager
async def running_router(
    count: int = 2, *, manual: bool = False, key: str | None = None, engine_key: str | None = None, **options: Any
) -> AsyncIterator[RouterHarness]:
    """A router before ``count`` engines that it has found well; with ``manual``, its time is ``house.clock``'s."""
    clock = ManualClock() if manual else None
    arrived = Arrivals()
    engines = [await ScriptedEngine(arrived).start() for _ in range(count)]
    config = replace(RouterConfig(port=0, engine_urls=tuple(engine.url for engine in engines)), **options)
    logs = LogCapture()
    router = Router(config, log=logs, key=key, engine_key=engine_key, clock=clock)
    port = await router.start()
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=PATIENCE)) as session:
            made = RouterHarness(router, port, engines, session, logs, arrived)
            made.clock = clock
            for engine in engines:
                await logs.wait_for(f"{engine.id} is healthy")
            yield made
    finally:
        await router.close()
        for engine in engines:
            await engine.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test to its end, or to the end of patience, on both event loops the router runs on."""

    async def within() -> None:
        async with asyncio.timeout(3 * PATIENCE):
            await test()

    for factory in (None, uvloop.Loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(within())
