"""Which function answers which path, and the endpoints that only tell of the server."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aiohttp import web

import miles
from miles.backends.native.server.control import carried_out, json_reply
from miles.backends.native.server.fields import Fields, read_json
from miles.backends.native.server.metrics import TEXT
from miles.backends.native.server.openapi import document
from miles.backends.native.server.refusal import Refusal, malformed
from miles.backends.native.server.wish import Draw, Wish
from miles.core.protocols import Sampling
from miles.models.footprint import weight_bytes

if TYPE_CHECKING:
    from miles.backends.native.server.app import Server

HEALTHY_SECONDS = 20.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Steer = Callable[[Fields], Awaitable[web.Response]]


def add_routes(app: web.Application, server: Server) -> None:
    """All of them."""
    router = app.router
    control, told = server.control, _Telling(server)
    for path, tell in told.paths().items():
        router.add_get(path, tell, allow_head=False)
    router.add_route("POST", "/generate", server.generate)
    router.add_route("PUT", "/generate", server.generate)
    router.add_post("/v1/chat/completions", server.chat)
    router.add_post("/v1/completions", server.completions)
    steers: dict[str, Steer] = {
        "/abort_request": control.abort,
        "/pause_generation": control.pause,
        "/continue_generation": control.resume,
        "/release_memory_occupation": control.sleep,
        "/resume_memory_occupation": control.wake,
        "/update_weights_from_disk": control.from_disk,
        "/init_weights_update_group": control.join_group,
        "/destroy_weights_update_group": control.leave_group,
        "/update_weights_from_distributed": control.from_group,
        "/update_weight_version": control.label,
        "/weights_publication": control.publication,
        "/get_weights_by_name": control.show,
    }
    for path, steer in steers.items():
        router.add_post(path, _steering(server, steer))
    for path, steer in _either(server).items():
        router.add_post(path, _steering(server, steer))
        router.add_get(path, _steering(server, steer), allow_head=False)
    router.add_post("/update_weights_from_tensor", _weights(server))
    router.add_post("/weights_publication/bucket", _bucket(server))
    router.add_post("/weights_publication/changes", _changes(server))
    router.add_post("/weights_publication/adapters", _adapters(server))
    for method in ("GET", "POST"):
        router.add_route(method, "/flush_cache", _flush(server))


def _either(server: Server) -> dict[str, Steer]:
    """Those that SGLang also takes as GET."""

    async def open_session(fields: Fields) -> web.Response:
        """Begin a session; its name."""
        size = fields.maybe_integer("capacity_of_str_len")
        if size is None:
            raise fields.refuse("capacity_of_str_len", "an integer")
        seconds = fields.maybe_number("timeout")
        if fields.flag("streaming"):
            raise Refusal("There are no streaming sessions here; leave streaming out.", param="streaming")
        name = fields.text("session_id")
        name = uuid.uuid4().hex if name is None else name
        if not server.desk.sessions.open(name, seconds):
            raise Refusal(f"Session {name!r} is open already; close it first.", param="session_id")
        return json_reply(name)

    async def close_session(fields: Fields) -> web.Response:
        server.desk.sessions.close(fields.needed_text("session_id"))
        return web.Response()

    return {
        "/open_session": open_session,
        "/close_session": close_session,
        "/weights_checker": server.checker.check,
    }


def _steering(server: Server, steer: Steer) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        bare = request.path == "/weights_checker" and not request.can_read_body
        return await carried_out(steer(Fields({} if bare else await server.body(request))))

    return handle


def _weights(server: Server) -> Handler:
    """Weights come as JSON, or as the bytes of a safetensors file, which may be larger than other bodies."""

    async def handle(request: web.Request) -> web.StreamResponse:
        raw = await _weighty(server, request)
        if request.content_type == "application/octet-stream":
            return await carried_out(server.control.from_body(_asked(request), raw))
        return await carried_out(server.control.from_tensor(Fields(await asyncio.to_thread(read_json, raw))))

    return handle


def _bucket(server: Server) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await carried_out(server.control.bucket(await _weighty(server, request)))

    return handle


def _changes(server: Server) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await carried_out(server.control.changes(await _weighty(server, request)))

    return handle


def _adapters(server: Server) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await carried_out(server.control.adapters(await _weighty(server, request)))

    return handle


async def _weighty(server: Server, request: web.Request) -> bytes:
    """A body of weights."""
    limit = (64 << 20) + 2 * weight_bytes(server.engine.spec, "float32")
    raw = bytearray()
    async for chunk in request.content.iter_any():
        raw += chunk
        if len(raw) > limit:
            raise Refusal(f"The body is larger than {limit} bytes, far more than this model.", status=413)
    return bytes(raw)


def _asked(request: web.Request) -> Fields:
    """What the query of a request says: words, and true or false."""
    words = {"true": True, "false": False}
    return Fields({name: words.get(value.lower(), value) for name, value in request.query.items()}, malformed=False)


def _flush(server: Server) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        given = request.query.get("timeout", "0")
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < 1e9:
            raise malformed(f"timeout is {given!r}, but must be a number of seconds.", "timeout")
        return await carried_out(server.control.flush(seconds))

    return handle


class _Telling:
    """The endpoints that change nothing."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def paths(self) -> dict[str, Handler]:
        return {
            "/": self.root,
            "/ping": self.health,
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/get_load": self.load,
            "/v1/loads": self.loads,
            "/v1/models": self.models,
            "/v1/models/{model:.*}": self.model,
            "/metrics": self.metrics,
            "/openapi.json": self.openapi,
        }

    async def root(self, request: web.Request) -> web.Response:
        return json_reply("Miles is running")

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._server.desk.draining or self._server.engine.lost else 200)

    async def health_generate(self, request: web.Request) -> web.Response:
        """Healthy is an engine that makes a step: for a request under way, or for one of ours."""
        server = self._server
        if server.desk.draining or server.engine.resting or server.engine.lost:
            return web.Response(status=503)
        before = server.engine.stats()["steps"]
        draw = Draw(sampling=Sampling(temperature=0.0, ignore_eos=True), limit=1)
        wish = Wish(prompt=(0,), draw=draw, rid=f"health-{time.monotonic_ns()}", priority=1 << 30)
        try:
            async with asyncio.timeout(HEALTHY_SECONDS), server.desk.serve([wish]) as replies:
                await server.desk.finish(replies)
        except TimeoutError:
            pass
        return web.Response(status=200 if server.engine.stats()["steps"] > before else 503)

    async def model_info(self, request: web.Request) -> web.Response:
        server, card = self._server, self._server.card
        parser = server.speaker.format.name if server.speaker is not None and server.speaker.format else None
        return json_reply(
            {
                "model_path": card.model_path,
                "served_model_name": card.served_model_name,
                "tokenizer_path": card.tokenizer_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": server.desk.labels.of(server.engine.version),
                "load_format": "auto",
                "reasoning_parser": None
                if server.config.reasoning_parser == "none"
                else server.config.reasoning_parser,
                "tool_call_parser": parser,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": card.config.get("model_type"),
                "architectures": card.config.get("architectures"),
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        server = self._server
        spec, health = server.engine.spec, dict(await server.engine.health())
        told: dict[str, Any] = {
            **dataclasses.asdict(server.config),
            "model_path": server.card.model_path,
            "tokenizer_path": server.card.tokenizer_path,
            "served_model_name": server.card.served_model_name,
            "context_length": spec.max_positions,
            "tp_size": server.config.tensor_parallel_size,
            "vocab_size": spec.vocab_size,
            "max_total_num_tokens": server.engine.kv_tokens,
            "weight_version": server.desk.labels.of(server.engine.version),
            "internal_states": [{**health, "resting": server.engine.resting}],
            "version": miles.__version__,
        }
        told.pop("api_key_file")
        return json_reply(told)

    async def load(self, request: web.Request) -> web.Response:
        now = await self._loads()
        return json_reply(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": now["num_running_reqs"] + now["num_waiting_reqs"],
                    "num_waiting_reqs": now["num_waiting_reqs"],
                    "num_tokens": now["num_total_tokens"],
                    "num_pending_tokens": now["num_total_tokens"] - now["num_used_tokens"],
                    "ts_tic": time.perf_counter(),
                }
            ]
        )

    async def loads(self, request: web.Request) -> web.Response:
        now = datetime.now(UTC)
        each = {"timestamp": now.timestamp(), "dp_rank": 0, **await self._loads()}
        return json_reply({"timestamp": now.isoformat(), "version": miles.__version__, "loads": [each]})

    async def _loads(self) -> dict[str, Any]:
        engine = self._server.engine
        health = await engine.health()
        size = engine.kv_tokens // max(1, int(health["pages"]))
        used = int(health["pages"] - health["free_pages"]) * size
        waiting = int(health["waiting"])
        return {
            "num_running_reqs": int(health["running"]),
            "num_waiting_reqs": waiting,
            "num_used_tokens": used,
            "num_total_tokens": used + self._server.desk.waiting_tokens(waiting),
            "max_total_num_tokens": engine.kv_tokens,
            "token_usage": round(used / max(1, engine.kv_tokens), 4),
        }

    async def models(self, request: web.Request) -> web.Response:
        return json_reply({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._server.card.served_model_name:
            error = {
                "message": f"The model '{name}' does not exist",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
            return json_reply({"error": error}, 404)
        return json_reply(self._model())

    def _model(self) -> dict[str, Any]:
        card = self._server.card
        return {
            "id": card.served_model_name,
            "object": "model",
            "created": card.created,
            "owned_by": "miles",
            "root": card.served_model_name,
            "parent": None,
            "max_model_len": self._server.engine.spec.max_positions,
        }

    async def metrics(self, request: web.Request) -> web.Response:
        text = self._server.metrics.text(await self._server.engine.health())
        return web.Response(body=text, headers={"Content-Type": TEXT})

    async def openapi(self, request: web.Request) -> web.Response:
        return json_reply(document(miles.__version__, key=self._server.has_key))
