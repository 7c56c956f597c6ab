"""Connections from clients: requests are read whole, one is served at a time, its reply is passed on as it comes.

A client that reads slowly holds the engine's reply back: when its connection is full, ``source`` is paused.
A client that goes away cancels the task that serves it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast

import httptools

from miles.cluster.route.clock import Clock
from miles.cluster.route.message import Answer, Header, Refused, Request, reply_head, split_target

IDLE_SECONDS = 75.0
STALLED_SECONDS = 30.0  # for a request of which a part has come
_HEADERS_LIMIT = 64 << 10


class Source(Protocol):
    """Where a reply comes from."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


Handle = Callable[[Request, "Client"], Awaitable[None]]


class Client(asyncio.Protocol):
    """One connection. Who serves a request calls ``answer``, or ``begin``, ``write``, ``flush`` and ``end``."""

    def __init__(self, handle: Handle, clock: Clock, clients: set[Client], limit: int) -> None:
        self._handle = handle
        self._clock = clock
        self._clients = clients
        self._limit = limit
        self._parser = httptools.HttpRequestParser(self)
        self._requests: deque[Request] = deque()
        self.task: asyncio.Task[None] | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = False
        self._deaf = False
        self._is_old = False
        self._bodyless = False
        self._reset()
        # the reply
        self.started = False
        self._ended = False
        self._source: Source | None = None
        self._full = False
        self._chunked = False
        self._keep = True
        self._out: list[bytes] = []
        self.active = clock.now()

    # -- what is called to reply ---------------------------------------------------------------

    def answer(self, reply: Answer) -> None:
        """Send a whole reply."""
        self.begin(reply.status, reply.headers, len(reply.body), None)
        self.write(reply.body)
        self.end()

    def begin(self, status: int, headers: Sequence[Header], length: int | None, source: Source | None) -> None:
        """Send the head of a reply, of unknown length when ``length`` is None."""
        assert not self.started
        self.started, self._source, self._chunked = True, source, False
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self._is_old:
            framing, self._keep = b"", False
        else:
            framing, self._chunked = b"transfer-encoding: chunked\r\n", True
        if not self._keep:
            framing += b"connection: close\r\n"
        elif self._is_old:
            framing += b"connection: keep-alive\r\n"
        self._out.append(reply_head(status, headers, framing))
        if self._full and source is not None:
            source.pause()

    def write(self, data: bytes) -> None:
        if not data or self._bodyless:
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

    def end(self) -> None:
        """The reply is complete."""
        if self._chunked and not self._bodyless:
            self._out.append(b"0\r\n\r\n")
        self.flush()
        self._source, self._ended = None, True
        if self._deaf:
            self._transport.write_eof()
        elif not self._keep:
            self._transport.close()

    def cut(self) -> None:
        """Break a reply off in such a way that the client notices."""
        self._out = []
        self._transport.abort()

    def close_when_idle(self) -> None:
        """Take no further request on this connection."""
        self._keep = False
        self._closing = True
        if self.task is None:
            self._transport.close()

    def sweep(self) -> None:
        """Close a connection on which nothing has happened for too long."""
        limit = STALLED_SECONDS if self._part else IDLE_SECONDS
        if self.task is None and self._clock.now() - self.active > limit:
            self._transport.close()

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._clients.add(self)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self.active = self._clock.now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, Refused):
                raise
            self._refuse(cause)
        except httptools.HttpParserError as error:
            self._refuse(Refused(400, f"This is not an HTTP/1.1 request: {error}."))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients.discard(self)
        self._requests.clear()
        self._closing = True
        self.gone.set_result(None)
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self._full = True
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        self._full = False
        if self._source is not None:
            self._source.resume()

    # -- httptools ------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._part = False
        self._target = b""
        self._headers: list[Header] = []
        self._body: list[bytes] = []
        self._head_size = self._body_size = 0

    def on_message_begin(self) -> None:
        self._reset()
        self._part = True

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        self._headers.append((name.lower(), value))

    def _count(self, size: int) -> None:
        self._head_size += size
        if self._head_size > _HEADERS_LIMIT:
            raise Refused(431, f"The request's head is longer than {_HEADERS_LIMIT} bytes.")

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            raise Refused(501, "The router speaks HTTP/1.1 only; leave out the header Upgrade.")
        for name, value in self._headers:
            if name == b"content-length" and int(value) > self._limit:
                raise self._too_long()
            if name == b"expect" and value.lower() == b"100-continue" and self.task is None:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body_size += len(data)
        if self._body_size > self._limit:
            raise self._too_long()
        self._body.append(data)

    def _too_long(self) -> Refused:
        return Refused(
            413, f"The request's body is longer than {self._limit} bytes, the most --max-payload-size allows."
        )

    def on_message_complete(self) -> None:
        target, path, query = split_target(self._target)
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        request = Request(
            method=self._parser.get_method(),
            target=target,
            path=path,
            query=query,
            headers=self._headers,
            body=body,
            keep_alive=self._parser.should_keep_alive(),
            is_old=self._parser.get_http_version() == "1.0",
        )
        self._reset()
        if self.task is None:
            self._start(request)
        else:  # sent before the last one was answered: it waits, and so does the rest
            self._requests.append(request)
            if len(self._requests) == 1:
                self._transport.pause_reading()

    # -- serving ----------------------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        self.started = self._ended = False
        self._keep = request.keep_alive and not self._closing
        self._is_old = request.is_old
        self._bodyless = request.method == b"HEAD"
        self.task = asyncio.get_running_loop().create_task(self._serve(request))

    async def _serve(self, request: Request) -> None:
        try:
            await self._handle(request, self)
        except Refused as refused:
            self.answer(refused.answer())
        finally:
            self.task = None
            self.active = self._clock.now()
            if not self._ended:
                self.cut()
        if self._transport.is_closing():
            return
        if self._requests:
            self._start(self._requests.popleft())
            if not self._requests:
                self._transport.resume_reading()

    def _refuse(self, refused: Refused) -> None:
        """Answer what cannot be read as a request; nothing after it can be trusted.

        What the client still sends is thrown away, so that it comes to read the answer; the sweep closes.
        """
        self._requests.clear()
        self._deaf = self._closing = True
        if self.task is not None:
            self._transport.abort()
            return
        self.started = self._keep = self._is_old = self._bodyless = False
        self.answer(refused.answer())
