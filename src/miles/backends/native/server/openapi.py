"""``/openapi.json``: every endpoint, what it takes and how it answers; kept by hand, held to the routes by a test."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_INTEGER: Schema = {"type": "integer", "minimum": -(2**63) + 1, "maximum": 2**63 - 1}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}


def _object(properties: Mapping[str, Schema], required: tuple[str, ...] = (), *, more: bool = True) -> Schema:
    found: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": more}
    return found | ({"required": list(required)} if required else {})


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_or_each(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "array", "items": schema}]}


_DRAWING: Mapping[str, Schema] = {
    "temperature": _nullable({"type": "number", "minimum": 0}),
    "top_p": _nullable({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "top_k": _nullable({"type": "integer", "minimum": -1}),
    "min_p": _nullable({"type": "number", "minimum": 0, "maximum": 1}),
    "frequency_penalty": _nullable({"type": "number", "minimum": -2, "maximum": 2}),
    "presence_penalty": _nullable({"type": "number", "minimum": -2, "maximum": 2}),
    "repetition_penalty": _nullable({"type": "number", "exclusiveMinimum": 0, "maximum": 2}),
    "logit_bias": _nullable({"type": "object", "additionalProperties": _NUMBER}),
    "n": _nullable({"type": "integer", "minimum": 1}),
    "stop": _nullable(_TEXTS),
    "stop_token_ids": _nullable({"type": "array", "items": _COUNT}),
    "stop_regex": _nullable(_TEXTS),
    "ignore_eos": _nullable(_FLAG),
    "skip_special_tokens": _nullable(_FLAG),
    "no_stop_trim": _nullable(_FLAG),
    "regex": _nullable(_TEXT),
    "ebnf": _nullable(_TEXT),
    "json_schema": _nullable({"anyOf": [_TEXT, {"type": "object"}]}),
}
_SAMPLING = _object(
    {
        **_DRAWING,
        "max_new_tokens": _nullable(_COUNT),
        "min_new_tokens": _nullable(_COUNT),
        "sampling_seed": _nullable(_INTEGER),
        "sampling_drawn": _nullable(_COUNT),
        "spaces_between_special_tokens": _nullable(_FLAG),
        "stream_interval": _nullable(_COUNT),
    },
    more=False,
)
_SESSION = _object(
    {
        "id": _nullable(_TEXT),
        "rid": _nullable(_TEXT),
        "offset": _nullable(_INTEGER),
        "replace": _nullable(_FLAG),
        "drop_previous_output": _nullable(_FLAG),
    }
)
_GENERATE = _object(
    {
        "text": _one_or_each(_TEXT),
        "input_ids": _one_or_each(_IDS),
        "sampling_params": _nullable(_one_or_each(_SAMPLING)),
        "return_logprob": _nullable(_one_or_each(_FLAG)),
        "logprob_start_len": _nullable(_one_or_each({"type": "integer", "minimum": -1})),
        "top_logprobs_num": _nullable(_one_or_each(_COUNT)),
        "token_ids_logprob": _nullable(_one_or_each({"type": "array", "items": _COUNT})),
        "return_text_in_logprobs": _nullable(_FLAG),
        "return_prompt_token_ids": _nullable(_FLAG),
        "return_weight_versions": _nullable(_FLAG),
        "return_routed_experts": _nullable(_FLAG),
        "routed_experts_start_len": _nullable(_COUNT),
        "stream": _nullable(_FLAG),
        "rid": _nullable(_one_or_each(_TEXT)),
        "priority": _nullable(_INTEGER),
        "session_id": _nullable(_TEXT),
        "session_params": _nullable(_one_or_each(_SESSION)),
    }
)
_FORMAT = _object(
    {
        "type": {"enum": ["text", "json_object", "json_schema", "regex"]},
        "json_schema": _object({"name": _TEXT, "schema": {"type": "object"}, "strict": _nullable(_FLAG)}),
        "regex": _TEXT,
    },
    ("type",),
)
_OPENAI: Mapping[str, Schema] = {
    **_DRAWING,
    "model": _nullable(_TEXT),
    "stream": _nullable(_FLAG),
    "stream_options": _nullable(
        _object({"include_usage": _nullable(_FLAG), "continuous_usage_stats": _nullable(_FLAG)})
    ),
    "seed": _nullable(_INTEGER),
    "min_tokens": _nullable(_COUNT),
    "response_format": _nullable(_FORMAT),
    "rid": _nullable(_one_or_each(_TEXT)),
    "priority": _nullable(_INTEGER),
    "return_token_ids": _nullable(_FLAG),
}
_MESSAGE = _object(
    {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _object({"type": {"const": "text"}, "text": _TEXT}, ("type", "text"))},
            ]
        },
        "name": _nullable(_TEXT),
        "tool_call_id": _nullable(_TEXT),
        "tool_calls": _nullable({"type": "array", "items": {"type": "object"}}),
    },
    ("role", "content"),
)
_TOOL = _object(
    {
        "type": {"const": "function"},
        "function": _object({"name": _TEXT, "description": _TEXT, "parameters": {"type": "object"}}, ("name",)),
    },
    ("function",),
)
_CHAT = _object(
    {
        **{name: schema for name, schema in _OPENAI.items() if name != "json_schema"},
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
        "max_tokens": _nullable(_COUNT),
        "max_completion_tokens": _nullable(_COUNT),
        "logprobs": _nullable(_FLAG),
        "top_logprobs": _nullable(_COUNT),
        "tools": _nullable({"type": "array", "items": _TOOL}),
        "tool_choice": _nullable({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}),
        "parallel_tool_calls": _nullable(_FLAG),
        "chat_template_kwargs": _nullable({"type": "object"}),
        "continue_final_message": _nullable(_FLAG),
    },
    ("messages",),
)
_COMPLETIONS = _object(
    {
        **_OPENAI,
        "prompt": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, _IDS]},
        "max_tokens": _nullable({"type": "integer", "minimum": 1}),
        "logprobs": _nullable({"type": "integer", "minimum": 0, "maximum": 1024}),
        "echo": _nullable(_FLAG),
    },
    ("prompt",),
)
_UPDATE: Mapping[str, Schema] = {
    "weight_version": _nullable(_TEXT),
    "flush_cache": _nullable(_FLAG),
    "abort_all_requests": _nullable(_FLAG),
    "load_format": _nullable(_TEXT),
}
_ENTRY = _object(
    {
        "name": _TEXT,
        "shape": {"type": "array", "items": _COUNT},
        "dtype": _TEXT,
    },
    ("name", "shape", "dtype"),
)
_STEPS = ("where", "begin", "load", "open", "copy", "map", "write", "verify", "commit", "rollback")
_BYTES: Schema = {"type": "string", "format": "binary"}
_TAGS = _object({"tags": _nullable(_TEXTS)})
_GROUP = {"group_name": _nullable(_TEXT)}

_OPENED = _object(
    {
        "capacity_of_str_len": _INTEGER,
        "session_id": _nullable(_TEXT),
        "streaming": _nullable(_FLAG),
        "timeout": _nullable(_NUMBER),
    },
    ("capacity_of_str_len",),
)
_CLOSED = _object({"session_id": _TEXT}, ("session_id",))
_CHECKED = _object({"action": _nullable({"enum": ["checksum", "snapshot", "compare", "reset_tensors"]})})

# path -> (what it does, method -> schema of the body, or None where it takes none)
ENDPOINTS: Mapping[str, tuple[str, Mapping[str, Schema | None]]] = {
    "/": ("Says that the server runs.", {"get": None}),
    "/ping": ("Answers.", {"get": None}),
    "/health": ("200 while the server takes requests.", {"get": None}),
    "/health_generate": ("200 when the engine makes steps.", {"get": None}),
    "/model_info": ("The model.", {"get": None}),
    "/get_model_info": ("The model.", {"get": None}),
    "/server_info": ("The server's settings and counters.", {"get": None}),
    "/get_server_info": ("The server's settings and counters.", {"get": None}),
    "/get_load": ("Requests and tokens under way.", {"get": None}),
    "/v1/loads": ("Requests and tokens under way.", {"get": None}),
    "/metrics": ("Prometheus metrics.", {"get": None}),
    "/openapi.json": ("This document.", {"get": None}),
    "/v1/models": ("The models: one.", {"get": None}),
    "/v1/models/{model}": ("One model.", {"get": None}),
    "/generate": ("Continue a prompt.", {"post": _GENERATE, "put": _GENERATE}),
    "/v1/chat/completions": ("Answer a conversation.", {"post": _CHAT}),
    "/v1/completions": ("Continue a prompt.", {"post": _COMPLETIONS}),
    "/abort_request": (
        "End a request, or all.",
        {"post": _object({"rid": _nullable(_TEXT), "abort_all": _nullable(_FLAG)})},
    ),
    "/pause_generation": (
        "Make no steps from now on.",
        {"post": _object({"mode": _nullable({"enum": ["abort", "retract", "in_place"]})})},
    ),
    "/continue_generation": ("Make steps again.", {"post": _object({"torch_empty_cache": _nullable(_FLAG)})}),
    "/flush_cache": ("Forget all prefixes.", {"get": None, "post": None}),
    "/release_memory_occupation": ("Give the cache's memory back.", {"post": _TAGS}),
    "/resume_memory_occupation": ("Take the cache's memory again.", {"post": _TAGS}),
    "/update_weights_from_disk": (
        "Take the weights of a checkpoint.",
        {"post": _object({**_UPDATE, "model_path": _TEXT}, ("model_path",))},
    ),
    "/update_weights_from_tensor": (
        "Take weights from the body.",
        {
            "post": _object(
                {**_UPDATE, "serialized_named_tensors": {"type": "array", "items": _TEXT}},
                ("serialized_named_tensors",),
            )
        },
    ),
    "/init_weights_update_group": (
        "Join a group of ranks that sends weights.",
        {
            "post": _object(
                {
                    **_GROUP,
                    "master_address": _TEXT,
                    "master_port": {"type": "integer", "minimum": 1, "maximum": 65535},
                    "rank_offset": {"type": "integer", "minimum": 1},
                    "world_size": {"type": "integer", "minimum": 2},
                    "backend": {"enum": ["nccl", "gloo"]},
                },
                ("master_address", "master_port", "rank_offset", "world_size"),
            )
        },
    ),
    "/update_weights_from_distributed": (
        "Take weights from a group of ranks.",
        {
            "post": _object(
                {
                    **_UPDATE,
                    **_GROUP,
                    "names": {"type": "array", "items": _TEXT},
                    "dtypes": {"type": "array", "items": _TEXT},
                    "shapes": {"type": "array", "items": {"type": "array", "items": _COUNT}},
                    "staged": _nullable(_FLAG),
                },
                ("names", "dtypes", "shapes"),
            )
        },
    ),
    "/destroy_weights_update_group": ("Leave a group of ranks.", {"post": _object(_GROUP)}),
    "/get_weights_by_name": (
        "The first rows of a tensor.",
        {"post": _object({"name": _TEXT, "truncate_size": _nullable(_COUNT)}, ("name",))},
    ),
    "/open_session": ("Begin a session.", {"get": _OPENED, "post": _OPENED}),
    "/close_session": ("Forget a session.", {"get": _CLOSED, "post": _CLOSED}),
    "/weights_checker": ("Checksums of the weights, a snapshot, a comparison.", {"get": _CHECKED, "post": _CHECKED}),
    "/weights_publication": (
        "A step of a publication: its manifest, its check, its commit or its end.",
        {
            "post": _object(
                {
                    **_UPDATE,
                    "action": {"enum": list(_STEPS)},
                    "windows": _nullable({"type": "array", "items": {"type": "object"}}),
                    "window": _nullable(_COUNT),
                    "last": _nullable(_FLAG),
                    "names": _nullable({"type": "array", "items": _TEXT}),
                    "offsets": _nullable({"type": "array", "items": _COUNT}),
                    "epoch": _nullable(_TEXT),
                    "storages": _nullable({"type": "array", "items": {"type": "object"}}),
                    "lie_in": _nullable({"type": "array", "items": _COUNT}),
                    "dtypes": _nullable({"type": "array", "items": _TEXT}),
                    "shapes": _nullable({"type": "array", "items": {"type": "array", "items": _COUNT}}),
                    "which": _nullable(_TEXT),
                    "promised": _nullable(_TEXT),
                    "pause": {"enum": ["abort", "retract", "in_place", None]},
                    "resume": _nullable(_FLAG),
                    "folder": _nullable(_TEXT),
                    "digests": _nullable(
                        {
                            "type": "object",
                            "additionalProperties": {"type": "string", "pattern": "^[0-9]{1,20}$"},
                        }
                    ),
                    "whole": _nullable(_FLAG),
                    "keeps": _nullable(_FLAG),
                    "entries": _nullable({"type": "array", "items": _ENTRY}),
                },
                ("action",),
            )
        },
    ),
    "/weights_publication/bucket": ("Tensors of a publication: a safetensors file.", {"post": _BYTES}),
    "/weights_publication/changes": ("What changed of a publication's tensors, compressed.", {"post": _BYTES}),
    "/weights_publication/adapters": ("Factors to be added to the base of a publication's tensors.", {"post": _BYTES}),
    "/update_weight_version": (
        "Call the weights by another name.",
        {"post": _object({"new_version": _TEXT, "abort_all_requests": _nullable(_FLAG)}, ("new_version",))},
    ),
}


def document(version: str, *, key: bool) -> dict[str, Any]:
    """The whole document; ``key``: clients must send one."""
    paths: dict[str, Any] = {}
    for path, (told, methods) in ENDPOINTS.items():
        paths[path] = {method: _operation(path, method, told, body) for method, body in methods.items()}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Miles: the native engine", "version": version},
        "paths": paths,
    }
    if key:
        found["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        found["security"] = [{"key": []}]
    return found


def _operation(path: str, method: str, told: str, body: Schema | None) -> dict[str, Any]:
    answers = {
        "200": "Done.",
        "400": "Refused, in one sentence.",
        "401": "The key is missing or wrong.",
        "403": "A page of another site asks.",
    }
    if path in ("/generate", "/v1/chat/completions", "/v1/completions", "/health", "/health_generate"):
        answers["503"] = "The server is shutting down."
    if body is not None:
        answers["413"] = "The body is too large."
    if "{" in path:
        answers["404"] = "There is none."
    operation: dict[str, Any] = {
        "summary": told,
        "operationId": "_".join([method, *re.findall(r"\w+", path)]),
        "responses": {status: {"description": words} for status, words in answers.items()},
    }
    if "{model}" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": _TEXT}]
    if path == "/flush_cache":
        seconds = {"type": "number", "minimum": 0}
        operation["parameters"] = [{"name": "timeout", "in": "query", "required": False, "schema": seconds}]
    if body is not None:
        kind = "application/octet-stream" if body is _BYTES else "application/json"
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": body}}}
    return operation
