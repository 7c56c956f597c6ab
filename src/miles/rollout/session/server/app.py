"""The server: routes, keys, limits, and the way from a body to a reply."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from miles.core.errors import UsageError
from miles.core.protocols import Engine, Sampling
from miles.core.types import EMPTY, Prompt
from miles.rollout.session.match import Match
from miles.rollout.session.message import SessionError
from miles.rollout.session.render import Renderer
from miles.rollout.session.server.desk import Desk
from miles.rollout.session.server.entry import Entry, Limits, Terms
from miles.rollout.session.server.opening import House, matched
from miles.rollout.session.server.refusal import Dialect, Refusal, body_of
from miles.rollout.session.server.sessions import Sessions
from miles.rollout.session.server.stream import dumps
from miles.rollout.session.server.turn import Turns

HANGING_SECONDS = 5.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SessionServer:
    """Sessions behind HTTP, over the Engine door. Engines are their maker's to close.

    ``start``, ``open``, ``close`` and ``stop`` belong to one event loop, that of the engines. ``decode`` keeps special
    tokens. ``sampling``, ``match`` and ``hold`` are what sessions are opened with over HTTP where a client says
    nothing; without an ``engine`` only ``open`` opens sessions. ``model`` is the name ``/v1/models`` tells.
    """

    def __init__(
        self,
        renderer: Renderer,
        decode: Callable[[Sequence[int]], str],
        *,
        engine: Engine | None = None,
        sampling: Sampling | None = None,
        match: str | Match = "loose_tool_call",
        hold: bool = False,
        limits: Limits | None = None,
        max_context_len: int | None = None,
        model: str = "policy",
        api_key: str | None = None,
        allow_unauthenticated: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if api_key is not None and not api_key.strip():
            raise UsageError("The session server's API key is empty; give it one, or none at all.")
        self.limits = limits or Limits()
        self.sessions = Sessions(renderer, limits=self.limits, max_context_len=max_context_len, clock=clock)
        self._house = House(sampling=sampling or Sampling(), match=match, hold=hold)
        turns = Turns(self.sessions, decode, wall)
        self._desk = Desk(
            self.sessions, turns, self._house, engine, model=model, url_of=self.url, explain=self._failure
        )
        self._key = api_key
        self._anyone = allow_unauthenticated
        self._address: str | None = None
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._log: Callable[..., None] | None = None

    # -- in this process --------------------------------------------------------------------

    def open(
        self,
        engine: Engine,
        sampling: Sampling,
        *,
        prompt: Prompt | None = None,
        id: str | None = None,
        hold: bool = True,
        match: str | Match | None = None,
        metadata: Mapping[str, Any] = EMPTY,
        max_turns: int | None = None,
        max_tokens: int | None = None,
    ) -> Entry:
        """A session whose turns ``engine`` takes. Held, it draws as ``sampling`` says, whatever the agent asks for."""
        name, function = matched(self._house.match if match is None else match)
        terms = Terms(
            sampling=sampling, held=hold, match=name, metadata=metadata, max_turns=max_turns, max_tokens=max_tokens
        )
        return self.sessions.open(engine, function, terms, id=id, prompt=prompt, bounded=False)

    def close(self, id: str) -> Entry:
        """Take a session out, for its ``session.trajectory``; turns under way are aborted."""
        return self.sessions.close(id)

    def url(self, id: str) -> str:
        """A session's address: Anthropic's base URL, and with ``/v1`` behind it OpenAI's."""
        assert self._address is not None, "the server has been started"
        return f"{self._address}/sessions/{id}"

    # -- coming and going -------------------------------------------------------------------

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port, which is a free one for port 0."""
        if self._key is None and not self._anyone and not is_own(host):
            raise UsageError(
                f"The session server would listen on {host}, where other machines reach it, without an API key; give "
                "it one, or allow_unauthenticated."
            )
        app = web.Application(client_max_size=self.limits.body_mib << 20, middlewares=[self._guard])
        self._desk.add_routes(app)
        self._log = app.logger.error
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, port, backlog=1024, reuse_address=True)
        await self._site.start()
        found = int(self._runner.addresses[0][1])
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        self._address = f"http://{shown}:{found}"
        return found

    async def drain(self) -> None:
        """Take nothing new; turns under way have ``limits.drain_seconds`` to end, and then are aborted."""
        self.sessions.draining = True
        try:
            await asyncio.wait_for(self.sessions.quiet(), self.limits.drain_seconds)
        except TimeoutError:
            self.sessions.close_all()
            with suppress(TimeoutError):  # an engine that does not let go is not waited for
                await asyncio.wait_for(self.sessions.quiet(), HANGING_SECONDS)

    async def stop(self) -> None:
        """Close every connection and session; turns under way are aborted."""
        self.sessions.draining = True
        self.sessions.close_all()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # -- every request ----------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key; say in the API's own way what went wrong."""
        try:
            self._admit(request)
            return await handler(request)
        except Refusal as refusal:
            return _refused(request, refusal)
        except web.HTTPRequestEntityTooLarge:
            limit = f"The body is larger than the {self.limits.body_mib} MiB this server reads."
            return _refused(request, Refusal(limit, status=413))
        except web.HTTPException as error:
            told = Refusal(f"{request.method} {request.path[:200]}: {error.reason}.", status=error.status)
            response = _refused(request, told)
            response.headers.extend({"Allow": error.headers["Allow"]} if "Allow" in error.headers else {})
            return response
        except Exception as error:  # whatever it is, the client is told no more than that it was ours
            return _refused(request, self._failure(error))

    def _admit(self, request: web.Request) -> None:
        """Turn away whoever has no key; and, where none is needed, pages that make a browser on this machine ask."""
        if request.path == "/health":
            return
        if self._key is None:
            if not self._anyone and is_from_a_page(request.headers):
                raise Refusal("A page of another site may not use this server.", status=403)
            return
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not secrets.compare_digest(given.encode(), self._key.encode()):
            raise Refusal("The API key is missing or wrong.", status=401)

    def _failure(self, error: Exception) -> Refusal:
        """What a client is told of an error: our own sentences, and of others only that there was one."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, SessionError):
            return Refusal(str(error))
        if self._log is not None:
            self._log("a request failed", exc_info=error)
        return Refusal(f"The server failed on this request ({type(error).__name__}); its log says more.", status=500)


def _refused(request: web.Request, refusal: Refusal) -> web.Response:
    body = dumps(body_of(refusal, dialect_of(request.path)))
    return web.Response(body=body, status=refusal.status, headers=refusal.headers, content_type="application/json")


def dialect_of(path: str) -> Dialect:
    """Whose way of saying things a path calls for."""
    return "anthropic" if "/v1/messages" in path else "openai"


def is_own(host: str) -> bool:
    """Is this an address only this machine reaches?"""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_from_a_page(headers: Mapping[str, str]) -> bool:
    """Does a browser say that another site's page asks, or that it found this server under a name that is not ours?

    An address cannot be made to point elsewhere; a name can.
    """
    host = headers.get("Host", "")
    if "Origin" in headers and urlsplit(headers["Origin"]).netloc != host:
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name != "localhost" and not ip_address(name)
    except ValueError:
        return True
