"""Admin endpoints of the router: its health, its engines, and their models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from miles.cluster.router.config import RouterConfig
from miles.cluster.router.engine_pool import RouterEnginePool
from miles.cluster.router.engine_state import EngineState, RoutedEngine
from miles.cluster.router.http_client import ConnectionFailed, DeadlineExceeded, EngineRequest, send_request
from miles.cluster.router.http_types import Clock, Header, HttpError, HttpRequest, HttpResponse, json_response


class AdminHandlers:
    """Adds, removes and lists engines."""

    def __init__(
        self,
        pool: RouterEnginePool,
        config: RouterConfig,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, int]], asyncio.Task[int]],
        engine_key: tuple[Header, ...],
    ) -> None:
        self._pool = pool
        self._spawn = spawn
        self._config = config
        self._clock = clock
        self._key = engine_key
        self._removals: dict[str, asyncio.Task[int]] = {}
        self._idle: dict[str, asyncio.Future[None]] = {}
        pool.on_idle = self._set_idle

    # -- reading ---------------------------------------------------------------------------------

    def health(self) -> HttpResponse:
        """Healthy if an engine serves."""
        serving, known = len(self._pool.serving()), len(self._pool.engines)
        return json_response(200 if serving else 503, {"serving": serving, "engines": known})

    def engines(self) -> HttpResponse:
        return json_response(
            200,
            {
                "policy": self._config.policy,
                "outstanding": self._pool.outstanding,
                "waiting": len(self._pool.waiting),
                "engines": [self._describe(engine) for engine in self._pool.engines.values()],
            },
        )

    def _describe(self, engine: RoutedEngine) -> dict[str, Any]:
        left = (
            max(0.0, engine.quarantined_until - self._clock.now()) if engine.state is EngineState.QUARANTINED else 0.0
        )
        return {**engine.describe(), "quarantine_left": round(left, 3)}

    def workers(self) -> HttpResponse:
        """The list in the format of SGLang's router."""
        return json_response(200, {"urls": [engine.url for engine in self._pool.engines.values()]})

    async def models(self, request: HttpRequest) -> HttpResponse:
        """The models of all serving engines, each once."""
        engines = self._pool.serving()
        if not engines:
            raise HttpError(503, "No engine serves, so the models are unknown.")
        key = self._key or tuple(header for header in request.headers if header[0] == b"authorization")
        lists = await asyncio.gather(*(self._fetch_models(engine, key) for engine in engines))
        by_id: dict[str, Any] = {}
        for models in lists:
            for model in models or ():
                by_id.setdefault(str(model.get("id")), model)
        if all(models is None for models in lists):
            raise HttpError(502, "No engine reported its models; GET /engines shows their states.")
        return json_response(200, {"object": "list", "data": list(by_id.values())})

    async def _fetch_models(self, engine: RoutedEngine, key: tuple[Header, ...]) -> list[dict[str, Any]] | None:
        try:
            seconds = self._config.health_check_timeout_secs
            response = await send_request(
                engine.connections, self._clock, seconds, EngineRequest(target=b"/v1/models", headers=key)
            )
        except (ConnectionFailed, DeadlineExceeded):
            return None
        body = response.json()
        if response.status != 200 or not isinstance(body, dict) or not isinstance(body.get("data"), list):
            return None
        return [model for model in body["data"] if isinstance(model, dict)]

    # -- adding and removing ------------------------------------------------------------------------

    def add(self, request: HttpRequest) -> HttpResponse:
        """Add an engine: ``url`` and optionally ``ranks`` in the body, or ``url`` in the query."""
        fields = request.json() or {}
        url, ranks = fields.get("url") or request.query_value("url"), fields.get("ranks")
        if not isinstance(url, str):
            raise HttpError(400, 'Name the engine to add, for example {"url": "http://127.0.0.1:30000"}.')
        if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
            raise HttpError(
                400, "ranks must be an integer of at least 1: the number of ranks of the engine in a process group."
            )
        return json_response(201, self._describe(self._pool.add(url, ranks=ranks)))

    async def remove_worker(self, request: HttpRequest) -> HttpResponse:
        """The endpoint of SGLang's router: ``url`` in the query or the body."""
        url = request.query_value("url") or (request.json() or {}).get("url")
        if not isinstance(url, str):
            raise HttpError(400, "Name the engine to remove, for example /remove_worker?url=http://127.0.0.1:30000.")
        return await self.remove(url, request)

    async def remove(self, name: str, request: HttpRequest) -> HttpResponse:
        """Drain an engine, then remove it."""
        engine = self._pool.find(name)
        seconds = self._drain_timeout(request)
        removal = self._removals.get(engine.name)
        if removal is None:
            removal = self._removals[engine.name] = self._spawn(self._drain_and_remove(engine, seconds))
        aborted = await asyncio.shield(removal)  # it continues if the client disconnects
        return json_response(200, {"removed": engine.name, "cut": aborted})

    async def _drain_and_remove(self, engine: RoutedEngine, seconds: float) -> int:
        """Returns how many requests were aborted at the timeout."""
        self._pool.drain(engine)
        try:
            if engine.outstanding:
                idle = self._idle[engine.name] = asyncio.get_running_loop().create_future()
                timer = self._clock.call_later(seconds, self._set_idle, engine)
                try:
                    await idle
                finally:
                    timer.cancel()
            aborted = engine.outstanding
            self._pool.remove(engine)
            return aborted
        finally:
            self._idle.pop(engine.name, None)
            del self._removals[engine.name]

    def _set_idle(self, engine: RoutedEngine) -> None:
        idle = self._idle.get(engine.name)
        if idle is not None and not idle.done():
            idle.set_result(None)

    def _drain_timeout(self, request: HttpRequest) -> float:
        text = request.query_value("timeout")
        try:
            return self._config.drain_timeout_secs if text is None else max(0.0, float(text))
        except ValueError:
            raise HttpError(400, f"timeout must be a number of seconds, not {text}.") from None
