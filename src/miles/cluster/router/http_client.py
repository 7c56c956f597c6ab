"""HTTP client of the router: connection pools of engines (HTTP keep-alive), one request at a time on each connection.

A response handler is called as bytes come in: ``on_head`` once, ``on_body`` for each piece, ``flush`` when nothing more
is available, and at the end ``on_end`` or ``on_failure``, once. It may stop the reading with ``pause``.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from miles.cluster.router.http_types import Clock, Header, HttpError, HttpResponse, request_head

# uvicorn closes a connection after five idle seconds; the router must close it before.
IDLE_SECONDS = 4.0
MAX_IDLE_CONNECTIONS = 128  # to one engine; a burst of requests must not leave thousands of descriptors behind
_HEADERS_LIMIT = 256 << 10
_MAX_COPIED_BODY = 64 << 10  # a shorter body is written together with its head
_MAX_RESPONSE = 64 << 20  # of the router's own requests


class ConnectionFailed(Exception):
    """A connection failed or could not be opened; ``stale``: it had been idle before."""

    def __init__(self, message: str, *, stale: bool = False) -> None:
        super().__init__(message)
        self.stale = stale


class DeadlineExceeded(Exception):
    """A request took too long."""


class ResponseHandler(Protocol):
    """Receives the response of an engine."""

    def on_head(self, status: int, headers: list[Header], length: int | None) -> None: ...
    def on_body(self, data: bytes) -> None: ...
    def flush(self) -> None: ...
    def on_end(self) -> None: ...
    def on_failure(self, error: Exception) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The parsed URL of an engine. ``prefix`` is the path prefix of its endpoints."""

    url: str
    host: str
    port: int
    tls: bool
    prefix: bytes
    authority: bytes

    @classmethod
    def parse(cls, url: str) -> EngineAddress:
        """Parse a URL; raises ``HttpError`` if it is not that of an engine."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            (parts.hostname or "").encode("idna")
        except ValueError:
            raise HttpError(400, f"{url} is not the URL of an engine; write one like http://127.0.0.1:30000.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise HttpError(400, f"{url} is not the URL of an engine; write one like http://127.0.0.1:30000.")
        if parts.username is not None or parts.password is not None:
            raise HttpError(
                400, "The URL of an engine must not contain a user name or password; use the engines' API key instead."
            )
        path = parts.path.rstrip("/")
        return cls(
            url=f"{parts.scheme}://{parts.netloc}{path}",
            host=parts.hostname,
            port=port,
            tls=parts.scheme == "https",
            prefix=path.encode("latin-1", "replace"),
            authority=parts.netloc.encode("latin-1", "replace"),
        )

    @property
    def name(self) -> str:
        """The engine's name: its URL without the scheme."""
        return self.url.partition("://")[2]


class EngineConnection(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._handler: ResponseHandler | None = None
        self._headers: list[Header] = []
        self._size = 0
        self._status = 0
        self._until_close = False
        self._got_bytes = False
        self._reading = True
        self.num_requests = 0
        self.idle_since = 0.0
        self.keep_alive = True

    # -- for the rest of the router ----------------------------------------------------------

    def send(self, head: bytes, body: bytes, handler: ResponseHandler) -> None:
        """Send a request; ``handler`` receives the response."""
        assert self._handler is None
        self._handler = handler
        self._got_bytes = False
        self.num_requests += 1
        if len(body) < _MAX_COPIED_BODY:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def pause(self) -> None:
        """Stop the reading of a response; an idle connection is always read, or its next response would not be."""
        if self._reading and self._handler is not None and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._reading and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    def drop(self) -> None:
        """Close the connection; its handler is not called any more."""
        self._handler = None
        self._transport.abort()

    def fail(self, error: Exception) -> None:
        """Close the connection; its handler is called with the error."""
        handler, self._handler = self._handler, None
        self._transport.abort()
        if handler is not None:
            handler.on_failure(error)

    @property
    def closing(self) -> bool:
        return self._transport.is_closing()

    # -- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._handler is None:  # unexpected bytes: the next response could not be trusted
            self._transport.abort()
            return
        self._got_bytes = True
        handler = self._handler
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(ConnectionFailed(f"its response is not valid HTTP/1.1 ({error})"))
            return
        if self._handler is handler:
            handler.flush()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        if self._handler is None:
            return
        if self._until_close and exc is None:
            self._finish()
        else:
            when = "in the middle of a response" if self._got_bytes else "before it responded"
            stale = self.num_requests > 1 and not self._got_bytes
            self.fail(ConnectionFailed(f"it closed the connection {when}{f' ({exc})' if exc else ''}", stale=stale))

    # -- httptools --------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._headers, self._size = [], 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value)
        if self._size > _HEADERS_LIMIT:
            raise ValueError("headers too long")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._handler is None or self._status < 200:
            return
        length: int | None = None
        chunked = False
        for name, value in self._headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                chunked = True
        if self._status in (204, 304):
            length = 0
        self._until_close = length is None and not chunked
        self._handler.on_head(self._status, self._headers, length)

    def on_body(self, data: bytes) -> None:
        if self._handler is not None:
            self._handler.on_body(data)

    def on_message_complete(self) -> None:
        if self._handler is not None and self._status >= 200:
            self._finish()

    def _finish(self) -> None:
        handler, self._handler = self._handler, None
        assert handler is not None
        if self._until_close or not self.keep_alive or not self._parser.should_keep_alive():
            self._transport.close()
        else:
            self.resume()
            self._pool.release(self)
        handler.flush()
        handler.on_end()


class ConnectionPool:
    """The connections to one engine."""

    def __init__(self, address: EngineAddress, clock: Clock, connect_seconds: float) -> None:
        self.address = address
        self._clock = clock
        self._connect_seconds = connect_seconds
        self._idle: list[EngineConnection] = []
        self._connections: set[EngineConnection] = set()
        self._closed = False
        self._tls = ssl.create_default_context() if address.tls else None

    def take_idle(self) -> EngineConnection | None:
        """The idle connection that was used last; None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closing and self._clock.now() - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.drop()
        return None

    async def connect(self) -> EngineConnection:
        """Open a new connection."""
        address = self.address
        loop = asyncio.get_running_loop()
        timed_out = False
        connecting = asyncio.ensure_future(
            loop.create_connection(lambda: EngineConnection(self), address.host, address.port, ssl=self._tls)
        )

        def give_up() -> None:
            nonlocal timed_out
            timed_out = True
            connecting.cancel()

        timer = self._clock.call_later(self._connect_seconds, give_up)
        try:
            _, connection = await connecting
        except asyncio.CancelledError:
            if not timed_out:
                connecting.add_done_callback(_drop_unwanted)
                raise
            raise ConnectionFailed(f"no connection was opened within {self._connect_seconds:g} seconds") from None
        except OSError as error:
            raise ConnectionFailed(f"no connection could be opened ({error.strerror or error})") from None
        finally:
            timer.cancel()
        self._connections.add(connection)
        return connection

    def release(self, connection: EngineConnection) -> None:
        """Keep a connection whose response has ended; of too many, the one that was used first is closed."""
        if self._closed:
            connection.drop()
            return
        connection.idle_since = self._clock.now()
        self._idle.append(connection)
        if len(self._idle) > MAX_IDLE_CONNECTIONS:
            self._idle.pop(0).drop()

    def forget(self, connection: EngineConnection) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Close connections that have been idle for so long."""
        limit = self._clock.now() - seconds
        for connection in [connection for connection in self._idle if connection.idle_since <= limit]:
            self._idle.remove(connection)
            connection.drop()

    def close(self, why: str) -> None:
        """Close every connection, and keep none from now on; handlers in use are called with why."""
        self._closed = True
        for connection in list(self._connections):
            connection.fail(ConnectionFailed(why))
        self._idle.clear()


class BufferedResponse:
    """A response handler that collects the whole response."""

    def __init__(self) -> None:
        self.response: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._headers: list[Header] = []
        self._parts: list[bytes] = []
        self._size = 0

    def on_head(self, status: int, headers: list[Header], length: int | None) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > _MAX_RESPONSE:
            self.on_failure(ConnectionFailed(f"its response is longer than {_MAX_RESPONSE} bytes"))
        else:
            self._parts.append(data)

    def flush(self) -> None: ...

    def on_end(self) -> None:
        if not self.response.done():
            self.response.set_result(
                HttpResponse(status=self._status, headers=self._headers, body=b"".join(self._parts))
            )

    def on_failure(self, error: Exception) -> None:
        if not self.response.done():
            self.response.set_exception(error)
            self.response.exception()  # retrieved, even if it is never awaited


def _drop_unwanted(connecting: asyncio.Future[tuple[asyncio.Transport, EngineConnection]]) -> None:
    """Close a connection that was opened just when its task was cancelled."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[1].drop()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request of the router itself, or one that it broadcasts."""

    method: bytes = b"GET"
    target: bytes
    headers: tuple[Header, ...] = ()
    body: bytes = b""


async def send_request(pool: ConnectionPool, clock: Clock, seconds: float, request: EngineRequest) -> HttpResponse:
    """Send one request on a new connection, so that it is never sent twice; the connection is closed after it.

    Raises ``ConnectionFailed`` or ``DeadlineExceeded``.
    """
    handler = BufferedResponse()
    connection: EngineConnection | None = None
    address = pool.address

    def time_out() -> None:
        handler.on_failure(DeadlineExceeded(f"it did not answer within {seconds:g} seconds"))

    timer = clock.call_later(seconds, time_out)
    try:
        connection = await pool.connect()
        connection.keep_alive = False
        target = address.prefix + request.target
        headers = (*request.headers, (b"connection", b"close"))
        head = request_head(request.method, target, address.authority, headers, len(request.body))
        connection.send(head, request.body, handler)
        return await handler.response
    except BaseException:
        if connection is not None:
            connection.drop()
        raise
    finally:
        timer.cancel()
