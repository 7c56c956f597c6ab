"""HTTP/1.1 messages of the router: requests with their whole body, response heads, headers; and its clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote

Header = tuple[bytes, bytes]

# Hop-by-hop headers; content-length is written anew for each connection.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding upgrade".split()
)
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
JSON_CONTENT_TYPE = (b"content-type", b"application/json")


class Timer(Protocol):
    """A call that has not been made yet."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds since some start, and delayed calls."""

    def now(self) -> float: ...
    def call_later(self, seconds: float, call: Callable[..., Any], /, *args: Any) -> Timer: ...


class LoopClock:
    """The clock of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = loop.time
        self.call_later = loop.call_later


@dataclass(slots=True, kw_only=True)
class HttpRequest:
    """A client's request. Header names are in lower case; ``target`` is path and query as they were sent.

    ``http_1_0``: the client does not understand chunked responses.
    """

    method: bytes
    target: bytes
    path: str
    query: bytes
    headers: Sequence[Header]
    body: bytes
    keep_alive: bool = True
    http_1_0: bool = False

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, the first if it occurs twice."""
        return next((value for key, value in self.headers if key == name), None)

    def query_value(self, name: str) -> str | None:
        """A value of the query."""
        return next(iter(parse_qs(self.query.decode("latin-1")).get(name, ())), None)

    def json(self) -> dict[str, Any] | None:
        """The body as a JSON object; None if it is something else.

        Raises ``HttpError`` if its nesting is deep, or a string in it cannot be encoded (a lone surrogate).
        """
        try:
            value = json.loads(self.body.decode())
            if isinstance(value, dict) and rb"\u" in self.body:
                json.dumps(value, ensure_ascii=False).encode()
        except RecursionError:
            raise HttpError(400, "The body is nested too deeply.") from None
        except UnicodeEncodeError:
            raise HttpError(400, "A string in the body is not valid Unicode: it has a lone surrogate.") from None
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """A response with its whole body."""

    status: int
    headers: Sequence[Header]
    body: bytes

    def text(self) -> str:
        """The beginning of the body in one line, for error messages."""
        return " ".join(self.body[:500].decode("utf-8", "replace").split())

    def json(self) -> Any:
        """The body as JSON; None if it is not."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


class HttpError(Exception):
    """A request that fails in the router: the response status and a message."""

    def __init__(self, status: int, message: str, headers: Sequence[Header] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers

    def to_response(self) -> HttpResponse:
        error = {"message": self.message, "type": "router_error", "code": self.status}
        return json_response(self.status, {"error": error}, self.headers)


def json_response(status: int, content: Any, headers: Sequence[Header] = ()) -> HttpResponse:
    return HttpResponse(status=status, headers=(JSON_CONTENT_TYPE, *headers), body=json.dumps(content).encode())


def split_target(target: bytes) -> tuple[bytes, str, bytes]:
    """The target as ``/path?query``, its path, unquoted, and its query."""
    if not target.startswith(b"/"):  # a full URL, as a client of a proxy sends it
        target = b"/" + target.partition(b"://")[2].partition(b"/")[2]
    path, _, query = target.partition(b"?")
    text = path.decode("latin-1")
    return target, (unquote(text) if "%" in text else text), query


def end_to_end_headers(headers: Iterable[Header]) -> list[Header]:
    """The headers of a request or a response that are forwarded."""
    forwarded = [header for header in headers if header[0] not in _NOT_FORWARDED]
    connection = [value for name, value in headers if name == b"connection"]
    if not connection or connection == [b"keep-alive"]:
        return forwarded
    dropped = {token.strip().lower() for value in connection for token in value.split(b",")}
    return [header for header in forwarded if header[0] not in dropped]


def replace_authorization(headers: list[Header], engine_key: tuple[Header, ...]) -> list[Header]:
    """The headers with the engines' key instead of the client's, if there is one."""
    if not engine_key:
        return headers
    return [*(header for header in headers if header[0] != b"authorization"), *engine_key]


def request_head(method: bytes, target: bytes, host: bytes, headers: Iterable[Header], length: int) -> bytes:
    """The head of a request to an engine, with a body of ``length`` bytes to follow."""
    parts = [method, b" ", target, b" HTTP/1.1\r\nhost: ", host, b"\r\n"]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    if length or method not in (b"GET", b"HEAD", b"DELETE"):
        parts.append(b"content-length: %d\r\n" % length)
    parts.append(b"\r\n")
    return b"".join(parts)


def response_head(status: int, headers: Iterable[Header], framing: bytes) -> bytes:
    """The head of a response; ``framing`` are the header lines of its length and of the connection."""
    parts = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    parts += (framing, b"\r\n")
    return b"".join(parts)
