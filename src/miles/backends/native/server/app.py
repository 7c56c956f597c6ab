"""HTTP server of the native engine: start and stop, API key, limits, and errors in the body of the called API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

import miles
from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.server.admin import AdminApi
from miles.backends.native.server.api.chat import ChatFormatter, build_chat_formatter
from miles.backends.native.server.config import ServeConfig
from miles.backends.native.server.generation import GenerationApi, Handler, json_response
from miles.backends.native.server.info import InfoApi
from miles.backends.native.server.lora import LoraApi
from miles.backends.native.server.metrics import ServerMetrics
from miles.backends.native.server.model_info import ModelInfo
from miles.backends.native.server.profile import ProfileApi
from miles.backends.native.server.request_handler import RequestHandler, VersionLabels
from miles.backends.native.server.routes import add_routes, build_endpoints
from miles.backends.native.server.weights.checker import WeightsChecker
from miles.core.errors import EngineError
from miles.models.tokenizer import HfTokenizer
from miles.rollout.serving.errors import RequestError, error_body
from miles.rollout.serving.http import has_valid_key, is_cross_origin
from miles.rollout.serving.http_runner import build_runner
from miles.rollout.serving.openapi import build_openapi

ABORT_SECONDS = 5.0
"""How long to wait for clients to read the end of aborted requests."""


class EngineServer:
    """One engine over HTTP. It does not close the engine.

    ``start`` and ``stop`` run on one event loop, that of the engine. Without a tokenizer requests must send tokens.
    """

    def __init__(
        self,
        engine: NativeEngine,
        tokenizer: HfTokenizer | None,
        *,
        config: ServeConfig | None = None,
        model_info: ModelInfo | None = None,
        api_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config or ServeConfig()
        self.model_info = model_info or ModelInfo()
        self.engine = engine
        self.handler = RequestHandler(engine, tokenizer, VersionLabels(self.config.weight_version), clock)
        self.metrics = ServerMetrics(self.model_info.served_model_name)
        formatter: ChatFormatter | None = None
        if tokenizer is not None:
            formatter = build_chat_formatter(
                tokenizer,
                self.model_info.sampling_defaults,
                tool_call_parser=self.config.tool_call_parser,
                reasoning_parser=self.config.reasoning_parser,
                max_text_length=self.handler.max_text_length,
            )
        num_ranks = self.config.tensor_parallel_size
        self.admin = AdminApi(self.handler, self.model_info, num_ranks=num_ranks)
        self.endpoints = build_endpoints(
            GenerationApi(
                self.handler,
                formatter,
                self.config,
                self.metrics,
                self._convert_error,
                self.model_info.served_model_name,
            ),
            self.admin,
            InfoApi(self.handler, self.model_info, self.config, self.metrics, formatter, self._build_openapi),
            WeightsChecker(self.handler, num_ranks=num_ranks),
            LoraApi(engine),
            ProfileApi(),
        )
        self._key = api_key
        self._runner: web.AppRunner | None = None
        self._site: web.BaseSite | None = None

    # -- start and stop ---------------------------------------------------------------------

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port, which is a free one for port 0."""
        app = web.Application(client_max_size=self.config.max_body_mib << 20, middlewares=[self._handle])
        add_routes(app, self.endpoints)
        self._runner = build_runner(app)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, port, reuse_address=True)
        await self._site.start()
        return int(self._runner.addresses[0][1])

    async def drain(self, seconds: float) -> None:
        """Take no more requests; running ones have so long to end, and are then aborted."""
        self.handler.draining = True
        if self._site is not None:
            await self._site.stop()
            self._site = None
        try:
            await asyncio.wait_for(self.handler.lock.wait_idle(), seconds)
        except TimeoutError:
            await self.engine.resume()
            await self.engine.abort()
            with suppress(TimeoutError):  # a client that does not read is not waited for
                await asyncio.wait_for(self.handler.lock.wait_idle(), ABORT_SECONDS)

    async def stop(self) -> None:
        """Close every connection; running requests are cancelled."""
        self.handler.draining = True
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self.admin.close()

    # -- every request ----------------------------------------------------------------------

    @web.middleware
    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, report errors in the body of the API that was called, and count requests."""
        path = "unknown" if request.match_info.http_exception else request.match_info.route.resource.canonical  # pyright: ignore[reportOptionalMemberAccess]
        try:
            response = self._reject(request) or await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            response = json_response({"detail": error.reason}, error.status)
            response.headers.extend({"Allow": error.headers["Allow"]} if "Allow" in error.headers else {})
        except Exception as error:
            response = _error_response(request, self._convert_error(request, error))
        self.metrics.count_request(path, response.status)
        return response

    def _reject(self, request: web.Request) -> web.Response | None:
        """Refuse requests without the key; where no key is set, those a foreign web page makes a browser send.

        Health and metrics need no key: a monitor need not be able to send requests. The body of a refused request is
        not read.
        """
        if request.path in ("/health", "/metrics"):
            return None
        if self._key is None:
            if self.config.allow_unauthenticated or not is_cross_origin(request.headers):
                return None
            response = json_response({"error": "Forbidden"}, 403)
        elif has_valid_key(request.headers, self._key):
            return None
        else:
            response = json_response({"error": "Unauthorized"}, 401)
        if request.can_read_body and request.transport is not None:
            request.transport.pause_reading()
            response.force_close()
        return response

    def _convert_error(self, request: web.Request, error: Exception) -> RequestError:
        """The text of an error that a client receives: our own messages; of any other only its type."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, RecursionError):
            return RequestError("The body is nested too deeply.")
        if isinstance(error, BadHttpMessage | web.RequestPayloadError):
            return RequestError("The body is not what its headers say: it cannot be decoded.", malformed=True)
        if isinstance(error, EngineError):
            is_down = self.handler.draining or self.engine.is_lost
            return RequestError(f"{error}.", status=503 if is_down else 400)
        request.app.logger.exception("%s %s failed", request.method, request.path, exc_info=error)
        message = f"The server failed on this request ({type(error).__name__}); see its log."
        return RequestError(message, status=500)

    def _build_openapi(self) -> dict[str, Any]:
        docs = [endpoint.doc for endpoint in self.endpoints]
        return build_openapi("Miles engine server", miles.__version__, docs, requires_key=self._key is not None)


def _error_response(request: web.Request, error: RequestError) -> web.Response:
    body = error_body(error, "sglang_openai" if request.path.startswith("/v1/") else "sglang")
    return json_response(body, error.status)
