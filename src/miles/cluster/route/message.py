"""HTTP/1.1 messages as the router holds them: requests with their whole body, heads of replies, and both as bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, unquote

Header = tuple[bytes, bytes]

# What concerns one connection and not the message; content-length is written anew for each.
_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding upgrade".split()
)
_OURS = _HOP | {b"host", b"content-length", b"expect"}
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
JSON = (b"content-type", b"application/json")


@dataclass(slots=True, kw_only=True)
class Request:
    """A client's request. Names of headers are in lower case; ``target`` is path and query as they were sent.

    ``is_old`` is HTTP/1.0, which knows no chunks.
    """

    method: bytes
    target: bytes
    path: str
    query: bytes
    headers: Sequence[Header]
    body: bytes
    keep_alive: bool = True
    is_old: bool = False

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, the first where it is there twice."""
        return next((value for key, value in self.headers if key == name), None)

    def asked(self, name: str) -> str | None:
        """A value of the query."""
        return next(iter(parse_qs(self.query.decode("latin-1")).get(name, ())), None)

    def json(self) -> dict[str, Any] | None:
        """The body as a JSON object; None when it is something else."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole reply."""

    status: int
    headers: Sequence[Header]
    body: bytes

    def text(self) -> str:
        """The beginning of the body in one line, for sentences about what went wrong."""
        return " ".join(self.body[:500].decode("utf-8", "replace").split())

    def json(self) -> Any:
        """The body as JSON; None when it is not."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class Refused(Exception):
    """A request that gets no further: the status to answer with and one sentence."""

    def __init__(self, status: int, sentence: str, headers: Sequence[Header] = ()) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = headers

    def answer(self) -> Answer:
        error = {"message": self.sentence, "type": "router_error", "code": self.status}
        return json_answer(self.status, {"error": error}, self.headers)


def json_answer(status: int, content: Any, headers: Sequence[Header] = ()) -> Answer:
    return Answer(status=status, headers=(JSON, *headers), body=json.dumps(content).encode())


def split_target(target: bytes) -> tuple[bytes, str, bytes]:
    """What follows the method as ``/path?query``, then its path, unquoted, and its query."""
    if not target.startswith(b"/"):  # a full URL, as a client of a proxy sends it
        target = b"/" + target.partition(b"://")[2].partition(b"/")[2]
    path, _, query = target.partition(b"?")
    text = path.decode("latin-1")
    return target, (unquote(text) if "%" in text else text), query


def passed_on(headers: Iterable[Header]) -> list[Header]:
    """The headers of a request or a reply that belong to the message."""
    kept = [header for header in headers if header[0] not in _OURS]
    named = [value for name, value in headers if name == b"connection"]
    if not named or named == [b"keep-alive"]:
        return kept
    dropped = {word.strip().lower() for value in named for word in value.split(b",")}
    return [header for header in kept if header[0] not in dropped]


def request_head(method: bytes, target: bytes, host: bytes, headers: Iterable[Header], length: int) -> bytes:
    """The head of a request as it goes to an engine, with a body of ``length`` bytes to follow."""
    parts = [method, b" ", target, b" HTTP/1.1\r\nhost: ", host, b"\r\n"]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    if length or method not in (b"GET", b"HEAD", b"DELETE"):
        parts.append(b"content-length: %d\r\n" % length)
    parts.append(b"\r\n")
    return b"".join(parts)


def reply_head(status: int, headers: Iterable[Header], framing: bytes) -> bytes:
    """The head of a reply; ``framing`` are the lines that say how long it is and whether the connection stays."""
    line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status
    parts = [line]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    parts += (framing, b"\r\n")
    return b"".join(parts)
