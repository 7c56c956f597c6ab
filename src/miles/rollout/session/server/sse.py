"""Server-sent events of a turn: deltas while tokens arrive, and keep-alive comments while none do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from aiohttp import web

from miles.rollout.serving.errors import ErrorFormat, RequestError, error_body
from miles.rollout.serving.http import SSE_HEADERS, SSE_KEEPALIVE, format_event
from miles.rollout.serving.output_parser import StreamingParser
from miles.rollout.session.server.deltas import StreamFormatter
from miles.rollout.session.server.types import TurnResult


class TokenQueue:
    """Tokens between the engine, which adds them, and the stream; a slow stream gets more of them at once."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._wake = asyncio.Event()

    def add(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)
        self._wake.set()

    def wake(self, _: object = None) -> None:
        """End a wait although there may be no tokens."""
        self._wake.set()

    async def take(self, timeout: float) -> list[int]:
        """All tokens since the last call; none if none arrive within ``timeout``."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout)
        self._wake.clear()
        tokens, self._tokens = self._tokens, []
        return tokens


async def stream_turn(
    request: web.Request,
    work: asyncio.Future[TurnResult],
    queue: TokenQueue,
    parser: StreamingParser,
    formatter: StreamFormatter,
    *,
    headers: dict[str, str],
    heartbeat: float,
    convert_error: Callable[[Exception], RequestError],
) -> web.StreamResponse:
    """Send deltas of the tokens in ``queue`` until ``work`` has ended, then the end of its result.

    If ``work`` fails before anything was sent, its error is raised here, so that the response has its status; after
    that the error is an event. A client that disconnects cancels this, and with it the work.
    """
    response: web.StreamResponse | None = None
    work.add_done_callback(queue.wake)
    now = asyncio.get_running_loop().time
    due = now() + heartbeat
    try:
        while not work.done():
            tokens = await queue.take(due - now())
            data = b""
            if tokens and not work.done():
                parser.add(tokens)
                data = b"".join(_format_events(formatter, parser))
            if data or now() >= due:
                response = response or await _open_stream(request, headers)
                await response.write(data or SSE_KEEPALIVE)
                due = now() + heartbeat
        ending = _format_ending(work, formatter, convert_error, raising=response is None)
        response = response or await _open_stream(request, headers)
        await response.write(ending)
        await response.write_eof()
    except ConnectionError:  # the client has disconnected
        if response is None:
            raise
    finally:
        work.cancel()
    return response


def _format_events(formatter: StreamFormatter, parser: StreamingParser) -> Sequence[bytes]:
    return [format_event(event, named=formatter.named_events) for event in formatter.format_delta(parser.parse())]


def _format_ending(
    work: asyncio.Future[TurnResult],
    formatter: StreamFormatter,
    convert_error: Callable[[Exception], RequestError],
    *,
    raising: bool,
) -> bytes:
    if work.cancelled():
        raise asyncio.CancelledError
    error = work.exception()
    if error is None:
        events = formatter.format_end(work.result())
        return b"".join(format_event(event, named=formatter.named_events) for event in events) + formatter.done
    if raising or not isinstance(error, Exception):
        raise error
    error_format: ErrorFormat = formatter.error_format
    return format_event(error_body(convert_error(error), error_format), named=error_format == "anthropic")


async def _open_stream(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(headers=SSE_HEADERS | headers)
    await response.prepare(request)
    return response
