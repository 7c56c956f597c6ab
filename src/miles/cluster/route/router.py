"""The router: a listening socket, the table of endpoints, and what is behind them."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from miles.cluster.route.body import session_of
from miles.cluster.route.broadcast import ABORT, BROADCASTS, Broadcaster
from miles.cluster.route.clock import Clock, LoopClock
from miles.cluster.route.config import RouteConfig
from miles.cluster.route.fleet import Fleet
from miles.cluster.route.forward import Forwarder
from miles.cluster.route.inbound import Client
from miles.cluster.route.manage import Office
from miles.cluster.route.message import Answer, Header, Refused, Request
from miles.cluster.route.metrics import CONTENT_TYPE, metrics_text
from miles.cluster.route.watch import Watch

T = TypeVar("T")

# Answered by one engine, without any lasting effect on it, so that another may be asked when that fails.
GENERATIONS = frozenset(
    (
        *("/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/encode", "/classify", "/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank", "/rerank"),
        *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"),
        *("/parse_function_call", "/separate_reasoning", "/get_weights_by_name"),
    )
)
SESSIONS = frozenset(("/open_session", "/close_session"))
_OPEN = frozenset(("/health", "/metrics"))  # without a key
_SWEEP_SECONDS = 2.0


class Router:
    """Serves until it is closed; ``tell`` is given a sentence whenever an engine changes its state."""

    def __init__(
        self,
        config: RouteConfig,
        *,
        tell: Callable[[str], None],
        key: str | None = None,
        engine_key: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        headers: tuple[Header, ...] = ((b"authorization", f"Bearer {engine_key}".encode()),) if engine_key else ()
        self._config = config
        self._key = f"Bearer {key}".encode() if key else None
        self._clock = clock or LoopClock(asyncio.get_running_loop())
        self._clients: set[Client] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None
        self._sweeper = self._clock.call_later(_SWEEP_SECONDS, self._sweep)
        self.fleet = Fleet(config, self._clock, tell)
        self._forward = Forwarder(self.fleet, config, self._clock, self._spawn, headers)
        self._watch = Watch(self.fleet, config, self._clock, self._spawn, headers)
        self._broadcast = Broadcaster(self.fleet, config, self._clock, self._watch.look, headers)
        self._office = Office(self.fleet, config, self._clock, self._spawn, headers)

    async def start(self) -> int:
        """Listen, and look after the engines; the port."""
        for url in self._config.engine_urls:
            self.fleet.add(url)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Client(self._handle, self._clock, self._clients, self._config.max_payload_size),
            self._config.host,
            self._config.port,
            backlog=4096,
        )
        return self._server.sockets[0].getsockname()[1]

    async def close(self, seconds: float = 0.0) -> None:
        """Take nothing new, wait ``seconds`` at most for what is under way, then end everything."""
        assert self._server is not None
        self._server.close()
        for client in list(self._clients):
            client.close_when_idle()
        busy = [client.gone for client in self._clients]
        if busy and seconds > 0:
            timer = asyncio.ensure_future(asyncio.wait(busy))
            late = self._clock.call_later(seconds, timer.cancel)
            await asyncio.gather(timer, return_exceptions=True)
            late.cancel()
        self._sweeper.cancel()
        self._watch.close()
        serving = [client.task for client in self._clients if client.task is not None]
        for client in list(self._clients):
            client.cut()
        for engine in self.fleet.engines.values():
            engine.pool.close("the router is closing")
        tasks = [*self._tasks, *serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one request -------------------------------------------------------------------------------

    async def _handle(self, request: Request, client: Client) -> None:
        path, method = request.path, request.method
        if path not in _OPEN:
            self._check(request)
        if path in GENERATIONS and method in (b"POST", b"PUT"):
            await self._forward(request, client)
        elif path in BROADCASTS:
            client.answer(await self._to_all(request))
        elif (answer := await self._own(request)) is not None:
            client.answer(answer)
        elif method == b"GET":
            await self._forward(request, client)
        elif path in SESSIONS and method == b"POST":
            self._check_session(request)
            await self._forward(request, client, again=False)
        elif method == b"OPTIONS":
            await self._forward(request, client)
        else:
            name = method.decode()
            raise Refused(
                404,
                f"The router does not know whether {name} {path} is for one engine or for all; ask an engine itself.",
            )

    async def _own(self, request: Request) -> Answer | None:
        """The router's own endpoints."""
        match request.method, request.path:
            case b"GET", "/health":
                return self._office.health()
            case b"GET", "/metrics":
                text = metrics_text(self.fleet, self._forward)
                return Answer(status=200, headers=(CONTENT_TYPE,), body=text.encode())
            case b"GET", "/engines":
                return self._office.engines()
            case b"GET", "/list_workers":
                return self._office.workers()
            case b"GET", "/v1/models":
                return await self._office.models(request)
            case b"POST", "/engines" | "/add_worker":
                return self._office.add(request)
            case b"POST", "/remove_worker":
                return await self._office.remove_named(request)
            case b"DELETE", path if path.startswith("/engines/"):
                return await self._office.remove(path.removeprefix("/engines/"), request)
            case _:
                return None

    async def _to_all(self, request: Request) -> Answer:
        if request.path == ABORT and (fields := request.json()) is not None:
            if fields.get("abort_all"):
                self._forward.aborts_of_all += 1  # nothing that was asked before this is to be tried again
                self.fleet.abort_waiting(None)
            elif rid := fields.get("rid"):
                self.fleet.abort_waiting(str(rid))
        return await self._broadcast(request)

    def _check(self, request: Request) -> None:
        """Whether the client may ask this.

        Without a key everyone on this machine may, so also every web page in a browser here; a browser says when it
        asks for a page, and pages are to change nothing.
        """
        if self._key is not None:
            if not hmac.compare_digest(request.header(b"authorization") or b"", self._key):
                raise Refused(401, "The router needs its key, as in the header Authorization: Bearer KEY.")
        elif request.path not in GENERATIONS and request.header(b"origin") is not None:
            raise Refused(403, "A web page may not steer engines through a router that has no key.")

    def _check_session(self, request: Request) -> None:
        if self._config.policy != "prefix":
            raise Refused(501, "A session lives on one engine, which only --policy prefix finds again.")
        if session_of(request) is None:
            raise Refused(400, "Name the session (session_id): its name decides which engine it lives on.")

    # -- in the background -----------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _sweep(self) -> None:
        for client in list(self._clients):
            client.sweep()
        for engine in self.fleet.engines.values():
            engine.pool.sweep()
        self._sweeper = self._clock.call_later(_SWEEP_SECONDS, self._sweep)


def raise_socket_limit(wanted: int) -> int:
    """Raise this process's limit of open files as far as it may be raised, to ``wanted`` at most; what it is then."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
