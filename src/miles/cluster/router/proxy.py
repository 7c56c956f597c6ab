"""Proxy of a request for one engine: forward it, stream the response back, and retry on another engine if safe.

It is safe until the first byte of a response has been sent to the client: generation has no other effect. The request
is sent again byte for byte, including its rid; the engine that had it gets an abort of that rid first.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from miles.cluster.router.config import RouterConfig
from miles.cluster.router.engine_pool import RouterEnginePool
from miles.cluster.router.engine_state import RoutedEngine
from miles.cluster.router.http_client import (
    ConnectionFailed,
    DeadlineExceeded,
    EngineConnection,
    EngineRequest,
    send_request,
)
from miles.cluster.router.http_server import ClientConnection
from miles.cluster.router.http_types import (
    JSON_CONTENT_TYPE,
    Clock,
    Header,
    HttpError,
    HttpRequest,
    end_to_end_headers,
    replace_authorization,
    request_head,
)
from miles.cluster.router.routing_key import RoutingKey, estimate_work, extract_rids, extract_routing_key

# Statuses on which another engine is tried; of these, those of an engine that is unhealthy rather than busy.
_RETRY_STATUSES = frozenset((429, 500, 502, 503, 504))
_FAILURE_STATUSES = frozenset((500, 502, 504))
_ABORT_SECONDS = 5.0

SpawnTask = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCallFailure:
    """Why a call to an engine did not end in a response.

    ``sent``: the engine may still be working on it. ``recorded``: the pool knows of the failure already, or it is none
    of the engine's. ``final``: no time is left for another call. ``response_status``: that of the response, if any.
    """

    message: str
    status: int = 502
    fatal: bool = False
    sent: bool = True
    final: bool = False
    recorded: bool = False
    response_status: int = 0


class RequestRoutingInfo:
    """Implements ``RoutingInfo`` for an HTTP request."""

    __slots__ = ("_prefix_tokens", "_request", "work")

    def __init__(self, request: HttpRequest, prefix_tokens: int) -> None:
        self._request = request
        self._prefix_tokens = prefix_tokens
        self.work = estimate_work(request.body) if request.body else 1

    def key(self) -> RoutingKey:
        return extract_routing_key(self._request, self._prefix_tokens)

    def rids(self) -> list[str]:
        return extract_rids(self._request) if self._request.body else []


class EngineCall:
    """One call to one engine. ``done`` becomes None when the client has the whole response, else the failure."""

    def __init__(
        self,
        proxied: ProxiedRequest,
        engine: RoutedEngine,
        clock: Clock,
        *,
        first_byte_timeout: float,
        may_retry: Callable[[], bool],
    ) -> None:
        self.done: asyncio.Future[EngineCallFailure | None] = asyncio.get_running_loop().create_future()
        self.connection: EngineConnection | None = None
        self.status = 0
        self._complete = False
        self._may_retry = may_retry
        self._client = proxied.client
        self._engine = engine
        self._clock = clock
        self._deadline = proxied.deadline
        self._first_byte_timeout = max(0.0, min(first_byte_timeout, proxied.deadline - clock.now()))
        self._extra_headers: list[Header] = [engine.header]
        if proxied.calls > 1:
            self._extra_headers.append((b"x-miles-attempts", b"%d" % proxied.calls))
        self._timer = clock.call_later(self._first_byte_timeout, self._on_timeout)
        engine.retry_callbacks.add(self.give_up)

    def give_up(self) -> None:
        """Give up an engine that has not begun to respond."""
        if self.status == 0:
            self._fail(EngineCallFailure(message=f"it was given up, because {self._engine.why}", recorded=True))

    def close(self) -> None:
        """Stop the call; what the engine still sends is not forwarded."""
        self._timer.cancel()
        self._engine.retry_callbacks.discard(self.give_up)
        if self.connection is not None and not self._complete:
            self.connection.drop()

    # -- ResponseHandler ---------------------------------------------------------------------------

    def on_head(self, status: int, headers: list[Header], length: int | None) -> None:
        assert self.connection is not None
        self.status = status
        if status in _RETRY_STATUSES and self._may_retry():
            self._fail(
                EngineCallFailure(message=f"it answered with status {status}", response_status=status, sent=False)
            )
            return
        self._client.start_response(status, end_to_end_headers(headers) + self._extra_headers, length, self.connection)

    def on_body(self, data: bytes) -> None:
        self._client.write(data)

    def flush(self) -> None:
        if self.status and not self.done.done():
            self._client.flush()

    def on_end(self) -> None:
        if not self.done.done():
            self._complete = True
            self._client.end_response()
            self.done.set_result(None)

    def on_failure(self, error: Exception) -> None:
        # A stale connection was perhaps closed while it was idle, which is no failure of the engine.
        stale = isinstance(error, ConnectionFailed) and error.stale
        self._fail(EngineCallFailure(message=str(error), fatal=True, recorded=stale))

    def _on_timeout(self) -> None:
        left = self._deadline - self._clock.now()
        if left <= 0:
            message = "the request took longer than --request-timeout-secs allows"
            self._fail(EngineCallFailure(message=message, status=504, final=True, recorded=True))
        elif self.status:
            self._timer = self._clock.call_later(left, self._on_timeout)
        else:
            message = f"it did not begin to respond within {self._first_byte_timeout:g} seconds"
            self._fail(EngineCallFailure(message=message, status=504))

    def _fail(self, failure: EngineCallFailure) -> None:
        if not self.done.done():
            self.done.set_result(failure)
            self.close()


@dataclass(slots=True, kw_only=True)
class ProxiedRequest:
    """A request, its client, and the calls made so far and left.

    ``error_responses`` are those of status 500 and the like: a failure of the engine only if another one succeeds.
    """

    request: HttpRequest
    client: ClientConnection
    info: RequestRoutingInfo
    deadline: float
    retries_left: int
    calls: int = 0
    avoid: frozenset[str] = frozenset()
    error_responses: list[tuple[RoutedEngine, int]] = field(default_factory=list)


class RequestProxy:
    """Forwards requests to engines."""

    def __init__(
        self,
        pool: RouterEnginePool,
        config: RouterConfig,
        clock: Clock,
        spawn: SpawnTask,
        engine_key: tuple[Header, ...],
    ) -> None:
        self.retries = 0
        self.num_abort_all = 0
        self._pool = pool
        self._config = config
        self._clock = clock
        self._spawn = spawn
        self._engine_key = engine_key

    async def __call__(self, request: HttpRequest, client: ClientConnection, *, retry: bool = True) -> None:
        """Have one engine respond to a request; without ``retry`` it is sent once at most."""
        proxied = ProxiedRequest(
            request=request,
            client=client,
            info=RequestRoutingInfo(request, self._config.prefix_tokens),
            deadline=self._clock.now() + self._config.request_timeout_secs,
            retries_left=self._config.max_retries if retry else 0,
        )
        abort_all_before = self.num_abort_all
        aborting: dict[str, asyncio.Task[None]] = {}
        while True:
            engine = None if self._pool.waiting else self._pool.pick(proxied.info, proxied.avoid)
            if engine is None:
                engine = await self._pool.wait(proxied.info, proxied.avoid, proxied.deadline - self._clock.now())
            started = self._clock.now()
            try:
                if engine.name in aborting:  # else its abort could hit this call
                    await aborting.pop(engine.name)
                failure = await self._call_engine(engine, proxied)
            except asyncio.CancelledError:
                self._abort(engine, request)
                raise
            finally:
                self._pool.release(engine, proxied.info, self._clock.now() - started)
            if failure is None:
                return
            task = self._abort(engine, request) if failure.sent else None
            if client.response_started:
                client.abort()
                return
            if self.num_abort_all != abort_all_before:
                raise HttpError(503, "The request was aborted before it was retried.")
            if proxied.retries_left == 0 or failure.final:
                raise HttpError(failure.status, f"Engine {engine.name} did not answer: {failure.message}.")
            if task is not None:
                aborting[engine.name] = task
            proxied.retries_left -= 1
            proxied.avoid |= {engine.name}
            engine.retried += 1
            self.retries += 1

    async def _call_engine(self, engine: RoutedEngine, proxied: ProxiedRequest) -> EngineCallFailure | None:
        """Call the engine once, on an open connection or on a new one; its result is recorded in the pool."""
        proxied.calls += 1
        head = self._build_head(engine, proxied.request)
        avoid = proxied.avoid | {engine.name}
        call = EngineCall(
            proxied,
            engine,
            self._clock,
            first_byte_timeout=self._config.first_byte_timeout_secs,
            may_retry=lambda: proxied.retries_left > 0 and self._pool.has_other(avoid),
        )
        try:
            # An engine may close an idle connection just when it is used, so the last call uses a new one.
            connection = engine.connections.take_idle() if proxied.retries_left else None
            call.connection = connection or await engine.connections.connect()
            if not call.done.done():  # no timeout or retry meanwhile
                call.connection.send(head, proxied.request.body, call)
            failure = await call.done
        except ConnectionFailed as error:
            failure = EngineCallFailure(message=str(error), fatal=True, sent=False)
        finally:
            call.close()
        self._record(engine, call.status, failure, proxied)
        return failure

    def _record(
        self, engine: RoutedEngine, status: int, failure: EngineCallFailure | None, proxied: ProxiedRequest
    ) -> None:
        response_status = status if failure is None else failure.response_status
        if response_status in _FAILURE_STATUSES:
            proxied.error_responses.append((engine, response_status))
        elif failure is None or response_status:
            self._pool.record_success(engine)
            if response_status < 300:
                for other, other_status in proxied.error_responses:
                    self._pool.record_failure(other, f"it answered with status {other_status}", responds=True)
        elif not failure.recorded:
            self._pool.record_failure(engine, failure.message, fatal=failure.fatal)

    def _build_head(self, engine: RoutedEngine, request: HttpRequest) -> bytes:
        headers = replace_authorization(end_to_end_headers(request.headers), self._engine_key)
        address = engine.connections.address
        target = address.prefix + request.target
        return request_head(request.method, target, address.authority, headers, len(request.body))

    def _abort(self, engine: RoutedEngine, request: HttpRequest) -> asyncio.Task[None] | None:
        """Have an engine abort a request that has rids."""
        rids = extract_rids(request) if request.body else []
        return self._spawn(self._abort_rids(engine, request, rids)) if rids else None

    async def _abort_rids(self, engine: RoutedEngine, request: HttpRequest, rids: list[str]) -> None:
        key = self._engine_key or tuple(header for header in request.headers if header[0] == b"authorization")
        for rid in rids:
            body = json.dumps({"rid": rid}).encode()
            abort = EngineRequest(
                method=b"POST", target=b"/abort_request", headers=(JSON_CONTENT_TYPE, *key), body=body
            )
            try:
                await send_request(engine.connections, self._clock, _ABORT_SECONDS, abort)
            except (ConnectionFailed, DeadlineExceeded):
                return  # the health check finds out whether it is unhealthy
