"""Connections to engines: kept open between requests, one exchange at a time on each.

An exchange is fed as bytes come in: ``on_head`` once, ``on_body`` for each piece, ``flush`` when nothing more is at
hand, and at the end ``on_end`` or ``on_failure``, once. What is fed may stop the reading with ``pause``.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from miles.cluster.route.clock import Clock
from miles.cluster.route.message import Answer, Header, Refused, request_head

# An engine behind uvicorn closes a connection after five idle seconds; ours must have let go of it before.
IDLE_SECONDS = 4.0
_HEADERS_LIMIT = 256 << 10
_COPIED = 64 << 10  # a body shorter than this leaves in one piece with its head
_REPLY_LIMIT = 64 << 20  # of what the router asks itself


class Broken(Exception):
    """A connection that could not be made or did not last; ``stale`` when it was an old one that had been idle."""

    def __init__(self, sentence: str, *, stale: bool = False) -> None:
        super().__init__(sentence)
        self.stale = stale


class TooLate(Exception):
    """A deadline passed."""


class Exchange(Protocol):
    """Who takes an engine's reply."""

    def on_head(self, status: int, headers: list[Header], length: int | None) -> None: ...
    def on_body(self, data: bytes) -> None: ...
    def flush(self) -> None: ...
    def on_end(self) -> None: ...
    def on_failure(self, error: Exception) -> None: ...


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens, taken apart once. ``prefix`` is the path its endpoints are under."""

    url: str
    host: str
    port: int
    tls: bool
    prefix: bytes
    authority: bytes

    @classmethod
    def of(cls, url: str) -> Address:
        """Refuses what is not the URL of an engine."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            (parts.hostname or "").encode("idna")
        except ValueError:
            raise Refused(400, f"{url} is not the URL of an engine; write one like http://127.0.0.1:30000.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise Refused(400, f"{url} is not the URL of an engine; write one like http://127.0.0.1:30000.")
        if parts.username is not None or parts.password is not None:
            raise Refused(400, "The URL of an engine may hold no name and password; give the engines' key instead.")
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
        """The engine's id: its URL without the scheme."""
        return self.url.partition("://")[2]


class Link(asyncio.Protocol):
    """One connection."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._headers: list[Header] = []
        self._size = 0
        self._status = 0
        self._until_close = False
        self._got_bytes = False
        self._reading = True
        self.used = 0
        self.idle_since = 0.0

    # -- what the rest of the router calls ---------------------------------------------------

    def ask(self, head: bytes, body: bytes, exchange: Exchange) -> None:
        """Send a request; its reply goes to ``exchange``."""
        assert self._exchange is None
        self._exchange, self._got_bytes = exchange, False
        self.used += 1
        if len(body) < _COPIED:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def pause(self) -> None:
        if self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._reading and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    def drop(self) -> None:
        """Close the connection; whoever was being fed is told nothing more."""
        self._exchange = None
        self._transport.abort()

    def fail(self, error: Exception) -> None:
        """Close the connection; whoever was being fed is told why."""
        exchange, self._exchange = self._exchange, None
        self._transport.abort()
        if exchange is not None:
            exchange.on_failure(error)

    @property
    def closing(self) -> bool:
        return self._transport.is_closing()

    # -- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:  # bytes nobody asked for: this connection cannot be trusted with the next reply
            self._transport.abort()
            return
        self._got_bytes = True
        exchange = self._exchange
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(Broken(f"it sent what is not HTTP/1.1 ({error})"))
            return
        if self._exchange is exchange:
            exchange.flush()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        if self._exchange is None:
            return
        if self._until_close and exc is None:
            self._finish()
        else:
            when = "in the middle of a reply" if self._got_bytes else "before it replied"
            stale = self.used > 1 and not self._got_bytes
            self.fail(Broken(f"it closed the connection {when}{f' ({exc})' if exc else ''}", stale=stale))

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
        if self._exchange is None or self._status < 200:
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
        self._exchange.on_head(self._status, self._headers, length)

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.on_body(data)

    def on_message_complete(self) -> None:
        if self._exchange is not None and self._status >= 200:
            self._finish()

    def _finish(self) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        if self._until_close or not self._parser.should_keep_alive():
            self._transport.close()
        else:
            self.resume()
            self._pool.give(self)
        exchange.flush()
        exchange.on_end()


class Pool:
    """The connections to one engine."""

    def __init__(self, address: Address, clock: Clock, connect_seconds: float) -> None:
        self.address = address
        self._clock = clock
        self._connect_seconds = connect_seconds
        self._idle: list[Link] = []
        self._links: set[Link] = set()
        self._tls = ssl.create_default_context() if address.tls else None

    def take(self) -> Link | None:
        """The connection that was used last, when there is one that is free."""
        while self._idle:
            link = self._idle.pop()
            if not link.closing and self._clock.now() - link.idle_since < IDLE_SECONDS:
                return link
            link.drop()
        return None

    async def connect(self) -> Link:
        """A new connection."""
        where, loop = self.address, asyncio.get_running_loop()
        timed_out = False
        connecting = asyncio.ensure_future(
            loop.create_connection(lambda: Link(self), where.host, where.port, ssl=self._tls)
        )

        def give_up() -> None:
            nonlocal timed_out
            timed_out = True
            connecting.cancel()

        timer = self._clock.call_later(self._connect_seconds, give_up)
        try:
            _, link = await connecting
        except asyncio.CancelledError:
            if not timed_out:
                connecting.add_done_callback(_drop_unwanted)
                raise
            raise Broken(f"no connection was made within {self._connect_seconds:g} seconds") from None
        except OSError as error:
            raise Broken(f"no connection could be made ({error.strerror or error})") from None
        finally:
            timer.cancel()
        self._links.add(link)
        return link

    def give(self, link: Link) -> None:
        """Take a connection back whose reply has ended."""
        link.idle_since = self._clock.now()
        self._idle.append(link)

    def forget(self, link: Link) -> None:
        self._links.discard(link)
        if link in self._idle:
            self._idle.remove(link)

    def sweep(self) -> None:
        """Close connections nobody has used for a while."""
        limit = self._clock.now() - IDLE_SECONDS
        for link in [link for link in self._idle if link.idle_since <= limit]:
            self._idle.remove(link)
            link.drop()

    def close(self, why: str) -> None:
        """Close every connection; who is still being fed by one is told why."""
        for link in list(self._links):
            link.fail(Broken(why))
        self._idle.clear()


class Collected:
    """An exchange that keeps the whole reply."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._headers: list[Header] = []
        self._parts: list[bytes] = []
        self._size = 0

    def on_head(self, status: int, headers: list[Header], length: int | None) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > _REPLY_LIMIT:
            self.on_failure(Broken(f"its reply is longer than {_REPLY_LIMIT} bytes"))
        else:
            self._parts.append(data)

    def flush(self) -> None: ...

    def on_end(self) -> None:
        if not self.reply.done():
            self.reply.set_result(Answer(status=self._status, headers=self._headers, body=b"".join(self._parts)))

    def on_failure(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # seen, even when nobody comes to await it


def _drop_unwanted(connecting: asyncio.Future[tuple[asyncio.Transport, Link]]) -> None:
    """Who wanted a connection was cancelled in the moment it was made."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[1].drop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request of the router's own, or one it passes on to every engine."""

    method: bytes = b"GET"
    target: bytes
    headers: tuple[Header, ...] = ()
    body: bytes = b""


async def call(pool: Pool, clock: Clock, seconds: float, question: Question) -> Answer:
    """One request of the router's own, on a connection of its own, so that it is sent once and never again.

    Raises Broken or TooLate.
    """
    exchange = Collected()
    link: Link | None = None
    where = pool.address

    def too_late() -> None:
        exchange.on_failure(TooLate(f"it did not answer within {seconds:g} seconds"))

    timer = clock.call_later(seconds, too_late)
    try:
        link = await pool.connect()
        target = where.prefix + question.target
        head = request_head(question.method, target, where.authority, question.headers, len(question.body))
        link.ask(head, question.body, exchange)
        return await exchange.reply
    except BaseException:
        if link is not None:
            link.drop()
        raise
    finally:
        timer.cancel()
