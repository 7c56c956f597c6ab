"""Broadcast of requests to every engine at once; the response has that of each, and status 502 if one failed.

Engines in quarantine are included, because one that misses a weight update must not serve again with old weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles.cluster.router.config import RouterConfig
from miles.cluster.router.engine_pool import RouterEnginePool
from miles.cluster.router.engine_state import EngineState, RoutedEngine
from miles.cluster.router.http_client import ConnectionFailed, DeadlineExceeded, EngineRequest, send_request
from miles.cluster.router.http_types import (
    Clock,
    Header,
    HttpError,
    HttpRequest,
    HttpResponse,
    end_to_end_headers,
    json_response,
    replace_authorization,
)

WEIGHT_UPDATES = frozenset(
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
INIT_GROUP = "/init_weights_update_group"
ABORT = "/abort_request"
_FULL_UPDATE = "/update_weights_from_disk"  # replaces all weights, so that no missed update matters
_SUSPENDING = {"/pause_generation": "pause", "/release_memory_occupation": "sleep"}
_RESUMING = {"/continue_generation": "pause", "/resume_memory_occupation": "sleep"}
BROADCASTS = frozenset(
    (
        *WEIGHT_UPDATES,
        *_SUSPENDING,
        *_RESUMING,
        INIT_GROUP,
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
class BroadcastReply:
    """The response of one engine, or why it failed."""

    response: HttpResponse | None
    why: str

    @property
    def ok(self) -> bool:
        return not self.why


class Broadcaster:
    """Sends to all engines; one broadcast at a time, so that all engines see the same order. Aborts do not queue."""

    def __init__(
        self,
        pool: RouterEnginePool,
        config: RouterConfig,
        clock: Clock,
        check_now: Callable[[RoutedEngine], None],
        engine_key: tuple[Header, ...],
    ) -> None:
        self._pool = pool
        self._check_now = check_now
        self._config = config
        self._clock = clock
        self._key = engine_key
        self._lock = asyncio.Lock()

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        """Broadcast a request; returns the response to the client."""
        if not self._pool.engines:
            raise HttpError(503, "The router has no engines (POST /engines adds one).")
        if request.path == ABORT:
            return self._summarize(request, await self._send_all(request, {}))
        async with self._lock:
            bodies = await self._group_bodies(request) if request.path == INIT_GROUP else {}
            replies = await self._send_all(request, bodies)
            self._record(request.path, replies)
            return self._summarize(request, replies)

    async def _send_all(self, request: HttpRequest, bodies: dict[str, bytes]) -> dict[str, BroadcastReply]:
        engines = list(self._pool.engines.values())
        replies = await asyncio.gather(
            *(self._send(engine, request, bodies.get(engine.name, request.body)) for engine in engines)
        )
        return dict(zip((engine.name for engine in engines), replies, strict=True))

    async def _send(self, engine: RoutedEngine, request: HttpRequest, body: bytes) -> BroadcastReply:
        headers = replace_authorization(end_to_end_headers(request.headers), self._key)
        forwarded = EngineRequest(method=request.method, target=request.target, headers=tuple(headers), body=body)
        seconds = self._config.broadcast_timeout_secs
        try:
            response = await send_request(engine.connections, self._clock, seconds, forwarded)
        except (ConnectionFailed, DeadlineExceeded) as error:
            return BroadcastReply(response=None, why=str(error))
        body_json = response.json()
        if response.status >= 300:
            return BroadcastReply(response=response, why=f"status {response.status}: {response.text()}")
        if isinstance(body_json, dict) and body_json.get("success") is False:  # SGLang returns status 200 in places
            return BroadcastReply(response=response, why=str(body_json.get("message") or "it answered success: false"))
        return BroadcastReply(response=response, why="")

    # -- process groups ------------------------------------------------------------------------------------

    async def _group_bodies(self, request: HttpRequest) -> dict[str, bytes]:
        """Each engine joins a process group with ranks of its own, in the order of ``GET /engines``."""
        fields = request.json()
        first = fields.get("rank_offset") if fields is not None else None
        size = fields.get("world_size") if fields is not None else None
        if fields is None or not isinstance(first, int) or not isinstance(size, int):
            raise HttpError(400, f"{INIT_GROUP} needs a JSON object with the integers rank_offset and world_size.")
        engines = list(self._pool.engines.values())
        for engine, ranks in zip(engines, await asyncio.gather(*map(self._fetch_ranks, engines)), strict=True):
            engine.ranks = ranks
        bodies: dict[str, bytes] = {}
        offset = first
        for engine in engines:
            bodies[engine.name] = json.dumps({**fields, "rank_offset": offset}).encode()
            offset += engine.ranks or 1
        if offset > size:
            raise HttpError(
                400,
                f"world_size is {size}, but the {len(engines)} engines have {offset - first} ranks, "
                f"which with rank_offset {first} needs a world_size of {offset}.",
            )
        return bodies

    async def _fetch_ranks(self, engine: RoutedEngine) -> int:
        if engine.ranks is not None:
            return engine.ranks
        seconds = self._config.health_check_timeout_secs
        for target in (b"/server_info", b"/get_server_info"):
            try:
                response = await send_request(
                    engine.connections, self._clock, seconds, EngineRequest(target=target, headers=self._key)
                )
            except (ConnectionFailed, DeadlineExceeded) as error:
                raise HttpError(502, f"The number of ranks of {engine} could not be read: {error}.") from None
            info = response.json()
            if response.status == 200 and isinstance(info, dict) and isinstance(ranks := info.get("tp_size"), int):
                return ranks
        raise HttpError(
            502,
            f"{engine} does not report its tp_size; add it again with its ranks, for example POST /engines with "
            "ranks: 2.",
        )

    # -- results -------------------------------------------------------------------------------------

    def _record(self, path: str, replies: dict[str, BroadcastReply]) -> None:
        for name, reply in replies.items():
            engine = self._pool.engines.get(name)
            if engine is None:
                continue
            if reply.ok:
                self._record_success(engine, path)
            elif path in WEIGHT_UPDATES and any(other.ok for other in replies.values()):
                hint = f"send it all weights with {_FULL_UPDATE}, or add it again when it has them"
                engine.missed_update = f"it missed {path} ({reply.why}); {hint}"
                if engine.state is not EngineState.DRAINING:
                    self._pool.quarantine(engine, engine.missed_update)

    def _record_success(self, engine: RoutedEngine, path: str) -> None:
        if path in _SUSPENDING:
            engine.suspended.add(_SUSPENDING[path])
        elif path in _RESUMING:
            engine.suspended.discard(_RESUMING[path])
        elif path in WEIGHT_UPDATES:
            if path == _FULL_UPDATE:
                engine.missed_update = None
            self._check_now(engine)

    def _summarize(self, request: HttpRequest, replies: dict[str, BroadcastReply]) -> HttpResponse:
        failed = {name: reply.why for name, reply in replies.items() if not reply.ok}
        engines: dict[str, Any] = {}
        for name, reply in replies.items():
            response = reply.response
            body = None if response is None else response.json()
            if body is None and response is not None:
                body = response.text()
            engines[name] = {
                "success": reply.ok,
                "status": None if response is None else response.status,
                "message": reply.why,
                "body": body,
            }
        if failed:
            reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
            message = f"{len(failed)} of {len(replies)} engines failed {request.path}: {reasons}"
        else:
            message = f"{len(replies)} engines completed {request.path}."
        return json_response(502 if failed else 200, {"success": not failed, "message": message, "engines": engines})
