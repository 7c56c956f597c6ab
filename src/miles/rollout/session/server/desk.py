"""The endpoints: each reads a body, has a turn taken or a session looked at, and writes what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from miles.core.protocols import Engine
from miles.rollout.session.message import Message
from miles.rollout.session.server.ask import Ask, Opened, Told
from miles.rollout.session.server.chat import read_chat
from miles.rollout.session.server.chat_reply import ChatPieces, chat_body
from miles.rollout.session.server.entry import Entry
from miles.rollout.session.server.fields import read_json
from miles.rollout.session.server.messages import read_anthropic
from miles.rollout.session.server.messages_reply import AnthropicEvents, anthropic_body
from miles.rollout.session.server.opening import House, read_opening
from miles.rollout.session.server.refusal import Dialect, Refusal
from miles.rollout.session.server.responses import read_responses, reply_message
from miles.rollout.session.server.responses_reply import ResponseEvents, response_body, response_id
from miles.rollout.session.server.sessions import Sessions
from miles.rollout.session.server.stream import DONE, Post, dumps, event, stream
from miles.rollout.session.server.telling import Pieces
from miles.rollout.session.server.told import nothing_sampled, session_body, trajectory_body
from miles.rollout.session.server.turn import Turns

LARGE = 1 << 20
"""Bytes of a body from which on it is read beside the event loop."""
REMEMBERED = 1024
"""Responses of a session a later one may name as the one before it."""
UNUSED = "x-miles-unused"
"""The header that names what a request said of drawing and the session does not go by."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How an API streams a turn. ``named``: events are sent under their type; ``done`` is what stands behind all."""

    pieces: Callable[[Opened], Pieces]
    dialect: Dialect
    named: bool = True
    done: bytes = b""

    def told(self, pieces: Iterable[dict[str, Any]]) -> bytes:
        """Pieces as events."""
        return b"".join(event(piece, named=self.named) for piece in pieces)


class Desk:
    """Where requests are served. ``explain`` says what a client is told of an error in a stream."""

    def __init__(
        self,
        sessions: Sessions,
        turns: Turns,
        house: House,
        engine: Engine | None,
        *,
        model: str,
        url_of: Callable[[str], str],
        explain: Callable[[Exception], Refusal],
    ) -> None:
        self._sessions = sessions
        self._turns = turns
        self._house = house
        self._engine = engine
        self._model = model
        self._url_of = url_of
        self._explain = explain

    def add_routes(self, app: web.Application) -> None:
        one = "/sessions/{id}"
        app.router.add_get("/health", self._health)
        app.router.add_post("/sessions", self._open)
        app.router.add_get(one, self._look)
        app.router.add_delete(one, self._close)
        app.router.add_get(f"{one}/trajectory", self._trajectory)
        app.router.add_get(f"{one}/v1/models", self._models)
        app.router.add_get(f"{one}/v1/models/{{model:.+}}", self._models)
        app.router.add_post(f"{one}/v1/chat/completions", self._chat)
        app.router.add_post(f"{one}/v1/responses", self._responses)
        app.router.add_post(f"{one}/v1/messages", self._messages)
        app.router.add_post(f"{one}/v1/messages/count_tokens", self._count)

    # -- sessions ---------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        draining = self._sessions.draining
        body = {"ok": not draining, "sessions": len(self._sessions), "turns": self._sessions.turns}
        return _json(body, 503 if draining else 200)

    async def _open(self, request: web.Request) -> web.Response:
        if self._engine is None:
            raise Refusal("Sessions of this server are opened by the run it belongs to, not over HTTP.", status=403)
        opening = read_opening(await _body(request, empty=True), self._house)
        entry = self._sessions.open(
            self._engine, opening.match, opening.terms, id=opening.id, prompt=opening.prompt, bounded=True
        )
        return _json(session_body(entry, self._url(request, entry)), 201)

    async def _look(self, request: web.Request) -> web.Response:
        entry = self._entry(request)
        return _json(session_body(entry, self._url(request, entry)))

    async def _trajectory(self, request: web.Request) -> web.Response:
        entry = self._entry(request)
        if nothing_sampled(entry):
            raise Refusal(f"Session {entry.id} was never asked anything, so it has no trajectory.", status=409)
        body = trajectory_body(entry, extras=request.query.get("extras") in ("1", "true"))
        return web.Response(body=await asyncio.to_thread(dumps, body), content_type="application/json")

    async def _close(self, request: web.Request) -> web.Response:
        entry = self._sessions.close(request.match_info["id"])
        return _json({"id": entry.id, "object": "session", "deleted": True})

    async def _models(self, request: web.Request) -> web.Response:
        """In both APIs' fields at once, for the path is the same; a model of any name is this one."""
        self._entry(request)
        name = request.match_info.get("model")
        card = {"id": name or self._model, "object": "model", "created": 0, "owned_by": "miles"}
        card |= {"type": "model", "display_name": name or self._model, "created_at": "1970-01-01T00:00:00Z"}
        page = {"object": "list", "data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]}
        return _json(card if name else page)

    # -- turns ------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        ask = read_chat(await _body(request))

        return await self._turn(
            request,
            ask,
            lambda told: chat_body(told, ask),
            Manner(lambda opened: ChatPieces(opened, ask), "openai", named=False, done=DONE),
        )

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        ask = read_anthropic(await _body(request))

        return await self._turn(
            request,
            ask,
            lambda told: anthropic_body(told, ask),
            Manner(lambda opened: AnthropicEvents(opened, ask), "anthropic"),
        )

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        entry = self._entry(request)
        ask, echo = read_responses(await _body(request), lambda id: _past(entry, id))

        def keep(told: Told) -> None:
            if echo.store:
                entry.responses[response_id(told)] = (*echo.past, reply_message(told))
                if len(entry.responses) > REMEMBERED:
                    entry.responses.popitem(last=False)

        return await self._turn(
            request,
            ask,
            lambda told: response_body(told, ask, echo),
            Manner(lambda opened: ResponseEvents(opened, ask, echo), "openai"),
            keep,
        )

    async def _count(self, request: web.Request) -> web.Response:
        entry = self._entry(request)
        ask = read_anthropic(await _body(request), counting=True)
        return _json({"input_tokens": self._turns.count(entry, ask)})

    async def _turn(
        self,
        request: web.Request,
        ask: Ask,
        whole: Callable[[Told], dict[str, Any]],
        manner: Manner,
        keep: Callable[[Told], None] = lambda told: None,
    ) -> web.StreamResponse:
        begun = self._turns.begin(self._entry(request), ask)
        headers = {UNUSED: ", ".join(begun.unused)} if begun.unused else {}
        if not ask.stream:
            told = await self._turns.take(begun)
            keep(told)
            return _json(whole(told), headers=headers)
        post, pieces, hearing = Post(), manner.pieces(begun.opened), begun.hear()
        work = asyncio.ensure_future(self._turns.take(begun, post.hear))
        # A task that is cancelled before its first step has let go of nothing.
        work.add_done_callback(lambda _: begun.entry.session.abandon(begun.turn))

        def more(tokens: Sequence[int]) -> bytes:
            hearing.add(tokens)
            return manner.told(pieces.more(hearing.parts()))

        def last(told: Told) -> bytes:
            keep(told)
            return manner.told(pieces.last(told)) + manner.done

        return await stream(
            request,
            work,
            post,
            more,
            last,
            dialect=manner.dialect,
            headers=headers,
            heartbeat=self._sessions.limits.heartbeat_seconds,
            explain=self._explain,
        )

    # -- means ------------------------------------------------------------------------------

    def _entry(self, request: web.Request) -> Entry:
        return self._sessions.find(request.match_info["id"])

    def _url(self, request: web.Request, entry: Entry) -> str:
        """The session's address, under the name this client knows the server by."""
        host = request.headers.get("Host")
        return self._url_of(entry.id) if host is None else f"{request.scheme}://{host}/sessions/{entry.id}"


async def _body(request: web.Request, *, empty: bool = False) -> Any:
    raw = await request.read()
    if empty and not raw:
        return None
    return await asyncio.to_thread(read_json, raw) if len(raw) > LARGE else read_json(raw)


def _past(entry: Entry, id: str) -> tuple[Message, ...]:
    found = entry.responses.get(id)
    if found is None:
        raise Refusal(
            f"Session {entry.id} has no response {id[:128]} to go on from; send the conversation's items instead.",
            status=404,
            param="previous_response_id",
        )
    return found


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=dumps(value), status=status, headers=headers, content_type="application/json")
