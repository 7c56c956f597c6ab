"""HTTP server of a reward model: ``/classify`` as in SGLang for text and tokens, and as in OpenAI-like servers.

{"text": "..."} or {"input_ids": [...]}, one or a list   ->  {"embedding": [score], ...}, one or a list
{"input": ...}                                            ->  {"data": [{"index": 0, "probs": [score], ...}], ...}
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web

from miles.backends.fsdp.reward_inference import BatchedScorer
from miles.models.spec import DecoderSpec
from miles.models.tokenizer import HfTokenizer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN = ("/health", "/health_generate")
"""Paths that need no API key."""


class RewardServer:
    """Serves one scorer, which the caller closes. Without a tokenizer, requests must contain token ids."""

    def __init__(
        self,
        scorer: BatchedScorer,
        tokenizer: HfTokenizer | None,
        spec: DecoderSpec,
        *,
        name: str,
        api_key: str | None = None,
        body_mib: int = 64,
    ) -> None:
        self.served_model_name = name
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._spec = spec
        self._key = api_key
        self._body = body_mib << 20
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._busy = 0
        self._idle = asyncio.Event()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port, which is a free one for port 0."""
        app = web.Application(client_max_size=self._body, middlewares=[self._guard])
        for path in ("/", "/ping", *OPEN):
            app.router.add_get(path, self._alive)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model)
        app.router.add_get("/v1/models", self._models)
        for path in ("/classify", "/v1/classify"):
            app.router.add_post(path, self._classify)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, port, reuse_address=True)
        await self._site.start()
        return int(self._runner.addresses[0][1])

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, and give those in flight ``seconds`` to end."""
        if self._site is not None:
            await self._site.stop()
            self._site = None
        if self._busy:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

    async def stop(self) -> None:
        """Close every connection."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        key = None if request.path in OPEN else self._key
        if key is not None and not hmac.compare_digest(token.encode(), key.encode()):
            return _error_response("the key is missing or wrong", 401)
        self._busy += 1
        self._idle.clear()
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return _error_response(f"the body is larger than {self._body >> 20} MiB", 413)
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    async def _alive(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _model(self, request: web.Request) -> web.Response:
        about = {
            "model_path": self.served_model_name,
            "tokenizer_path": self.served_model_name,
            "is_generation": False,
        }
        return web.json_response(about | {"vocab_size": self._spec.vocab_size})

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self.served_model_name,
            "object": "model",
            "owned_by": "miles",
            "max_model_len": self._spec.max_positions,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _classify(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
            keys = [key for key in ("text", "input_ids", "input") if key in body]
            if not isinstance(body, dict) or len(keys) != 1:
                raise ValueError("a request must have exactly one of text, input_ids and input")
            several, sequences = self._sequences(body[keys[0]])
        except (ValueError, TypeError) as error:
            return _error_response(str(error), 400)
        try:
            scores = await self._scorer.scores(sequences)
        except asyncio.CancelledError:
            return _error_response("the server is stopping", 503)
        if keys == ["input"]:
            rows = [
                {"index": at, "label": "LABEL_0", "probs": [score], "num_classes": 1} for at, score in enumerate(scores)
            ]
            used = {"prompt_tokens": sum(map(len, sequences)), "total_tokens": sum(map(len, sequences))}
            return web.json_response({"object": "list", "model": self.served_model_name, "data": rows, "usage": used})
        rows = [
            {"embedding": [score], "meta_info": {"prompt_tokens": len(sequence)}}
            for sequence, score in zip(sequences, scores, strict=True)
        ]
        return web.json_response(rows if several else rows[0])

    def _sequences(self, value: Any) -> tuple[bool, list[list[int]]]:
        """Return whether the input is a list of several, and the token ids of each."""
        several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
        items: Sequence[Any] = value if several else [value]
        return several, [self._tokens(item) for item in items]

    def _tokens(self, item: Any) -> list[int]:
        if isinstance(item, str):
            if self._tokenizer is None:
                raise ValueError("this server has no tokenizer; send input_ids")
            item = self._tokenizer.encode(item)
        if not isinstance(item, list) or not item or not all(type(token) is int for token in item):
            raise ValueError("each input must be a non-empty text or list of token ids")
        if min(item) < 0 or max(item) >= self._spec.vocab_size:
            raise ValueError(f"a token id is outside the model's vocabulary of {self._spec.vocab_size}")
        if len(item) > self._spec.max_positions:
            raise ValueError(
                f"an input of {len(item)} tokens is longer than the model's {self._spec.max_positions} positions"
            )
        return item


def _error_response(message: str, status: int) -> web.Response:
    return web.json_response(
        {"object": "error", "message": message, "error": {"message": message, "code": status}}, status=status
    )
