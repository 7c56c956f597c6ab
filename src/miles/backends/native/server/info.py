"""Read-only endpoints: health, model and server information, load, metrics, OpenAPI."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

import miles
from miles.backends.native.server.api.chat import ChatFormatter
from miles.backends.native.server.api.request_types import ParsedRequest
from miles.backends.native.server.config import ServeConfig
from miles.backends.native.server.generation import json_response
from miles.backends.native.server.lora import format_adapters
from miles.backends.native.server.metrics import METRICS_CONTENT_TYPE, ServerMetrics
from miles.backends.native.server.model_info import ModelInfo
from miles.backends.native.server.request_handler import RequestHandler
from miles.core.protocols import SamplingParams

HEALTH_TIMEOUT_SECONDS = 20.0


class InfoApi:
    """The endpoints that change nothing. ``build_document`` returns the OpenAPI document."""

    def __init__(
        self,
        handler: RequestHandler,
        model_info: ModelInfo,
        config: ServeConfig,
        metrics: ServerMetrics,
        formatter: ChatFormatter | None,
        build_document: Callable[[], dict[str, Any]],
    ) -> None:
        self._handler = handler
        self._engine = handler.engine
        self._model_info = model_info
        self._config = config
        self._metrics = metrics
        self._formatter = formatter
        self._build_document = build_document

    async def root(self, request: web.Request) -> web.Response:
        return json_response("Miles is running")

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._handler.draining or self._engine.is_lost else 200)

    async def health_generate(self, request: web.Request) -> web.Response:
        """Healthy is an engine that makes a step, for a running request or for one of ours."""
        engine = self._engine
        if self._handler.draining or engine.is_paused or engine.is_lost:
            return web.Response(status=503)
        before = engine.stats()["steps"]
        probe = ParsedRequest(
            prompt=(0,),
            rid=f"health-{time.monotonic_ns()}",
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            max_new_tokens=1,
        )
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_SECONDS), self._handler.submit([probe]) as states:
                await self._handler.wait_finished(states)
        except TimeoutError:
            pass
        return web.Response(status=200 if engine.stats()["steps"] > before else 503)

    async def model_info(self, request: web.Request) -> web.Response:
        info = self._model_info
        formatter = self._formatter
        reasoning = self._config.reasoning_parser
        tool_parser = None if formatter is None else formatter.tool_parser
        return json_response(
            {
                "model_path": info.model_path,
                "served_model_name": info.served_model_name,
                "tokenizer_path": info.tokenizer_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._handler.weight_version,
                "load_format": "auto",
                "reasoning_parser": None if reasoning == "none" else reasoning,
                "tool_call_parser": None if tool_parser is None else tool_parser.name,
                "has_image_understanding": self._engine.spec.vision is not None,
                "has_audio_understanding": False,
                "model_type": info.config.get("model_type"),
                "architectures": info.config.get("architectures"),
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        engine, info = self._engine, self._model_info
        body: dict[str, Any] = {
            **dataclasses.asdict(self._config),
            "model_path": info.model_path,
            "tokenizer_path": info.tokenizer_path,
            "served_model_name": info.served_model_name,
            "context_length": engine.spec.max_positions,
            "tp_size": self._config.tensor_parallel_size,
            "vocab_size": engine.spec.vocab_size,
            "max_total_num_tokens": engine.kv_tokens,
            "kv_cache_dtype": engine.numerics.kv_cache_dtype,
            "weight_version": self._handler.weight_version,
            "enable_lora": engine.lora is not None,
            "max_lora_rank": None if engine.lora is None else engine.lora.shape.max_rank,
            "lora_adapters": format_adapters(engine),
            "internal_states": [{**dict(await engine.health()), "resting": engine.is_paused}],
            "version": miles.__version__,
        }
        body.pop("api_key_file")
        return json_response(body)

    async def get_load(self, request: web.Request) -> web.Response:
        load = await self._measure_load()
        return json_response(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": load["num_running_reqs"] + load["num_waiting_reqs"],
                    "num_waiting_reqs": load["num_waiting_reqs"],
                    "num_tokens": load["num_total_tokens"],
                    "num_pending_tokens": load["num_total_tokens"] - load["num_used_tokens"],
                    "ts_tic": time.perf_counter(),
                }
            ]
        )

    async def loads(self, request: web.Request) -> web.Response:
        now = datetime.now(UTC)
        load = {"timestamp": now.timestamp(), "dp_rank": 0, **await self._measure_load()}
        return json_response({"timestamp": now.isoformat(), "version": miles.__version__, "loads": [load]})

    async def _measure_load(self) -> dict[str, Any]:
        engine = self._engine
        health = await engine.health()
        page_size = engine.kv_tokens // max(1, int(health["pages"]))
        num_used = int(health["pages"] - health["free_pages"]) * page_size
        num_waiting = int(health["waiting"])
        return {
            "num_running_reqs": int(health["running"]),
            "num_waiting_reqs": num_waiting,
            "num_used_tokens": num_used,
            "num_total_tokens": num_used + self._handler.count_waiting_tokens(num_waiting),
            "max_total_num_tokens": engine.kv_tokens,
            "token_usage": round(num_used / max(1, engine.kv_tokens), 4),
        }

    async def models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._format_model(), *self._format_adapters()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name == self._model_info.served_model_name:
            return json_response(self._format_model())
        found = next((model for model in self._format_adapters() if model["id"] == name), None)
        if found is not None:
            return json_response(found)
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return json_response({"error": error}, 404)

    def _format_model(self) -> dict[str, Any]:
        name = self._model_info.served_model_name
        return {
            "id": name,
            "object": "model",
            "created": self._model_info.created,
            "owned_by": "miles",
            "root": name,
            "parent": None,
            "max_model_len": self._engine.spec.max_positions,
        }

    def _format_adapters(self) -> list[dict[str, Any]]:
        """The LoRA adapters as models whose parent is the served one."""
        parent = self._model_info.served_model_name
        return [
            self._format_model() | {"id": name, "root": adapter["lora_path"], "parent": parent}
            for name, adapter in format_adapters(self._engine).items()
        ]

    async def metrics(self, request: web.Request) -> web.Response:
        text = self._metrics.render(await self._engine.health())
        return web.Response(body=text, headers={"Content-Type": METRICS_CONTENT_TYPE})

    async def openapi(self, request: web.Request) -> web.Response:
        return json_response(self._build_document())
