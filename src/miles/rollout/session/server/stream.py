"""Server-sent events: a turn is waited for with signs of life, then told in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, TypeVar

from aiohttp import web

from miles.rollout.session.server.refusal import Dialect, Refusal, body_of

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
ALIVE = b": working\n\n"
"""A comment: every reader of events passes over it, and a connection that is written to is not taken for dead."""

_plain = json.JSONEncoder(separators=(",", ":"), default=str).encode

if find_spec("orjson") is None:

    def dumps(value: Any, /) -> bytes:
        """Compact JSON; what JSON has no form for, as in the metadata of a run's prompts, is told in words."""
        return _plain(value).encode()

else:
    import orjson

    def dumps(value: Any, /) -> bytes:
        """Compact JSON; what JSON has no form for, as in the metadata of a run's prompts, is told in words."""
        try:
            return orjson.dumps(value)
        except TypeError:  # numbers of more than 64 bits are JSON, too
            return _plain(value).encode()


def event(value: dict[str, Any], *, named: bool) -> bytes:
    """One event; ``named`` puts its type before it, as Anthropic and OpenAI's responses have it."""
    head = b"event: " + str(value["type"]).encode() + b"\n" if named else b""
    return head + b"data: " + dumps(value) + b"\n\n"


async def stream(
    request: web.Request,
    work: asyncio.Future[T],
    write: Callable[[T], Iterable[bytes]],
    *,
    dialect: Dialect,
    headers: dict[str, str],
    heartbeat: float,
    explain: Callable[[Exception], Refusal],
) -> web.StreamResponse:
    """Wait for ``work`` and send what ``write`` makes of it.

    Work that fails before the first sign of life is due raises here, so that its status can be told; later its error
    is an event. A client that goes away cancels this, and this the work.
    """
    response: web.StreamResponse | None = None
    try:
        while not (await asyncio.wait((work,), timeout=heartbeat))[0]:
            response = response or await _opened(request, headers)
            await response.write(ALIVE)
        pieces = _pieces(work, write, dialect, explain, raising=response is None)
        response = response or await _opened(request, headers)
        for piece in pieces:
            await response.write(piece)
        await response.write_eof()
    except ConnectionError:  # the client is gone, and there is nobody to tell
        if response is None:
            raise
    finally:
        work.cancel()
    return response


def _pieces(
    task: asyncio.Future[T],
    write: Callable[[T], Iterable[bytes]],
    dialect: Dialect,
    explain: Callable[[Exception], Refusal],
    *,
    raising: bool,
) -> Iterable[bytes]:
    if task.cancelled():
        raise asyncio.CancelledError
    error = task.exception()
    if error is None:
        return write(task.result())
    if raising or not isinstance(error, Exception):
        raise error
    body = body_of(explain(error), dialect)
    return [event(body, named=dialect == "anthropic")]


async def _opened(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    fixed = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=fixed | headers)
    await response.prepare(request)
    return response
