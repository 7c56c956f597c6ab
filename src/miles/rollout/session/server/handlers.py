"""HTTP handlers of the session server: parse a body, run a turn or look at a session, format the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from miles.core.protocols import Engine
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.http import dump_json, load_json, read_chunks
from miles.rollout.serving.messages import Message
from miles.rollout.session.server.chat import ChatChunks, format_chat, parse_chat
from miles.rollout.session.server.deltas import StreamFormatter
from miles.rollout.session.server.messages import AnthropicEvents, format_anthropic, parse_anthropic
from miles.rollout.session.server.registry import SessionEntry, SessionRegistry
from miles.rollout.session.server.responses import ResponseEvents, format_response, format_response_id, parse_responses
from miles.rollout.session.server.session_api import (
    SessionDefaults,
    format_session,
    format_trajectory,
    is_empty,
    parse_session,
)
from miles.rollout.session.server.sse import TokenQueue, stream_turn
from miles.rollout.session.server.turn import TurnRunner
from miles.rollout.session.server.types import TurnHeader, TurnRequest, TurnResult

LARGE_BODY = 1 << 20
"""Bytes of a body from which it is parsed on a thread, not on the event loop."""
MAX_STORED_RESPONSES = 1024
"""Responses of a session that a later request may name as the previous one."""
IGNORED_HEADER = "x-miles-unused"
"""The header that names sampling fields of a request that the session does not follow."""


class SessionHandlers:
    """The endpoints. ``convert_error`` turns any exception into the error a client receives."""

    def __init__(
        self,
        sessions: SessionRegistry,
        turns: TurnRunner,
        defaults: SessionDefaults,
        engine: Engine | None,
        *,
        model: str,
        get_url: Callable[[str], str],
        convert_error: Callable[[Exception], RequestError],
    ) -> None:
        self._sessions = sessions
        self._turns = turns
        self._defaults = defaults
        self._engine = engine
        self._model = model
        self._get_url = get_url
        self._convert_error = convert_error

    def add_routes(self, app: web.Application) -> None:
        session = "/sessions/{key}"
        app.router.add_get("/health", self._health)
        app.router.add_post("/sessions", self._open)
        app.router.add_get(session, self._show)
        app.router.add_delete(session, self._close)
        app.router.add_get(f"{session}/trajectory", self._trajectory)
        app.router.add_get(f"{session}/v1/models", self._models)
        app.router.add_get(f"{session}/v1/models/{{model:.+}}", self._models)
        app.router.add_post(f"{session}/v1/chat/completions", self._chat)
        app.router.add_post(f"{session}/v1/responses", self._responses)
        app.router.add_post(f"{session}/v1/messages", self._messages)
        app.router.add_post(f"{session}/v1/messages/count_tokens", self._count_tokens)

    # -- sessions ---------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        draining = self._sessions.draining
        body = {"ok": not draining, "sessions": len(self._sessions), "turns": self._sessions.num_turns}
        return _json_response(body, 503 if draining else 200)

    async def _open(self, request: web.Request) -> web.Response:
        if self._engine is None:
            message = "Sessions of this server are opened by the run it belongs to, not over HTTP."
            raise RequestError(message, status=403)
        opening = parse_session(await _read_body(request, allow_empty=True), self._defaults)
        entry = self._sessions.open(
            self._engine, opening.match, opening.settings, id=opening.id, prompt=opening.prompt, limited=True
        )
        return _json_response(format_session(entry, self._find_url(request, entry)), 201)

    async def _show(self, request: web.Request) -> web.Response:
        entry = self._find_entry(request)
        return _json_response(format_session(entry, self._find_url(request, entry)))

    async def _trajectory(self, request: web.Request) -> web.Response:
        entry = self._find_entry(request)
        if is_empty(entry):
            raise RequestError(f"Session {entry.id} never got a request, so it has no trajectory.", status=409)
        body = format_trajectory(entry, extras=request.query.get("extras") in ("1", "true"))
        return web.Response(body=await asyncio.to_thread(dump_json, body), content_type="application/json")

    async def _close(self, request: web.Request) -> web.Response:
        entry = self._sessions.close(request.match_info["key"])
        return _json_response({"id": entry.id, "object": "session", "deleted": True})

    async def _models(self, request: web.Request) -> web.Response:
        """The fields of OpenAI and Anthropic at once, since the path is the same; any model name is accepted."""
        self._find_entry(request)
        name = request.match_info.get("model")
        model = {
            "id": name or self._model,
            "object": "model",
            "created": 0,
            "owned_by": "miles",
            "type": "model",
            "display_name": name or self._model,
            "created_at": "1970-01-01T00:00:00Z",
        }
        if name:
            return _json_response(model)
        page = {"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}
        return _json_response(page)

    # -- turns ------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        turn = parse_chat(await _read_body(request))
        return await self._run_turn(
            request, turn, lambda result: format_chat(result, turn), lambda header: ChatChunks(header, turn)
        )

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        turn = parse_anthropic(await _read_body(request))
        return await self._run_turn(
            request, turn, lambda result: format_anthropic(result, turn), lambda header: AnthropicEvents(header, turn)
        )

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        entry = self._find_entry(request)
        turn, echo = parse_responses(await _read_body(request), lambda id: _get_history(entry, id))

        def store(result: TurnResult) -> None:
            if echo.store:
                entry.responses[format_response_id(result)] = (*echo.history, result.message)
                if len(entry.responses) > MAX_STORED_RESPONSES:
                    entry.responses.popitem(last=False)

        return await self._run_turn(
            request,
            turn,
            lambda result: format_response(result, turn, echo),
            lambda header: ResponseEvents(header, turn, echo),
            store,
        )

    async def _count_tokens(self, request: web.Request) -> web.Response:
        entry = self._find_entry(request)
        turn = parse_anthropic(await _read_body(request), count_only=True)
        return _json_response({"input_tokens": await self._turns.count_tokens(entry, turn)})

    async def _run_turn(
        self,
        request: web.Request,
        turn: TurnRequest,
        format_body: Callable[[TurnResult], dict[str, Any]],
        build_formatter: Callable[[TurnHeader], StreamFormatter],
        on_result: Callable[[TurnResult], None] | None = None,
    ) -> web.StreamResponse:
        started = await self._turns.start(self._find_entry(request), turn)
        headers = {IGNORED_HEADER: ", ".join(started.ignored)} if started.ignored else {}

        async def run(queue: TokenQueue | None) -> TurnResult:
            result = await self._turns.run(started, None if queue is None else queue.add)
            if on_result is not None:
                on_result(result)
            return result

        if not turn.stream:
            return _json_response(format_body(await run(None)), headers=headers)
        queue = TokenQueue()
        work = asyncio.ensure_future(run(queue))
        # A task that is cancelled before its first step does not abandon its turn itself.
        work.add_done_callback(lambda _: started.entry.session.abandon(started.turn))
        return await stream_turn(
            request,
            work,
            queue,
            started.build_stream_parser(),
            build_formatter(started.header),
            headers=headers,
            heartbeat=self._sessions.limits.heartbeat_seconds,
            convert_error=self._convert_error,
        )

    def _find_entry(self, request: web.Request) -> SessionEntry:
        return self._sessions.find(request.match_info["key"])

    def _find_url(self, request: web.Request, entry: SessionEntry) -> str:
        """The session's URL under the host name this client uses for the server."""
        host = request.headers.get("Host")
        return self._get_url(entry.key) if host is None else f"{request.scheme}://{host}/sessions/{entry.key}"


async def _read_body(request: web.Request, *, allow_empty: bool = False) -> Any:
    limit = request.client_max_size
    raw = await read_chunks(request.content.iter_any(), limit, f"the {limit >> 20} MiB this server reads")
    if allow_empty and not raw:
        return None
    return await asyncio.to_thread(load_json, raw) if len(raw) > LARGE_BODY else load_json(raw)


def _get_history(entry: SessionEntry, id: str) -> tuple[Message, ...]:
    history = entry.responses.get(id)
    if history is None:
        raise RequestError(
            f"Session {entry.id} has no response {id[:128]} to continue; send the conversation's items instead.",
            status=404,
            param="previous_response_id",
        )
    return history


def _json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=dump_json(value), status=status, headers=headers, content_type="application/json")
