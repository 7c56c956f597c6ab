"""HTTP router: the listening socket and the table of endpoints."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

from miles.cluster.router.admin import AdminHandlers
from miles.cluster.router.broadcast import ABORT, BROADCASTS, Broadcaster
from miles.cluster.router.config import RouterConfig
from miles.cluster.router.engine_pool import RouterEnginePool
from miles.cluster.router.health_check import HealthChecker
from miles.cluster.router.http_server import ClientConnection
from miles.cluster.router.http_types import Clock, Header, HttpError, HttpRequest, HttpResponse, LoopClock
from miles.cluster.router.metrics import CONTENT_TYPE, RouterMetrics
from miles.cluster.router.proxy import RequestProxy
from miles.cluster.router.routing_key import extract_session_id

T = TypeVar("T")

# Answered by one engine without side effects, so that another engine may be tried.
SINGLE_ENGINE_PATHS = frozenset(
    (
        "/generate",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/encode",
        "/classify",
        "/v1/embeddings",
        "/v1/classify",
        "/v1/score",
        "/v1/rerank",
        "/rerank",
        "/tokenize",
        "/detokenize",
        "/v1/tokenize",
        "/v1/detokenize",
        "/parse_function_call",
        "/separate_reasoning",
        "/get_weights_by_name",
    )
)
SESSION_PATHS = frozenset(("/open_session", "/close_session"))
_UNAUTHENTICATED_PATHS = frozenset(("/health", "/metrics"))
_IDLE_CHECK_SECONDS = 2.0


class Router:
    """Serves until it is closed; ``log`` is called with a sentence whenever an engine changes its state."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        log: Callable[[str], None],
        key: str | None = None,
        engine_key: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        headers: tuple[Header, ...] = ((b"authorization", f"Bearer {engine_key}".encode()),) if engine_key else ()
        self._config = config
        self._log = log
        self._key = f"Bearer {key}".encode() if key else None
        self._clock = clock or LoopClock(asyncio.get_running_loop())
        self._clients: set[ClientConnection] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None
        self._idle_timer = self._clock.call_later(_IDLE_CHECK_SECONDS, self._close_idle)
        self.pool = RouterEnginePool(config, self._clock, log)
        self._proxy = RequestProxy(self.pool, config, self._clock, self._spawn, headers)
        self._health = HealthChecker(self.pool, config, self._clock, self._spawn, headers)
        self._broadcast = Broadcaster(self.pool, config, self._clock, self._health.check_now, headers)
        self._metrics = RouterMetrics(self.pool, self._proxy)
        self._admin = AdminHandlers(self.pool, config, self._clock, self._spawn, headers)

    async def start(self) -> int:
        """Listen and start health checks; returns the port."""
        for url in self._config.engine_urls:
            self.pool.add(url)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: ClientConnection(
                self._handle, self._authorize, self._clock, self._clients, self._config.max_payload_size
            ),
            self._config.host,
            self._config.port,
            backlog=4096,
        )
        return self._server.sockets[0].getsockname()[1]

    async def close(self, seconds: float = 0.0) -> None:
        """Stop accepting requests, wait at most ``seconds`` for those in flight, then close all connections."""
        assert self._server is not None
        self._server.close()
        for client in list(self._clients):
            client.close_when_idle()
        busy = [client.closed for client in self._clients]
        if busy and seconds > 0:
            waiting = asyncio.ensure_future(asyncio.wait(busy))
            timer = self._clock.call_later(seconds, waiting.cancel)
            await asyncio.gather(waiting, return_exceptions=True)
            timer.cancel()
        self._idle_timer.cancel()
        self._health.close()
        serving = [client.task for client in self._clients if client.task is not None]
        for client in list(self._clients):
            client.abort()
        for engine in self.pool.engines.values():
            engine.connections.close("the router is closing")
        tasks = [*self._tasks, *serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one request -------------------------------------------------------------------------------

    async def _handle(self, request: HttpRequest, client: ClientConnection) -> None:
        try:
            await self._route(request, client)
        except RecursionError as error:
            raise HttpError(400, "The body is nested too deeply.") from error
        except HttpError:
            raise
        except Exception as error:
            if client.response_started:
                raise
            name = type(error).__name__
            self._log(f"The router failed on {request.method.decode()} {request.path[:200]!a}: {name}: {error!a}.")
            raise HttpError(500, f"The router failed on this request ({name}); see its log.") from error

    async def _route(self, request: HttpRequest, client: ClientConnection) -> None:
        path, method = request.path, request.method
        self._authorize(request)
        if path in SINGLE_ENGINE_PATHS and method in (b"POST", b"PUT"):
            await self._proxy(request, client)
        elif path in BROADCASTS:
            client.send_response(await self._broadcast_request(request))
        elif (response := await self._handle_admin(request)) is not None:
            client.send_response(response)
        elif method == b"GET":
            await self._proxy(request, client)
        elif path in SESSION_PATHS and method == b"POST":
            self._check_session(request)
            await self._proxy(request, client, retry=False)
        elif method == b"OPTIONS":
            await self._proxy(request, client)
        else:
            name = method.decode()
            raise HttpError(
                404,
                f"The router does not know whether {name} {path} is for one engine or for all; send it to an engine.",
            )

    async def _handle_admin(self, request: HttpRequest) -> HttpResponse | None:
        """The router's own endpoints; None for any other."""
        match request.method, request.path:
            case b"GET", "/health":
                return self._admin.health()
            case b"GET", "/metrics":
                return HttpResponse(status=200, headers=(CONTENT_TYPE,), body=self._metrics.render())
            case b"GET", "/engines":
                return self._admin.engines()
            case b"GET", "/list_workers":
                return self._admin.workers()
            case b"GET", "/v1/models":
                return await self._admin.models(request)
            case b"POST", "/engines" | "/add_worker":
                return self._admin.add(request)
            case b"POST", "/remove_worker":
                return await self._admin.remove_worker(request)
            case b"DELETE", path if path.startswith("/engines/"):
                return await self._admin.remove(path.removeprefix("/engines/"), request)
            case _:
                return None

    async def _broadcast_request(self, request: HttpRequest) -> HttpResponse:
        if request.path == ABORT and (fields := request.json()) is not None:
            if fields.get("abort_all"):
                self._proxy.num_abort_all += 1  # no earlier request is retried
                self.pool.abort_waiting(None)
            elif rid := fields.get("rid"):
                self.pool.abort_waiting(str(rid))
        return await self._broadcast(request)

    def _authorize(self, request: HttpRequest) -> None:
        """Raise ``HttpError`` if the client may not make this request.

        Without a key every process on this machine may, so also every web page in a browser here; browsers send the
        headers Origin or Sec-Fetch-Site, and web pages may not control engines. A page whose name was rebound to this
        machine's address sends that name as Host.
        """
        if request.path in _UNAUTHENTICATED_PATHS:
            return
        if self._key is not None:
            if not hmac.compare_digest(request.header(b"authorization") or b"", self._key):
                raise HttpError(401, "The router needs its API key in the header Authorization: Bearer KEY.")
            return
        site = request.header(b"sec-fetch-site") or b"none"
        from_page = request.header(b"origin") is not None or site not in (b"none", b"same-origin")
        if request.path not in SINGLE_ENGINE_PATHS and from_page:
            raise HttpError(403, "A web page may not control engines through a router without an API key.")
        if not self._config.allow_unauthenticated and not _is_own_host(request.header(b"host")):
            raise HttpError(403, "A router without an API key is used by its address, or as localhost.")

    def _check_session(self, request: HttpRequest) -> None:
        if self._config.policy != "prefix":
            raise HttpError(501, "Sessions need --policy prefix, which sends all requests of a session to one engine.")
        if extract_session_id(request) is None:
            raise HttpError(400, "Set session_id: it decides which engine has the session.")

    # -- background tasks ------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _close_idle(self) -> None:
        self._idle_timer = self._clock.call_later(_IDLE_CHECK_SECONDS, self._close_idle)
        for client in list(self._clients):
            client.close_if_idle()
        for engine in self.pool.engines.values():
            engine.connections.close_idle()


def _is_own_host(host: bytes | None) -> bool:
    """Whether a Host header cannot be a name that was rebound to this machine; only browsers always send one."""
    if host is None:
        return True
    try:
        name = urlsplit(b"//" + host).hostname or b""
        return name == b"localhost" or bool(ip_address(name.decode()))
    except ValueError:
        return False


def raise_socket_limit(wanted: int) -> int:
    """Raise this process's limit of open files to ``wanted``, or as far as allowed; returns the new limit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
