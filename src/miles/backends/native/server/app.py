"""The server: routes, keys, limits, and the way from a body to a reply."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from miles.backends.native.engine import NativeEngine
from miles.backends.native.server.card import Card
from miles.backends.native.server.chat import Speaker, Told, read_chat, speaker_of
from miles.backends.native.server.checker import Checker
from miles.backends.native.server.completions import read_completions
from miles.backends.native.server.config import ServeConfig
from miles.backends.native.server.control import Control, json_reply
from miles.backends.native.server.desk import Desk
from miles.backends.native.server.fields import read_json
from miles.backends.native.server.generate import Errand, read_generate
from miles.backends.native.server.labels import Labels
from miles.backends.native.server.metrics import Metrics
from miles.backends.native.server.native import body_of
from miles.backends.native.server.openai import ChatPieces, Frame, TextPieces, chat_body, text_body, usage_piece
from miles.backends.native.server.refusal import Refusal, native_body, openai_body
from miles.backends.native.server.reply import Reply
from miles.backends.native.server.routes import add_routes
from miles.backends.native.server.stream import DONE, dumps, event, news, open_stream
from miles.core.errors import EngineError
from miles.models.tokenizer import HubTokenizer

Pieces = ChatPieces | TextPieces
LARGE = 1 << 20
"""Bytes or tokens of a body from which on it is read or written beside the event loop."""
MANY = 4096
HANGING_SECONDS = 5.0


class Server:
    """One engine behind HTTP. The engine is its maker's to close.

    ``start`` and ``stop`` belong to one event loop, that of the engine. Without a tokenizer requests bring tokens.
    """

    def __init__(
        self,
        engine: NativeEngine,
        tokenizer: HubTokenizer | None,
        *,
        config: ServeConfig | None = None,
        card: Card | None = None,
        api_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config or ServeConfig()
        self.card = card or Card()
        self.engine = engine
        self.desk = Desk(engine, tokenizer, Labels(self.config.weight_version), clock)
        self.control = Control(self.desk, self.card, ranks=self.config.tensor_parallel_size)
        self.checker = Checker(self.desk, ranks=self.config.tensor_parallel_size)
        self.metrics = Metrics(self.card.served_model_name)
        self.speaker: Speaker | None = None
        if tokenizer is not None:
            self.speaker = speaker_of(
                tokenizer,
                self.card.defaults,
                tool_call_parser=self.config.tool_call_parser,
                reasoning_parser=self.config.reasoning_parser,
            )
        self.clock = clock
        self._key = api_key
        self._runner: web.AppRunner | None = None
        self._site: web.BaseSite | None = None

    @property
    def has_key(self) -> bool:
        """Must clients send one?"""
        return self._key is not None

    # -- coming and going -------------------------------------------------------------------

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port, which is a free one for port 0."""
        app = web.Application(client_max_size=self.config.max_body_mib << 20, middlewares=[self._guard])
        add_routes(app, self)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, port, reuse_address=True)
        await self._site.start()
        return int(self._runner.addresses[0][1])

    async def drain(self, seconds: float) -> None:
        """Take no more requests; those under way have so long to end, and then are ended with what they have."""
        self.desk.draining = True
        if self._site is not None:
            await self._site.stop()
            self._site = None
        try:
            await asyncio.wait_for(self.desk.gate.empty(), seconds)
        except TimeoutError:
            await self.engine.resume()
            await self.engine.abort()
            with suppress(TimeoutError):  # a client that does not read is not waited for
                await asyncio.wait_for(self.desk.gate.empty(), HANGING_SECONDS)

    async def stop(self) -> None:
        """Close every connection; what is under way is let go of."""
        self.desk.draining = True
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self.control.close()

    # -- every request ----------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the key; say in the API's own way what went wrong; count."""
        path = "unknown" if request.match_info.http_exception else request.match_info.route.resource.canonical  # pyright: ignore[reportOptionalMemberAccess]
        try:
            response = self._turned_away(request) or await handler(request)
        except Refusal as refusal:
            response = self._refused(request, refusal)
        except web.HTTPRequestEntityTooLarge:
            limit = f"The body is larger than the {self.config.max_body_mib} MiB of --max-body-mib."
            response = self._refused(request, Refusal(limit, status=413))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            response = json_reply({"detail": error.reason}, error.status)
            response.headers.extend({"Allow": error.headers["Allow"]} if "Allow" in error.headers else {})
        except Exception as error:  # whatever it is, the client is told no more than that it was ours
            response = self._refused(request, self._failure(request, error))
        self.metrics.request(path, response.status)
        return response

    def _turned_away(self, request: web.Request) -> web.Response | None:
        """Whoever has no key; and, where none is needed, web pages that make a browser on this machine ask.

        Health and metrics need no key: whoever watches the server need not be able to ask it.
        """
        if request.path.startswith(("/health", "/metrics")):
            return None
        if self._key is None:
            from_a_page = not self.config.allow_unauthenticated and is_from_a_page(request.headers)
            return json_reply({"error": "Forbidden"}, 403) if from_a_page else None
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secrets.compare_digest(token.encode(), self._key.encode()):
            return None
        return json_reply({"error": "Unauthorized"}, 401)

    def _failure(self, request: web.Request, error: Exception) -> Refusal:
        """What a client is told of an error: the engine's own sentences, and of others only that there was one."""
        if isinstance(error, EngineError):
            return Refusal(f"{error}.", status=503 if self.desk.draining or self.engine.lost else 400)
        request.app.logger.exception("%s %s failed", request.method, request.path, exc_info=error)
        return Refusal(f"The server failed on this request ({type(error).__name__}); its log says more.", status=500)

    def _refused(self, request: web.Request, refusal: Refusal) -> web.Response:
        body = openai_body if request.path.startswith("/v1/") else native_body
        return json_reply(body(refusal), refusal.status)

    async def body(self, request: web.Request) -> Any:
        """The JSON a request brings."""
        raw = await request.read()
        return await asyncio.to_thread(read_json, raw) if len(raw) > LARGE else read_json(raw)

    # -- answers ----------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """SGLang's own endpoint."""
        body = await self.body(request)
        try:
            errand = read_generate(body, new_rid)
            async with self._serve(errand) as replies:
                if errand.stream:
                    return await self._stream_native(request, replies, errand)
                await self.desk.finish(replies)
                bodies = [body_of(reply) for reply in replies]
                return await self._written(bodies[0] if errand.single else bodies, replies)
        except Refusal as refusal:
            if (
                refusal.malformed
                or refusal.status != 400
                or not (isinstance(body, dict) and body.get("stream") is True)
            ):
                raise
            return await self._refuse_in_stream(request, refusal)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's chat."""
        body = await self._openai_body(request)
        speaker = self.speaker
        if speaker is None:
            raise Refusal("This server has no tokenizer (--skip-tokenizer-init), so it cannot chat; use /generate.")
        errand, told = read_chat(body, speaker, new_rid)
        return await self._openai(request, errand, told, chat_body, ChatPieces, "chat.completion.chunk")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's older endpoint."""
        body = await self._openai_body(request)
        tokenizer = self.desk.tokenizer
        if tokenizer is None:
            raise Refusal("This server has no tokenizer (--skip-tokenizer-init), so it writes no text; use /generate.")
        errand, told = read_completions(body, tokenizer.text, new_rid)
        return await self._openai(request, errand, told, text_body, TextPieces, "text_completion")

    async def _openai_body(self, request: web.Request) -> Any:
        if request.content_type != "application/json":
            raise Refusal("The body must be JSON: send Content-Type: application/json.", malformed=True)
        return await self.body(request)

    @asynccontextmanager
    async def _serve(self, errand: Errand) -> AsyncIterator[list[Reply]]:
        async with self.desk.serve(errand.wishes) as replies:
            try:
                yield replies
            finally:
                self.metrics.answers(replies)

    async def _openai(
        self,
        request: web.Request,
        errand: Errand,
        told: Told,
        whole: Callable[[Sequence[Reply], Told, Frame], dict[str, Any]],
        pieces: Callable[[int, Told, Frame], Pieces],
        kind: str,
    ) -> web.StreamResponse:
        frame = Frame(
            id=errand.wishes[0].rid,
            model=told.model,
            created=int(time.time()),
            cache_report=self.config.enable_cache_report,
        )
        async with self._serve(errand) as replies:
            if not errand.stream:
                await self.desk.finish(replies)
                return await self._written(whole(replies, told, frame), replies)
            stream = pieces(len(replies), told, frame)
            last = usage_piece(kind, replies, told, frame) if told.usage else None

            def write(index: int, reply: Reply) -> Iterator[dict[str, Any]]:
                return stream.news(index, reply, replies)

            def close() -> Iterator[dict[str, Any]]:
                if last is not None:
                    yield usage_piece(kind, replies, told, frame)

            return await self._stream(request, replies, write, close)

    async def _stream_native(self, request: web.Request, replies: list[Reply], errand: Errand) -> web.StreamResponse:
        seen = [(0, 0)] * len(replies)

        def write(index: int, reply: Reply) -> Iterator[dict[str, Any]]:
            if self.config.incremental_streaming_output:
                tokens, text = seen[index]
                body = body_of(reply, tokens, text)
                seen[index] = (len(reply.tokens), len(reply.text or ""))
            else:
                body = body_of(reply)
            yield body if errand.single else body | {"index": index}

        return await self._stream(request, replies, write, lambda: iter(()))

    async def _stream(
        self,
        request: web.Request,
        replies: list[Reply],
        write: Callable[[int, Reply], Iterator[dict[str, Any]]],
        close: Callable[[], Iterator[dict[str, Any]]],
    ) -> web.StreamResponse:
        response = await open_stream(request)
        try:
            async for index, reply in news(self.desk, replies):
                for piece in write(index, reply):
                    await response.write(event(piece))
            for piece in close():
                await response.write(event(piece))
        except ConnectionError:
            return response
        except Exception as error:  # the status is sent already: what went wrong is told in the stream
            await response.write(event(_told(self._failure(request, error))))
        await response.write(DONE)
        await response.write_eof()
        return response

    async def _refuse_in_stream(self, request: web.Request, refusal: Refusal) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(event(_told(refusal)) + DONE)
        await response.write_eof()
        return response

    async def _written(self, body: Any, replies: Sequence[Reply]) -> web.Response:
        """JSON; a lot of it is written beside the event loop."""
        if sum(len(reply.tokens) for reply in replies) > MANY:
            text = await asyncio.to_thread(dumps, body)
        else:
            text = dumps(body)
        return web.Response(body=text, content_type="application/json")


def is_from_a_page(headers: Mapping[str, str]) -> bool:
    """Does a browser say that another site's page asks, or that it found this server under a name that is not ours?

    An address cannot be made to point elsewhere; a name can.
    """
    host = headers.get("Host", "")
    if "Origin" in headers and urlsplit(headers["Origin"]).netloc != host:
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name != "localhost" and not ip_address(name)
    except ValueError:
        return True


def new_rid() -> str:
    return uuid.uuid4().hex


def _told(refusal: Refusal) -> dict[str, Any]:
    """How a stream of SGLang's says that there is nothing to stream."""
    kind = "invalid_request_error" if refusal.status < 500 else "internal_error"
    return {"error": {"message": str(refusal), "type": kind, "code": refusal.status, "retryable": False}}
