"""HTTP server of the router: connections from clients, whose requests are read whole and served one at a time.

Backpressure: when a client reads slowly, the ``source`` of its response is paused. A client that disconnects cancels
the task that serves it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast

import httptools

from miles.cluster.router.http_types import (
    Clock,
    Header,
    HttpError,
    HttpRequest,
    HttpResponse,
    response_head,
    split_target,
)

IDLE_SECONDS = 75.0
STALLED_SECONDS = (
    30.0  # for a request received in part: its head, and each pause in its body; or a response sent in part
)
BODY_SECONDS = 60.0
MIN_BODY_RATE = 64 << 10  # a body may take longer than BODY_SECONDS if that many bytes arrive each second
_HEADERS_LIMIT = 64 << 10
_DISCARD_LIMIT = 1 << 20  # of a rejected request


class ResponseSource(Protocol):
    """Where a response comes from, with flow control."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


HandleRequest = Callable[[HttpRequest, "ClientConnection"], Awaitable[None]]
CheckHead = Callable[[HttpRequest], None]


class ClientConnection(asyncio.Protocol):
    """One connection. The response is sent whole (``send_response``) or in parts (``start_response``, ``write``).

    ``check_head`` raises ``HttpError`` for a request whose body is not worth reading.
    """

    def __init__(
        self, handle: HandleRequest, check_head: CheckHead, clock: Clock, clients: set[ClientConnection], limit: int
    ) -> None:
        self._handle = handle
        self._check_head = check_head
        self._clock = clock
        self._clients = clients
        self._limit = limit
        self._parser = httptools.HttpRequestParser(self)
        self._requests: deque[HttpRequest] = deque()
        self.task: asyncio.Task[None] | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = False
        self._discarding = False
        self._discarded = 0
        self._head_complete = False
        self._started_at = clock.now()
        self._http_1_0 = False
        self._head_only = False
        self._reset()
        # the response
        self.response_started = False
        self._ended = False
        self._source: ResponseSource | None = None
        self._write_paused = False
        self._chunked = False
        self._keep_alive = True
        self._out: list[bytes] = []
        self._unsent = 0
        self.last_active = clock.now()

    # -- sending a response --------------------------------------------------------------------

    def send_response(self, response: HttpResponse) -> None:
        """Send a whole response."""
        self.start_response(response.status, response.headers, len(response.body), None)
        self.write(response.body)
        self.end_response()

    def start_response(
        self, status: int, headers: Sequence[Header], length: int | None, source: ResponseSource | None
    ) -> None:
        """Send the head of a response; ``length`` is None if it is unknown."""
        assert not self.response_started
        self.response_started = True
        self._source = source
        self._chunked = False
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self._http_1_0:
            framing, self._keep_alive = b"", False
        else:
            framing, self._chunked = b"transfer-encoding: chunked\r\n", True
        if not self._keep_alive:
            framing += b"connection: close\r\n"
        elif self._http_1_0:
            framing += b"connection: keep-alive\r\n"
        self._out.append(response_head(status, headers, framing))
        if self._write_paused and source is not None:
            source.pause()

    def write(self, data: bytes) -> None:
        if not data or self._head_only:
            return
        if self._chunked:
            self._out += (b"%x\r\n" % len(data), data, b"\r\n")
        else:
            self._out.append(data)

    def flush(self) -> None:
        if self._out:
            data, self._out = b"".join(self._out), []
            if not self._transport.is_closing():
                self._transport.write(data)

    def end_response(self) -> None:
        """End the response."""
        if self._chunked and not self._head_only:
            self._out.append(b"0\r\n\r\n")
        self.flush()
        self._source, self._ended = None, True
        if self._discarding:
            self._transport.write_eof()
        elif not self._keep_alive:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection in the middle of a response, so that the client notices."""
        self._out = []
        self._transport.abort()

    def close_when_idle(self) -> None:
        """Close after the current request."""
        self._keep_alive = False
        self._closing = True
        if self.task is None:
            self._transport.close()

    def close_if_idle(self) -> None:
        """Close a connection that was idle for too long, or whose client reads nothing of the last response."""
        if self.task is not None:
            return
        now = self._clock.now()
        if self._transport.is_closing():  # it has not sent everything
            if (unsent := self._transport.get_write_buffer_size()) != self._unsent:
                self._unsent, self.last_active = unsent, now
            elif now - self.last_active > STALLED_SECONDS:
                self._transport.abort()
            return
        silent, waited = now - self.last_active, now - self._started_at
        if not self._partial:
            stalled = max(silent, waited) > IDLE_SECONDS
        elif not self._head_complete:
            stalled = waited > STALLED_SECONDS
        else:
            stalled = silent > STALLED_SECONDS or waited > BODY_SECONDS + self._body_size / MIN_BODY_RATE
        if stalled:
            self._transport.close()

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._clients.add(self)

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            self._discarded += len(data)
            if self._discarded > _DISCARD_LIMIT:
                self._transport.abort()
            return
        self.last_active = self._clock.now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, HttpError):
                raise
            self._reject(cause)
        except httptools.HttpParserError as error:
            self._reject(HttpError(400, f"The request is not valid HTTP/1.1: {error}."))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients.discard(self)
        self._requests.clear()
        self._closing = True
        self.closed.set_result(None)
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._source is not None:
            self._source.resume()

    # -- httptools ------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._partial = False
        self._target = b""
        self._headers: list[Header] = []
        self._body: list[bytes] = []
        self._head_size = self._body_size = 0

    def on_message_begin(self) -> None:
        self._reset()
        self._partial = True
        self._head_complete = False
        self._started_at = self._clock.now()

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        self._headers.append((name.lower(), value))

    def _count(self, size: int) -> None:
        self._head_size += size
        if self._head_size > _HEADERS_LIMIT:
            raise HttpError(431, f"The request's head is longer than {_HEADERS_LIMIT} bytes.")

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            raise HttpError(501, "The router supports HTTP/1.1 only; remove the header Upgrade.")
        self._head_complete = True
        codings = [value.strip().lower() for name, value in self._headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            raise HttpError(501, "The router supports no transfer coding but chunked.")
        if self.task is None:  # else it waits for its turn, and is checked then
            self._check_head(self._build_request(b""))
        for name, value in self._headers:
            if name == b"content-length" and int(value) > self._limit:
                raise self._too_large()
            if name == b"expect" and value.lower() == b"100-continue" and self.task is None:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body_size += len(data)
        if self._body_size > self._limit:
            raise self._too_large()
        self._body.append(data)

    def _too_large(self) -> HttpError:
        return HttpError(
            413, f"The request's body is longer than {self._limit} bytes, the limit of --max-payload-size."
        )

    def _build_request(self, body: bytes) -> HttpRequest:
        target, path, query = split_target(self._target)
        return HttpRequest(
            method=self._parser.get_method(),
            target=target,
            path=path,
            query=query,
            headers=self._headers,
            body=body,
            keep_alive=self._parser.should_keep_alive(),
            http_1_0=self._parser.get_http_version() == "1.0",
        )

    def on_message_complete(self) -> None:
        request = self._build_request(self._body[0] if len(self._body) == 1 else b"".join(self._body))
        self._reset()
        if self.task is None:
            self._start(request)
        else:  # pipelined: it waits, and reading stops
            self._requests.append(request)
            if len(self._requests) == 1:
                self._transport.pause_reading()

    # -- serving ----------------------------------------------------------------------------------

    def _start(self, request: HttpRequest) -> None:
        self.response_started = self._ended = False
        self._keep_alive = request.keep_alive and not self._closing
        self._http_1_0 = request.http_1_0
        self._head_only = request.method == b"HEAD"
        self.task = asyncio.get_running_loop().create_task(self._serve(request))

    async def _serve(self, request: HttpRequest) -> None:
        try:
            await self._handle(request, self)
        except HttpError as error:
            self.send_response(error.to_response())
        finally:
            self.task = None
            self.last_active = self._started_at = self._clock.now()
            if not self._ended:
                self.abort()
        if self._transport.is_closing():
            return
        if self._requests:
            self._start(self._requests.popleft())
            if not self._requests:
                self._transport.resume_reading()

    def _reject(self, error: HttpError) -> None:
        """Respond to an invalid request; nothing after it can be parsed.

        What the client still sends is discarded, so that it can read the response; an idle check closes the connection.
        """
        self._requests.clear()
        self._discarding = self._closing = True
        if self.task is not None:
            self._transport.abort()
            return
        self.response_started = self._keep_alive = self._http_1_0 = self._head_only = False
        self.send_response(error.to_response())
