"""Route table of the engine's HTTP server: path, methods, handler and body, from which OpenAPI is generated too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from miles.backends.native.server import admin_bodies as bodies
from miles.backends.native.server.admin import AdminApi, run_to_end
from miles.backends.native.server.api.chat import CompletionBody, EngineChatBody
from miles.backends.native.server.api.generate import GenerateBody
from miles.backends.native.server.generation import GenerationApi, Handler, read_json_body
from miles.backends.native.server.info import InfoApi
from miles.backends.native.server.lora import LoraApi
from miles.backends.native.server.profile import ProfileApi
from miles.backends.native.server.weights.checker import WeightsChecker
from miles.rollout.serving.body import RequestBody, parse_body
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.http import load_json, read_chunks
from miles.rollout.serving.openapi import EndpointDoc

Body = TypeVar("Body", bound=RequestBody)
_OPTIONAL_BODIES = ("/weights_checker", "/start_profile", "/stop_profile")
_UNAVAILABLE = {"503": "The server is shutting down."}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint and its documentation."""

    doc: EndpointDoc
    handler: Handler


def add_routes(app: web.Application, endpoints: list[Endpoint]) -> None:
    for endpoint in endpoints:
        path = endpoint.doc.path.replace("{model}", "{model:.*}")
        for method in endpoint.doc.methods:
            app.router.add_route(method.upper(), path, endpoint.handler)


def build_endpoints(
    generation: GenerationApi,
    admin: AdminApi,
    info: InfoApi,
    checker: WeightsChecker,
    lora: LoraApi,
    profile: ProfileApi,
) -> list[Endpoint]:
    """All endpoints of the server."""
    return [
        *_build_info_endpoints(info),
        _post("/generate", "Generate completions of prompts.", generation.generate, GenerateBody, "post", "put"),
        _post("/v1/chat/completions", "Reply to a conversation.", generation.chat, EngineChatBody),
        _post("/v1/completions", "Generate completions of prompts.", generation.completions, CompletionBody),
        *_build_control_endpoints(admin),
        *_build_weight_endpoints(admin, checker),
        *_build_lora_endpoints(admin, lora),
        _admin("/start_profile", "Start a PyTorch profile.", profile.start, bodies.StartProfileBody, "get", "post"),
        _admin("/stop_profile", "Write the profile as a trace.", profile.stop, bodies.StopProfileBody, "get", "post"),
    ]


def _build_info_endpoints(info: InfoApi) -> list[Endpoint]:
    return [
        _get("/", "Say that the server runs.", info.root),
        _get("/ping", "200 while the server takes requests.", info.health),
        _get("/health", "200 while the server takes requests.", info.health, _UNAVAILABLE),
        _get("/health_generate", "200 when the engine makes steps.", info.health_generate, _UNAVAILABLE),
        _get("/model_info", "The model.", info.model_info),
        _get("/get_model_info", "The model.", info.model_info),
        _get("/server_info", "The server's settings and counters.", info.server_info),
        _get("/get_server_info", "The server's settings and counters.", info.server_info),
        _get("/get_load", "Running requests and tokens.", info.get_load),
        _get("/v1/loads", "Running requests and tokens.", info.loads),
        _get("/v1/models", "The served model.", info.models),
        _get("/v1/models/{model}", "The served model.", info.model, {"404": "There is no such model."}),
        _get("/metrics", "Prometheus metrics.", info.metrics),
        _get("/openapi.json", "This document.", info.openapi),
    ]


def _build_control_endpoints(admin: AdminApi) -> list[Endpoint]:
    flush = EndpointDoc(
        path="/flush_cache",
        methods=("get", "post"),
        summary="Empty the prefix cache.",
        query={"timeout": {"type": "number", "minimum": 0}},
    )
    return [
        _admin("/abort_request", "Abort a request, or all.", admin.abort, bodies.AbortBody),
        _admin("/pause_generation", "Stop making steps.", admin.pause, bodies.PauseBody),
        _admin("/continue_generation", "Make steps again.", admin.resume, bodies.ContinueBody),
        Endpoint(flush, _build_flush_handler(admin)),
        _admin("/release_memory_occupation", "Release the KV cache's memory.", admin.sleep, bodies.MemoryBody),
        _admin("/resume_memory_occupation", "Allocate the KV cache's memory.", admin.wake, bodies.MemoryBody),
        _admin("/open_session", "Open a session.", admin.open_session, bodies.OpenSessionBody, "get", "post"),
        _admin("/close_session", "Close a session.", admin.close_session, bodies.CloseSessionBody, "get", "post"),
    ]


def _build_weight_endpoints(admin: AdminApi, checker: WeightsChecker) -> list[Endpoint]:
    tensor_doc = EndpointDoc(
        path="/update_weights_from_tensor",
        methods=("post",),
        summary="Load weights from the body.",
        body=bodies.TensorUpdateBody,
    )
    return [
        _admin(
            "/update_weights_from_disk",
            "Load the weights of a checkpoint.",
            admin.update_from_disk,
            bodies.DiskUpdateBody,
        ),
        Endpoint(tensor_doc, _build_tensor_handler(admin)),
        _admin(
            "/init_weights_update_group",
            "Join a process group that sends weights.",
            admin.join_group,
            bodies.JoinGroupBody,
        ),
        _admin(
            "/destroy_weights_update_group",
            "Leave a process group that sends weights.",
            admin.leave_group,
            bodies.GroupBody,
        ),
        _admin(
            "/update_weights_from_distributed",
            "Receive weights from a process group.",
            admin.update_from_group,
            bodies.DistributedUpdateBody,
        ),
        _admin(
            "/update_weight_version",
            "Rename the current weight version.",
            admin.set_version_label,
            bodies.VersionLabelBody,
        ),
        _admin("/get_weights_by_name", "The first rows of a tensor.", admin.get_weights, bodies.WeightsByNameBody),
        _admin(
            "/weights_checker",
            "Checksums of the weights, a snapshot, a comparison.",
            checker.check,
            bodies.WeightsCheckerBody,
            "get",
            "post",
        ),
        _admin("/weights_publication", "A step of a weight publication.", admin.publish, bodies.PublicationBody),
        _binary(
            "/weights_publication/bucket", "Tensors of a publication: a safetensors file.", admin, admin.stage_bucket
        ),
        _binary(
            "/weights_publication/changes", "Compressed changes of a publication's tensors.", admin, admin.stage_changes
        ),
        _binary(
            "/weights_publication/adapters", "LoRA factors of a publication's tensors.", admin, admin.stage_adapters
        ),
    ]


def _build_lora_endpoints(admin: AdminApi, lora: LoraApi) -> list[Endpoint]:
    tensors_doc = EndpointDoc(
        path="/load_lora_adapter_from_tensors",
        methods=("post",),
        summary="Load a LoRA adapter from the body.",
        body=bodies.LoraTensorsBody,
    )

    async def load_from_tensors(request: web.Request) -> web.StreamResponse:
        content = await _read_weights(request, admin.max_weight_body)
        body = parse_body(bodies.LoraTensorsBody, await asyncio.to_thread(load_json, content))
        return await run_to_end(lora.load_from_tensors(body))

    return [
        _admin("/load_lora_adapter", "Load a LoRA adapter from a folder.", lora.load, bodies.LoadLoraBody),
        Endpoint(tensors_doc, load_from_tensors),
        _admin("/unload_lora_adapter", "Remove a LoRA adapter.", lora.unload, bodies.UnloadLoraBody),
    ]


# -- kinds of endpoints ---------------------------------------------------------------------


def _get(path: str, summary: str, handler: Handler, responses: dict[str, str] | None = None) -> Endpoint:
    return Endpoint(EndpointDoc(path=path, methods=("get",), summary=summary, responses=responses or {}), handler)


def _post(path: str, summary: str, handler: Handler, body: type[RequestBody], *methods: str) -> Endpoint:
    doc = EndpointDoc(path=path, methods=methods or ("post",), summary=summary, body=body, responses=_UNAVAILABLE)
    return Endpoint(doc, handler)


def _admin(
    path: str,
    summary: str,
    handler: Callable[[Body], Awaitable[web.Response]],
    body: type[Body],
    *methods: str,
) -> Endpoint:
    """An endpoint that gets its parsed body and runs to its end."""

    async def handle(request: web.Request) -> web.StreamResponse:
        may_be_empty = path in _OPTIONAL_BODIES and not request.can_read_body
        value = {} if may_be_empty else await read_json_body(request)
        return await run_to_end(handler(parse_body(body, value)))

    return Endpoint(EndpointDoc(path=path, methods=methods or ("post",), summary=summary, body=body), handle)


def _binary(path: str, summary: str, admin: AdminApi, handler: Callable[[bytes], Awaitable[web.Response]]) -> Endpoint:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await run_to_end(handler(await _read_weights(request, admin.max_weight_body)))

    return Endpoint(EndpointDoc(path=path, methods=("post",), summary=summary, binary=True), handle)


def _build_tensor_handler(admin: AdminApi) -> Handler:
    """Weights as JSON, or as the bytes of a safetensors file with the other fields in the query."""

    async def handle(request: web.Request) -> web.StreamResponse:
        content = await _read_weights(request, admin.max_weight_body)
        if request.content_type == "application/octet-stream":
            flags: dict[str, Any] = {"true": True, "false": False}
            query = {name: flags.get(value.lower(), value) for name, value in request.query.items()}
            return await run_to_end(admin.update_from_file(parse_body(bodies.UpdateFields, query), content))
        body = parse_body(bodies.TensorUpdateBody, await asyncio.to_thread(load_json, content))
        return await run_to_end(admin.update_from_tensor(body))

    return handle


def _build_flush_handler(admin: AdminApi) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        text = request.query.get("timeout", "0")
        try:
            timeout = float(text)
        except ValueError:
            timeout = -1.0
        if not 0 <= timeout < 1e9:
            message = f"timeout is {text!r}, but must be a number of seconds."
            raise RequestError(message, param="timeout", malformed=True)
        return await run_to_end(admin.flush_cache(timeout))

    return handle


async def _read_weights(request: web.Request, max_bytes: int) -> bytes:
    """A body of weights, which may be larger than other bodies."""
    return await read_chunks(request.content.iter_any(), max_bytes, f"{max_bytes} bytes, far more than this model")
