"""Session server: start and stop, API key, limits, and errors in the body of the API that was called."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from miles.core.errors import UsageError
from miles.core.protocols import Engine, SamplingParams
from miles.core.types import Prompt
from miles.rollout.serving.errors import RequestError, SessionError, error_body
from miles.rollout.serving.http import (
    dump_json,
    find_own_address,
    has_valid_key,
    is_cross_origin,
    is_loopback,
)
from miles.rollout.serving.http_runner import build_runner
from miles.rollout.session.match import MessageMatcher
from miles.rollout.session.render import ChatRenderer
from miles.rollout.session.server.handlers import SessionHandlers
from miles.rollout.session.server.registry import SessionEntry, SessionLimits, SessionRegistry, SessionSettings
from miles.rollout.session.server.session_api import SessionDefaults, resolve_matcher
from miles.rollout.session.server.turn import TurnRunner

ABORT_SECONDS = 5.0
"""How long to wait for engines to release aborted turns."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SessionServer:
    """Sessions over HTTP. It does not close the engines it is given.

    ``start``, ``open``, ``close`` and ``stop`` run on one event loop, that of the engines. ``decode`` keeps special
    tokens. ``sampling``, ``match`` and ``hold`` are the defaults of sessions opened over HTTP; without an ``engine``
    only ``open`` opens sessions. ``model`` is the name in ``/v1/models``.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        decode: Callable[[Sequence[int]], str],
        *,
        engine: Engine | None = None,
        sampling: SamplingParams | None = None,
        match: str | MessageMatcher = "loose_tool_call",
        hold: bool = False,
        limits: SessionLimits | None = None,
        max_context_len: int | None = None,
        model: str = "policy",
        api_key: str | None = None,
        allow_unauthenticated: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if api_key is not None and not api_key.strip():
            raise UsageError("The session server's API key is empty; give it one, or none at all.")
        self.limits = limits or SessionLimits()
        self.sessions = SessionRegistry(renderer, limits=self.limits, max_context_len=max_context_len, clock=clock)
        self._defaults = SessionDefaults(sampling=sampling or SamplingParams(), match=match, hold=hold)
        self._handlers = SessionHandlers(
            self.sessions,
            TurnRunner(self.sessions, decode, wall_clock),
            self._defaults,
            engine,
            model=model,
            get_url=self.url,
            convert_error=self._convert_error,
        )
        self._key = api_key
        self._allow_unauthenticated = allow_unauthenticated
        self._address: str | None = None
        self._runner: web.AppRunner | None = None
        self._log: Callable[..., None] | None = None

    # -- in this process --------------------------------------------------------------------

    def open(
        self,
        engine: Engine,
        sampling: SamplingParams,
        *,
        prompt: Prompt | None = None,
        id: str | None = None,
        hold: bool = True,
        match: str | MessageMatcher | None = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
    ) -> SessionEntry:
        """A session whose turns run on ``engine``. With ``hold``, requests cannot change how it samples."""
        name, matcher = resolve_matcher(self._defaults.match if match is None else match)
        settings = SessionSettings(sampling=sampling, hold=hold, match=name, max_turns=max_turns, max_tokens=max_tokens)
        return self.sessions.open(engine, matcher, settings, id=id, prompt=prompt, limited=False)

    def close(self, key: str) -> SessionEntry:
        """Remove a session and return it for its ``session.trajectory``; running turns are aborted."""
        return self.sessions.close(key)

    def url(self, key: str) -> str:
        """A session's URL: Anthropic's base URL, and with ``/v1`` appended OpenAI's. It holds the session's secret."""
        assert self._address is not None, "the server has been started"
        return f"{self._address}/sessions/{key}"

    # -- start and stop ---------------------------------------------------------------------

    async def start(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        tls: ssl.SSLContext | None = None,
        advertised_host: str | None = None,
    ) -> int:
        """Listen, with ``tls`` over HTTPS; returns the port, which is a free one for port 0.

        URLs have the ``advertised_host``, else ``host``, else, for all interfaces, the address of the default route.
        """
        if self._key is None and not self._allow_unauthenticated and not is_loopback(host):
            raise UsageError(
                f"The session server would listen on {host}, where other machines reach it, without an API key; give "
                "it one, or allow_unauthenticated."
            )
        app = web.Application(client_max_size=self.limits.body_mib << 20, middlewares=[self._handle])
        self._handlers.add_routes(app)
        self._log = app.logger.error
        self._runner = build_runner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=1024, reuse_address=True, ssl_context=tls).start()
        bound_port = int(self._runner.addresses[0][1])
        url_host = advertised_host or (find_own_address() if host in ("0.0.0.0", "::") else host)
        url_host = f"[{url_host}]" if ":" in url_host else url_host
        self._address = f"{'http' if tls is None else 'https'}://{url_host}:{bound_port}"
        return bound_port

    async def drain(self) -> None:
        """Take no new requests; running turns have ``limits.drain_seconds`` to end, and are then aborted."""
        self.sessions.draining = True
        try:
            await asyncio.wait_for(self.sessions.wait_idle(), self.limits.drain_seconds)
        except TimeoutError:
            self.sessions.close_all()
            with suppress(TimeoutError):  # an engine that does not release its turn is not waited for
                await asyncio.wait_for(self.sessions.wait_idle(), ABORT_SECONDS)

    async def stop(self) -> None:
        """Close every connection and session; running turns are aborted."""
        self.sessions.draining = True
        self.sessions.close_all()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # -- every request ----------------------------------------------------------------------

    @web.middleware
    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and report errors in the body of the API that was called."""
        try:
            self._authorize(request)
        except RequestError as error:
            response = _error_response(request, error)
            if request.can_read_body and request.transport is not None:  # the body is not read
                request.transport.pause_reading()
                response.force_close()
            return response
        try:
            return await handler(request)
        except web.HTTPException as error:
            reason = f"{request.method} {request.path[:200]}: {error.reason}."
            response = _error_response(request, RequestError(reason, status=error.status))
            response.headers.extend({"Allow": error.headers["Allow"]} if "Allow" in error.headers else {})
            return response
        except Exception as error:
            return _error_response(request, self._convert_error(error))

    def _authorize(self, request: web.Request) -> None:
        """Refuse requests without the key; where no key is set, those a foreign web page makes a browser send."""
        if request.path == "/health":
            return
        if self._key is None:
            if not self._allow_unauthenticated and is_cross_origin(request.headers):
                raise RequestError("A page of another site may not use this server.", status=403)
        elif not has_valid_key(request.headers, self._key):
            raise RequestError("The API key is missing or wrong.", status=401)

    def _convert_error(self, error: Exception) -> RequestError:
        """The text of an error that a client receives: our own messages; of any other only its type."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, RecursionError):
            return RequestError("The body is nested too deeply.")
        if isinstance(error, BadHttpMessage | web.RequestPayloadError):
            return RequestError("The body is not what its headers say: it cannot be decoded.")
        if isinstance(error, SessionError):
            return RequestError(str(error))
        if self._log is not None:
            self._log("a request failed", exc_info=error)
        message = f"The server failed on this request ({type(error).__name__}); see its log."
        return RequestError(message, status=500)


def _error_response(request: web.Request, error: RequestError) -> web.Response:
    body = error_body(error, "anthropic" if "/v1/messages" in request.path else "openai")
    return web.Response(
        body=dump_json(body), status=error.status, headers=error.headers, content_type="application/json"
    )
