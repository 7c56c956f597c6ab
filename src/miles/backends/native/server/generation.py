"""Generation endpoints: ``/generate``, ``/v1/chat/completions`` and ``/v1/completions``, complete or streamed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from miles.backends.native.server.api.chat import (
    ChatFormatter,
    ResponseOptions,
    has_media,
    parse_chat_body,
    parse_completion_body,
)
from miles.backends.native.server.api.generate import format_generate, parse_generate
from miles.backends.native.server.api.openai_response import (
    ChatChunkFormatter,
    ResponseHeader,
    TextChunkFormatter,
    format_chat_completion,
    format_text_completion,
)
from miles.backends.native.server.api.request_types import ParsedRequest
from miles.backends.native.server.config import ServeConfig
from miles.backends.native.server.metrics import ServerMetrics
from miles.backends.native.server.output_state import OutputState
from miles.backends.native.server.request_handler import LONG_TEXT, RequestHandler
from miles.rollout.serving.errors import RequestError, error_body
from miles.rollout.serving.http import SSE_DONE, SSE_HEADERS, dump_json, format_event, load_json, read_chunks

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LARGE_BODY = 1 << 20
"""Bytes of a body from which it is parsed on a thread, not on the event loop."""
MANY_TOKENS = 4096
"""Tokens of a response from which it is written on a thread."""


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=dump_json(value), status=status, content_type="application/json")


async def read_json_body(request: web.Request) -> Any:
    limit = request.client_max_size
    raw = await read_chunks(request.content.iter_any(), limit, f"the {limit >> 20} MiB of --max-body-mib")
    return await asyncio.to_thread(load_json, raw) if len(raw) > LARGE_BODY else load_json(raw)


class GenerationApi:
    """The generation endpoints of one engine. ``convert_error`` turns any exception into the client's error."""

    def __init__(
        self,
        handler: RequestHandler,
        formatter: ChatFormatter | None,
        config: ServeConfig,
        metrics: ServerMetrics,
        convert_error: Callable[[web.Request, Exception], RequestError],
        served_model_name: str = "model",
    ) -> None:
        self._served_model_name = served_model_name
        self._handler = handler
        self._formatter = formatter
        self._config = config
        self._metrics = metrics
        self._convert_error = convert_error

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """SGLang's native endpoint."""
        body = await read_json_body(request)
        try:
            requests, single, stream = parse_generate(body, new_rid)
            async with self._submit(requests) as states:
                if stream:
                    return await self._stream_native(request, states, single)
                await self._handler.wait_finished(states)
                bodies = [format_generate(state) for state in states]
                return await self._write_json(bodies[0] if single else bodies, states)
        except RequestError as error:
            is_stream = isinstance(body, dict) and body.get("stream") is True
            if error.malformed or error.status != 400 or not is_stream:
                raise
            response = await _open_stream(request)
            await response.write(format_event(error_body(error, "sglang_stream")) + SSE_DONE)
            await response.write_eof()
            return response

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's chat completions."""
        body = await _read_openai_body(request)
        if self._formatter is None:
            raise RequestError(
                "This server has no tokenizer (--skip-tokenizer-init), so it cannot chat; use /generate."
            )
        parse = partial(parse_chat_body, body, self._formatter, new_rid)
        is_long = (request.content_length or LARGE_BODY) >= LONG_TEXT or has_media(body)
        requests, options, stream = await asyncio.to_thread(parse) if is_long else parse()
        return await self._serve_openai(request, requests, options, stream, format_chat_completion, ChatChunkFormatter)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's older completions."""
        body = await _read_openai_body(request)
        tokenizer = self._handler.tokenizer
        if tokenizer is None:
            raise RequestError(
                "This server has no tokenizer (--skip-tokenizer-init), so it returns no text; use /generate."
            )
        requests, options, stream = parse_completion_body(body, tokenizer.text, new_rid)
        return await self._serve_openai(request, requests, options, stream, format_text_completion, TextChunkFormatter)

    async def _serve_openai(
        self,
        request: web.Request,
        requests: Sequence[ParsedRequest],
        options: ResponseOptions,
        stream: bool,
        format_body: Callable[[Sequence[OutputState], ResponseOptions, ResponseHeader], dict[str, Any]],
        chunk_formatter: type[ChatChunkFormatter],
    ) -> web.StreamResponse:
        adapter = split_adapter(options.model, self._served_model_name)
        if adapter is not None:
            requests = [replace(each, lora=adapter) for each in requests]
        header = ResponseHeader(
            id=requests[0].rid,
            model=options.model,
            created=int(time.time()),
            cache_report=self._config.enable_cache_report,
        )
        async with self._submit(requests) as states:
            if not stream:
                await self._handler.wait_finished(states)
                return await self._write_json(format_body(states, options, header), states)
            chunks = chunk_formatter(states, options, header)
            return await self._stream(request, states, chunks.format_chunks, chunks.format_end)

    async def _stream_native(self, request: web.Request, states: list[OutputState], single: bool) -> web.StreamResponse:
        sent = [(0, 0)] * len(states)

        def format_chunks(index: int) -> Iterator[dict[str, Any]]:
            state = states[index]
            body = format_generate(state, *sent[index])
            if self._config.incremental_streaming_output:
                sent[index] = (len(state.tokens), len(state.text or ""))
            yield body if single else body | {"index": index}

        return await self._stream(request, states, format_chunks, lambda: ())

    async def _stream(
        self,
        request: web.Request,
        states: list[OutputState],
        format_chunks: Callable[[int], Iterable[dict[str, Any]]],
        format_end: Callable[[], Iterable[dict[str, Any]]],
    ) -> web.StreamResponse:
        response = await _open_stream(request)
        try:
            async for index in follow_changes(states, self._handler.clock):
                for chunk in format_chunks(index):
                    await response.write(format_event(chunk))
            for chunk in format_end():
                await response.write(format_event(chunk))
        except ConnectionError:
            return response
        except Exception as error:  # the status is sent already, so the error goes into the stream
            body = error_body(self._convert_error(request, error), "sglang_stream")
            await response.write(format_event(body))
        await response.write(SSE_DONE)
        await response.write_eof()
        return response

    @asynccontextmanager
    async def _submit(self, requests: Sequence[ParsedRequest]) -> AsyncIterator[list[OutputState]]:
        async with self._handler.submit(requests) as states:
            try:
                yield states
            finally:
                self._metrics.observe_outputs(states)

    async def _write_json(self, body: Any, states: Sequence[OutputState]) -> web.Response:
        if sum(len(state.tokens) for state in states) > MANY_TOKENS:
            text = await asyncio.to_thread(dump_json, body)
        else:
            text = dump_json(body)
        return web.Response(body=text, content_type="application/json")


def split_adapter(model: str, served_model_name: str) -> str | None:
    """The adapter that OpenAI's ``model`` names as BASE:ADAPTER; None for a model without one.

    >>> split_adapter("qwen:pirate", "qwen"), split_adapter("qwen:8b", "qwen:8b"), split_adapter("qwen:8b:a", "qwen:8b")
    ('pirate', None, 'a')
    """
    if model == served_model_name:
        return None
    if model.startswith(f"{served_model_name}:"):
        return model[len(served_model_name) + 1 :].strip() or None
    return model.partition(":")[2].strip() or None


def new_rid() -> str:
    return uuid.uuid4().hex


async def _read_openai_body(request: web.Request) -> Any:
    if request.content_type != "application/json":
        raise RequestError("The body must be JSON: send Content-Type: application/json.", malformed=True)
    return await read_json_body(request)


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers=SSE_HEADERS)
    await response.prepare(request)
    return response


# -- following outputs ----------------------------------------------------------------------


async def follow_changes(states: Sequence[OutputState], clock: Callable[[], float]) -> AsyncIterator[int]:
    """The index of each output that has grown; the last time it has its finish reason. A slow reader skips steps."""
    changes = _Changes(clock)
    tasks = [asyncio.create_task(changes.follow(i, state)) for i, state in enumerate(states)]
    unfinished = set(range(len(states)))
    try:
        while unfinished:
            for index in await changes.wait_next():
                if index in unfinished:
                    if states[index].finish_reason is not None:
                        unfinished.discard(index)
                    yield index
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


class _Changes:
    """Which outputs have grown since the last call. The first error of any is raised there."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed: dict[int, None] = {}
        self._wake = asyncio.Event()
        self._error: Exception | None = None

    async def follow(self, index: int, state: OutputState) -> None:
        try:
            async for chunk in state.output:
                state.add_chunk(chunk, self._clock())
                self._mark(index)
            state.finish(self._clock())
        except Exception as error:  # raised where the changes are read
            self._error = self._error or error
        self._mark(index)

    def _mark(self, index: int) -> None:
        self._changed[index] = None
        self._wake.set()

    async def wait_next(self) -> list[int]:
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
        changed, self._changed = self._changed, {}
        return list(changed)
