"""Server-sent events: news of the answers of one request, in the order it comes, as fast as the client reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from aiohttp import web

from miles.backends.native.server.desk import Desk
from miles.backends.native.server.reply import Reply

DONE = b"data: [DONE]\n\n"


if find_spec("orjson") is None:
    _encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

    def dumps(value: Any, /) -> bytes:
        """Compact JSON."""
        return _encode(value).encode()

else:  # eight times as fast, and the log-probs of an answer are a lot of JSON
    from orjson import dumps


def event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


async def open_stream(request: web.Request) -> web.StreamResponse:
    """Send the headers of a stream."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    return response


async def news(desk: Desk, replies: Sequence[Reply]) -> AsyncIterator[tuple[int, Reply]]:
    """Which reply has grown, again and again; the last time of each it has its finish. Slow readers miss steps."""
    changes = _Changes(desk.clock)
    tasks = [asyncio.create_task(changes.follow(i, reply)) for i, reply in enumerate(replies)]
    left = set(range(len(replies)))
    try:
        while left:
            for index in await changes.next():
                if index in left:
                    if replies[index].finish is not None:
                        left.discard(index)
                    yield index, replies[index]
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


class _Changes:
    """Who has grown since it was last asked. The first error of anyone is raised there."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed: dict[int, None] = {}
        self._wake = asyncio.Event()
        self._error: Exception | None = None

    async def follow(self, index: int, reply: Reply) -> None:
        try:
            async for piece in reply.answer:
                reply.grow(piece, self._clock())
                self._note(index)
            reply.end(self._clock())
        except Exception as error:  # whatever ends an answer is raised where the news is read
            self._error = self._error or error
        self._note(index)

    def _note(self, index: int) -> None:
        self._changed[index] = None
        self._wake.set()

    async def next(self) -> list[int]:
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
        changed, self._changed = self._changed, {}
        return list(changed)
