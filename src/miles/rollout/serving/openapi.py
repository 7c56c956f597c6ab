"""The OpenAPI document of a server, generated from its endpoints and their pydantic bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic.json_schema import models_json_schema

from miles.rollout.serving.body import RequestBody


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointDoc:
    """One path: its methods, what it does, and its body (``binary``: raw bytes).

    ``query`` are the JSON schemas of query parameters; ``responses`` adds statuses to the common ones.
    """

    path: str
    methods: tuple[str, ...]
    summary: str
    body: type[RequestBody] | None = None
    binary: bool = False
    query: Mapping[str, Any] = field(default_factory=dict)
    responses: Mapping[str, str] = field(default_factory=dict)


def build_openapi(title: str, version: str, endpoints: Sequence[EndpointDoc], *, requires_key: bool) -> dict[str, Any]:
    """The whole document; ``requires_key``: clients must send an API key."""
    bodies = {endpoint.body for endpoint in endpoints if endpoint.body is not None}
    models: list[tuple[type[RequestBody], Literal["validation"]]] = [
        (body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)
    ]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")
    schemas = definitions.get("$defs", {})
    for schema in schemas.values():
        _allow_nulls(schema)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        for method in endpoint.methods:
            paths.setdefault(endpoint.path, {})[method] = _build_operation(endpoint, method)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if requires_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _allow_nulls(schema: dict[str, Any]) -> None:
    """An optional field may be null, which is the same as absent."""
    required = schema.get("required", ())
    for name, field_schema in schema.get("properties", {}).items():
        if name not in required and {"type": "null"} not in field_schema.get("anyOf", ()):
            schema["properties"][name] = {"anyOf": [field_schema, {"type": "null"}]}


def _build_operation(endpoint: EndpointDoc, method: str) -> dict[str, Any]:
    has_body = endpoint.body is not None or endpoint.binary
    responses = {
        "200": "The request was served.",
        "400": "The request was refused; the body says why in one sentence.",
        "401": "The API key is missing or wrong.",
        "403": "A page of another site sent the request.",
        **({"413": "The body is too large."} if has_body else {}),
        **endpoint.responses,
    }
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": "_".join([method, *re.findall(r"\w+", endpoint.path)]),
        "responses": {status: {"description": text} for status, text in responses.items()},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in endpoint.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        schema = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    elif endpoint.binary:
        schema = {"type": "string", "format": "binary"}
        operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {"schema": schema}}}
    return operation
