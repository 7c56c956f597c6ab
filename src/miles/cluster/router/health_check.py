"""Health checks of engines in the background: one at a time per engine, scheduled by its state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from miles.cluster.router.config import RouterConfig
from miles.cluster.router.engine_pool import RouterEnginePool
from miles.cluster.router.engine_state import EngineState, RoutedEngine
from miles.cluster.router.http_client import ConnectionFailed, DeadlineExceeded, EngineRequest, send_request
from miles.cluster.router.http_types import Clock, Header, HttpResponse

_MODEL_INFO = (b"/model_info", b"/get_model_info")


class HealthChecker:
    """Checks every engine of the pool until it is closed."""

    def __init__(
        self,
        pool: RouterEnginePool,
        config: RouterConfig,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        engine_key: tuple[Header, ...],
    ) -> None:
        self._pool = pool
        self._config = config
        self._clock = clock
        self._spawn = spawn
        self._key = engine_key
        self._closed = False
        pool.on_change = self._on_change

    def close(self) -> None:
        self._closed = True
        for engine in self._pool.engines.values():
            if engine.timer is not None:
                engine.timer.cancel()

    def check_now(self, engine: RoutedEngine) -> None:
        """Check an engine at once, because its weights may have changed."""
        self._schedule(engine, 0.0)

    def _on_change(self, engine: RoutedEngine) -> None:
        at_once = engine.state is EngineState.STARTING and engine.consecutive_failures == 0
        self._schedule(engine, 0.0 if at_once else self._config.health_check_interval_secs)

    def _schedule(self, engine: RoutedEngine, seconds: float) -> None:
        if engine.timer is not None:
            engine.timer.cancel()
            engine.timer = None
        if self._closed or engine.state is EngineState.DRAINING or engine.probing:
            return
        if engine.state is EngineState.QUARANTINED:
            seconds = max(0.0, engine.quarantined_until - self._clock.now())
        engine.timer = self._clock.call_later(seconds, self._start_check, engine)

    def _start_check(self, engine: RoutedEngine) -> None:
        engine.timer = None
        engine.probing = True
        self._spawn(self._check(engine))

    async def _check(self, engine: RoutedEngine) -> None:
        try:
            why = await self._probe(engine)
        except ConnectionFailed as error:
            self._record_failure(engine, str(error), fatal=True)
        else:
            if why and not engine.suspended:
                self._record_failure(engine, why, fatal=False)
            else:
                self._record_success(engine)
        finally:
            engine.probing = False
            self._schedule(engine, self._config.health_check_interval_secs)

    async def _probe(self, engine: RoutedEngine) -> str:
        """Why the engine is not healthy, or an empty string; raises ``ConnectionFailed``.

        Also reads the model and the weight version of the engine.
        """
        endpoint = self._config.health_check_endpoint.encode("latin-1")
        try:
            response = await self._get(engine, endpoint)
            why = "" if response.status == 200 else f"it answered {endpoint.decode()} with status {response.status}"
            for target in _MODEL_INFO:
                response = await self._get(engine, target)
                if response.status == 200 and isinstance(info := response.json(), dict):
                    version, path = info.get("weight_version"), info.get("model_path")
                    engine.weight_version = None if version is None else str(version)
                    engine.model_path = None if path is None else str(path)
                    break
        except DeadlineExceeded as error:
            return f"its health was checked, and {error}"
        return why

    async def _get(self, engine: RoutedEngine, target: bytes) -> HttpResponse:
        seconds = self._config.health_check_timeout_secs
        return await send_request(
            engine.connections, self._clock, seconds, EngineRequest(target=target, headers=self._key)
        )

    def _record_success(self, engine: RoutedEngine) -> None:
        if engine.state is EngineState.QUARANTINED and self._clock.now() < engine.quarantined_until:
            return  # a request has failed since the check was started
        if engine.state in (EngineState.HEALTHY, EngineState.PROBATION):
            self._pool.record_success(engine)
        elif engine.state is not EngineState.DRAINING:
            self._pool.admit(engine)

    def _record_failure(self, engine: RoutedEngine, why: str, *, fatal: bool) -> None:
        out_of_service = engine.state in (EngineState.QUARANTINED, EngineState.OUTDATED)
        self._pool.record_failure(engine, why, fatal=fatal)
        if out_of_service:
            self._pool.quarantine(engine, why)
        elif engine.state is EngineState.STARTING:
            engine.why = why
        if engine.state is EngineState.QUARANTINED:
            self._pool.retry_unanswered(engine)
