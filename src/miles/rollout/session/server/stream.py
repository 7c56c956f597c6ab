"""Server-sent events: a turn is told in pieces while it comes, with signs of life where it says nothing for long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
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


class Post:
    """Tokens of a turn between whoever draws them and whoever tells them; who is slow finds more at once."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._wake = asyncio.Event()

    def hear(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)
        self._wake.set()

    def wake(self, _: object = None) -> None:
        """There may be nothing more to wait for."""
        self._wake.set()

    async def next(self, seconds: float) -> list[int]:
        """What has come since; nothing, where nothing comes for so long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
        self._wake.clear()
        tokens, self._tokens = self._tokens, []
        return tokens


async def stream(
    request: web.Request,
    work: asyncio.Future[T],
    post: Post,
    more: Callable[[Sequence[int]], bytes],
    last: Callable[[T], bytes],
    *,
    dialect: Dialect,
    headers: dict[str, str],
    heartbeat: float,
    explain: Callable[[Exception], Refusal],
) -> web.StreamResponse:
    """Send what ``more`` makes of the tokens in the ``post`` until ``work`` has ended, then what ``last`` makes of it.

    Work that fails before anything was sent raises here, so that its status can be told; later its error is an event.
    A client that goes away cancels this, and this the work.
    """
    response: web.StreamResponse | None = None
    work.add_done_callback(post.wake)
    now = asyncio.get_running_loop().time
    due = now() + heartbeat
    try:
        while not work.done():
            tokens = await post.next(due - now())
            said = more(tokens) if tokens and not work.done() else b""
            if said or now() >= due:
                response = response or await _opened(request, headers)
                await response.write(said or ALIVE)
                due = now() + heartbeat
        ending = _ending(work, last, dialect, explain, raising=response is None)
        response = response or await _opened(request, headers)
        await response.write(ending)
        await response.write_eof()
    except ConnectionError:  # the client is gone, and there is nobody to tell
        if response is None:
            raise
    finally:
        work.cancel()
    return response


def _ending(
    task: asyncio.Future[T],
    last: Callable[[T], bytes],
    dialect: Dialect,
    explain: Callable[[Exception], Refusal],
    *,
    raising: bool,
) -> bytes:
    if task.cancelled():
        raise asyncio.CancelledError
    error = task.exception()
    if error is None:
        return last(task.result())
    if raising or not isinstance(error, Exception):
        raise error
    body = body_of(explain(error), dialect)
    return event(body, named=dialect == "anthropic")


async def _opened(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    fixed = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=fixed | headers)
    await response.prepare(request)
    return response
