"""Asking after the engines' health, in the background: one question to each at a time, timed by its state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from miles.cluster.route.clock import Clock
from miles.cluster.route.config import RouteConfig
from miles.cluster.route.engine import Engine, State
from miles.cluster.route.fleet import Fleet
from miles.cluster.route.message import Header
from miles.cluster.route.outbound import Broken, Question, TooLate, call

_MODEL_INFO = (b"/model_info", b"/get_model_info")


class Watch:
    """Probes every engine of the fleet until it is closed."""

    def __init__(
        self,
        fleet: Fleet,
        config: RouteConfig,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        engine_key: tuple[Header, ...],
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._clock = clock
        self._spawn = spawn
        self._key = engine_key
        self._closed = False
        fleet.on_change = self._changed

    def close(self) -> None:
        self._closed = True
        for engine in self._fleet.engines.values():
            if engine.timer is not None:
                engine.timer.cancel()

    def look(self, engine: Engine) -> None:
        """Ask an engine now instead of later, because what it serves may have changed."""
        self._schedule(engine, 0.0)

    def _changed(self, engine: Engine) -> None:
        """An engine has entered another state."""
        soon = engine.state is State.STARTING and engine.failed_in_a_row == 0
        self._schedule(engine, 0.0 if soon else self._config.health_check_interval_secs)

    def _schedule(self, engine: Engine, seconds: float) -> None:
        if engine.timer is not None:
            engine.timer.cancel()
            engine.timer = None
        if self._closed or engine.state is State.DRAINING or engine.probing:
            return
        if engine.state is State.QUARANTINED:
            seconds = max(0.0, engine.until - self._clock.now())
        engine.timer = self._clock.call_later(seconds, self._start, engine)

    def _start(self, engine: Engine) -> None:
        engine.timer, engine.probing = None, True
        self._spawn(self._probe(engine))

    async def _probe(self, engine: Engine) -> None:
        try:
            why = await self._ask(engine)
        except Broken as broken:
            self._ill(engine, str(broken), fatal=True)
        else:
            if why and not engine.quiet:
                self._ill(engine, why, fatal=False)
            else:
                self._well(engine)
        finally:
            engine.probing = False
            self._schedule(engine, self._config.health_check_interval_secs)

    async def _ask(self, engine: Engine) -> str:
        """Why the engine is not well, or an empty text; raises Broken when there is no connection.

        Notes what the engine serves.
        """
        seconds, endpoint = self._config.health_check_timeout_secs, self._config.health_check_endpoint.encode("latin-1")
        try:
            answer = await call(engine.pool, self._clock, seconds, Question(target=endpoint, headers=self._key))
            why = "" if answer.status == 200 else f"it answered {endpoint.decode()} with status {answer.status}"
            for target in _MODEL_INFO:
                answer = await call(engine.pool, self._clock, seconds, Question(target=target, headers=self._key))
                if answer.status == 200 and isinstance(told := answer.json(), dict):
                    version, path = told.get("weight_version"), told.get("model_path")
                    engine.weight_version = None if version is None else str(version)
                    engine.model_path = None if path is None else str(path)
                    break
        except TooLate as late:
            return f"its health was asked, and {late}"
        return why

    def _well(self, engine: Engine) -> None:
        if engine.state is State.QUARANTINED and self._clock.now() < engine.until:
            return  # a request has failed since the question was asked
        if engine.state in (State.HEALTHY, State.PROBATION):
            self._fleet.succeeded(engine)
        elif engine.state is not State.DRAINING:
            self._fleet.admit(engine)

    def _ill(self, engine: Engine, why: str, *, fatal: bool) -> None:
        again = engine.state in (State.QUARANTINED, State.OUTDATED)
        self._fleet.failed(engine, why, fatal=fatal)
        if again:
            self._fleet.quarantine(engine, why)
        elif engine.state is State.STARTING:
            engine.why = why
        if engine.state is State.QUARANTINED:
            self._fleet.rescue(engine)
