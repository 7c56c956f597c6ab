"""Requests for every engine: sent to all at once, answered with what each said, and with 502 if one did not do it.

All means all: engines in quarantine too, because one that misses new weights must not serve again with the old.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles.cluster.route.clock import Clock
from miles.cluster.route.config import RouteConfig
from miles.cluster.route.engine import Engine, State
from miles.cluster.route.fleet import Fleet
from miles.cluster.route.message import Answer, Header, Refused, Request, json_answer, passed_on
from miles.cluster.route.outbound import Broken, Question, TooLate, call

WEIGHTS = frozenset(
    (
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weight_version",
        "/load_lora_adapter",
        "/load_lora_adapter_from_tensors",
        "/unload_lora_adapter",
    )
)
JOIN = "/init_weights_update_group"
ABORT = "/abort_request"
_WHOLE = "/update_weights_from_disk"  # leaves nothing of what an engine may have missed before
_QUIET = {"/pause_generation": "pause", "/release_memory_occupation": "sleep"}
_AWAKE = {"/continue_generation": "pause", "/resume_memory_occupation": "sleep"}
BROADCASTS = frozenset(
    (
        *WEIGHTS,
        *_QUIET,
        *_AWAKE,
        JOIN,
        ABORT,
        "/destroy_weights_update_group",
        "/flush_cache",
        "/weights_checker",
        "/set_internal_state",
        "/start_profile",
        "/stop_profile",
        "/slow_down",
        "/get_load",
        "/v1/loads",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What came back from one engine: its answer, or why there is none."""

    answer: Answer | None
    why: str

    @property
    def ok(self) -> bool:
        return not self.why


class Broadcaster:
    """Sends to all engines; one broadcast at a time, so that all engines see the same order. Aborts do not queue."""

    def __init__(
        self,
        fleet: Fleet,
        config: RouteConfig,
        clock: Clock,
        look: Callable[[Engine], None],
        engine_key: tuple[Header, ...],
    ) -> None:
        self._fleet = fleet
        self._look = look
        self._config = config
        self._clock = clock
        self._key = engine_key
        self._order = asyncio.Lock()

    async def __call__(self, request: Request) -> Answer:
        """The answer to the client."""
        if not self._fleet.engines:
            raise Refused(503, "The router has no engines (POST /engines adds one).")
        if request.path == ABORT:
            return self._summary(request, await self._send_all(request, {}))
        async with self._order:
            bodies = await self._group_bodies(request) if request.path == JOIN else {}
            said = await self._send_all(request, bodies)
            self._note(request.path, said)
            return self._summary(request, said)

    async def _send_all(self, request: Request, bodies: dict[str, bytes]) -> dict[str, Said]:
        engines = list(self._fleet.engines.values())
        answers = await asyncio.gather(
            *(self._send(engine, request, bodies.get(engine.id, request.body)) for engine in engines)
        )
        return dict(zip((engine.id for engine in engines), answers, strict=True))

    async def _send(self, engine: Engine, request: Request, body: bytes) -> Said:
        headers = passed_on(request.headers)
        if self._key:
            headers = [*(header for header in headers if header[0] != b"authorization"), *self._key]
        question = Question(method=request.method, target=request.target, headers=tuple(headers), body=body)
        seconds = self._config.broadcast_timeout_secs
        try:
            answer = await call(engine.pool, self._clock, seconds, question)
        except (Broken, TooLate) as error:
            return Said(answer=None, why=str(error))
        told = answer.json()
        if answer.status >= 300:
            return Said(answer=answer, why=f"status {answer.status}: {answer.text()}")
        if isinstance(told, dict) and told.get("success") is False:  # SGLang says so with status 200 in places
            return Said(answer=answer, why=str(told.get("message") or "it answered success: false"))
        return Said(answer=answer, why="")

    # -- ranks ------------------------------------------------------------------------------------

    async def _group_bodies(self, request: Request) -> dict[str, bytes]:
        """Each engine joins a process group with ranks of its own, in the order of ``GET /engines``."""
        fields = request.json()
        first = fields.get("rank_offset") if fields is not None else None
        size = fields.get("world_size") if fields is not None else None
        if fields is None or not isinstance(first, int) or not isinstance(size, int):
            raise Refused(400, f"{JOIN} needs a JSON object with the whole numbers rank_offset and world_size.")
        engines = list(self._fleet.engines.values())
        for engine, ranks in zip(engines, await asyncio.gather(*map(self._ranks_of, engines)), strict=True):
            engine.ranks = ranks
        bodies: dict[str, bytes] = {}
        offset = first
        for engine in engines:
            bodies[engine.id] = json.dumps({**fields, "rank_offset": offset}).encode()
            offset += engine.ranks or 1
        if offset > size:
            raise Refused(
                400,
                f"world_size is {size}, but the {len(engines)} engines have {offset - first} ranks, "
                f"which with rank_offset {first} makes {offset}; the group would wait for ever.",
            )
        return bodies

    async def _ranks_of(self, engine: Engine) -> int:
        if engine.ranks is not None:
            return engine.ranks
        seconds = self._config.health_check_timeout_secs
        for target in (b"/server_info", b"/get_server_info"):
            try:
                answer = await call(engine.pool, self._clock, seconds, Question(target=target, headers=self._key))
            except (Broken, TooLate) as error:
                raise Refused(502, f"How many ranks {engine} has could not be asked: {error}.") from None
            told = answer.json()
            if answer.status == 200 and isinstance(told, dict) and isinstance(ranks := told.get("tp_size"), int):
                return ranks
        raise Refused(
            502, f"{engine} does not say its tp_size; add it again with its ranks, as in POST /engines with ranks: 2."
        )

    # -- what is remembered, and what is answered ---------------------------------------------------

    def _note(self, path: str, said: dict[str, Said]) -> None:
        for name, each in said.items():
            engine = self._fleet.engines.get(name)
            if engine is None:
                continue
            if each.ok:
                self._did(engine, path)
            elif path in WEIGHTS and any(other.ok for other in said.values()):
                mend = f"give it whole weights with {_WHOLE}, or add it again when it has them"
                engine.missed = f"it missed {path} ({each.why}); {mend}"
                if engine.state is not State.DRAINING:
                    self._fleet.quarantine(engine, engine.missed)

    def _did(self, engine: Engine, path: str) -> None:
        if path in _QUIET:
            engine.quiet.add(_QUIET[path])
        elif path in _AWAKE:
            engine.quiet.discard(_AWAKE[path])
        elif path in WEIGHTS:
            if path == _WHOLE:
                engine.missed = None
            self._look(engine)

    def _summary(self, request: Request, said: dict[str, Said]) -> Answer:
        failed = {name: each.why for name, each in said.items() if not each.ok}
        engines: dict[str, Any] = {
            name: {
                "success": each.ok,
                "status": each.answer.status if each.answer is not None else None,
                "message": each.why,
                "body": (each.answer.json() if each.answer.json() is not None else each.answer.text())
                if each.answer is not None
                else None,
            }
            for name, each in said.items()
        }
        if failed:
            reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
            message = f"{len(failed)} of {len(said)} engines did not do {request.path}: {reasons}"
        else:
            message = f"{len(said)} engines did {request.path}."
        return json_answer(502 if failed else 200, {"success": not failed, "message": message, "engines": engines})
