"""What the router answers itself: its health, its engines, and which models they have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from miles.cluster.route.clock import Clock
from miles.cluster.route.config import RouteConfig
from miles.cluster.route.engine import Engine, State
from miles.cluster.route.fleet import Fleet
from miles.cluster.route.message import Answer, Header, Refused, Request, json_answer
from miles.cluster.route.outbound import Broken, Question, TooLate, call


class Office:
    """Engines join, leave and are listed here."""

    def __init__(
        self,
        fleet: Fleet,
        config: RouteConfig,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, int]], asyncio.Task[int]],
        engine_key: tuple[Header, ...],
    ) -> None:
        self._fleet = fleet
        self._spawn = spawn
        self._config = config
        self._clock = clock
        self._key = engine_key
        self._leaving: dict[str, asyncio.Task[int]] = {}
        self._emptied: dict[str, asyncio.Future[None]] = {}
        fleet.on_empty = self._empty

    # -- reading ---------------------------------------------------------------------------------

    def health(self) -> Answer:
        """Well when an engine serves."""
        serving, known = len(self._fleet.serving()), len(self._fleet.engines)
        return json_answer(200 if serving else 503, {"serving": serving, "engines": known})

    def engines(self) -> Answer:
        return json_answer(
            200,
            {
                "policy": self._config.policy,
                "outstanding": self._fleet.outstanding,
                "waiting": len(self._fleet.waiting),
                "engines": [self._facts(engine) for engine in self._fleet.engines.values()],
            },
        )

    def _facts(self, engine: Engine) -> dict[str, Any]:
        left = max(0.0, engine.until - self._clock.now()) if engine.state is State.QUARANTINED else 0.0
        return {**engine.facts(), "quarantine_left": round(left, 3)}

    def workers(self) -> Answer:
        """As SGLang's router lists them."""
        return json_answer(200, {"urls": [engine.url for engine in self._fleet.engines.values()]})

    async def models(self, request: Request) -> Answer:
        """Every model of every engine that serves, once."""
        engines = self._fleet.serving()
        if not engines:
            raise Refused(503, "No engine serves, so none can be asked which models it has.")
        key = self._key or tuple(header for header in request.headers if header[0] == b"authorization")
        answers = await asyncio.gather(*(self._ask_models(engine, key) for engine in engines))
        found: dict[str, Any] = {}
        for models in answers:
            for model in models or ():
                found.setdefault(str(model.get("id")), model)
        if all(models is None for models in answers):
            raise Refused(502, "No engine said which models it has; GET /engines tells how they are.")
        return json_answer(200, {"object": "list", "data": list(found.values())})

    async def _ask_models(self, engine: Engine, key: tuple[Header, ...]) -> list[dict[str, Any]] | None:
        try:
            seconds = self._config.health_check_timeout_secs
            answer = await call(engine.pool, self._clock, seconds, Question(target=b"/v1/models", headers=key))
        except (Broken, TooLate):
            return None
        told = answer.json()
        if answer.status != 200 or not isinstance(told, dict) or not isinstance(told.get("data"), list):
            return None
        return [model for model in told["data"] if isinstance(model, dict)]

    # -- joining and leaving ------------------------------------------------------------------------

    def add(self, request: Request) -> Answer:
        """``url`` and perhaps ``ranks`` in the body, or ``url`` in the query."""
        fields = request.json() or {}
        url, ranks = fields.get("url") or request.asked("url"), fields.get("ranks")
        if not isinstance(url, str):
            raise Refused(400, 'Say which engine to add, as in {"url": "http://127.0.0.1:30000"}.')
        if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
            raise Refused(400, "ranks must be a whole number, at least 1: how many ranks the engine has in a group.")
        return json_answer(201, self._facts(self._fleet.add(url, ranks=ranks)))

    async def remove_named(self, request: Request) -> Answer:
        """As SGLang's router does it: ``url`` in the query or the body."""
        url = request.asked("url") or (request.json() or {}).get("url")
        if not isinstance(url, str):
            raise Refused(400, "Say which engine to remove, as in /remove_worker?url=http://127.0.0.1:30000.")
        return await self.remove(url, request)

    async def remove(self, name: str, request: Request) -> Answer:
        """Give an engine nothing more, wait until it has finished what it has, then forget it."""
        engine, seconds = self._fleet.find(name), self._seconds(request)
        leaving = self._leaving.get(engine.id)
        if leaving is None:
            leaving = self._leaving[engine.id] = self._spawn(self._leave(engine, seconds))
        cut = await asyncio.shield(leaving)  # who asked may go away meanwhile: the engine leaves all the same
        return json_answer(200, {"removed": engine.id, "cut": cut})

    async def _leave(self, engine: Engine, seconds: float) -> int:
        """How many requests had not ended when there was no more time."""
        self._fleet.drain(engine)
        try:
            if engine.outstanding:
                emptied = self._emptied[engine.id] = asyncio.get_running_loop().create_future()
                timer = self._clock.call_later(seconds, self._empty, engine)
                try:
                    await emptied
                finally:
                    timer.cancel()
            cut = engine.outstanding
            self._fleet.remove(engine)
            return cut
        finally:
            self._emptied.pop(engine.id, None)
            del self._leaving[engine.id]

    def _empty(self, engine: Engine) -> None:
        emptied = self._emptied.get(engine.id)
        if emptied is not None and not emptied.done():
            emptied.set_result(None)

    def _seconds(self, request: Request) -> float:
        given = request.asked("timeout")
        try:
            return self._config.drain_timeout_secs if given is None else max(0.0, float(given))
        except ValueError:
            raise Refused(400, f"timeout must be a number of seconds, not {given}.") from None
