"""Routing keys: what the router reads from a request body, its prefix, estimated work, session and rids."""

from __future__ import annotations

import json
import re
from array import array
from typing import Any, NamedTuple

from miles.cluster.router.http_types import HttpError, HttpRequest

_KEY_HEADERS = (b"x-routing-key", b"x-smg-routing-key", b"x-session-id")
_LIMIT = re.compile(rb'"max_(?:new_|completion_)?tokens"\s*:\s*(\d{1,9})')
_SAMPLES = re.compile(rb'"n"\s*:\s*(\d{1,6})')
_DEFAULT_NEW_TOKENS = 128  # SGLang's default
_BYTES_A_TOKEN = 4
# Prefill is cheap beside decoding: so many bytes of body count as much as one new token.
_BYTES_A_UNIT = 64


class RoutingKey(NamedTuple):
    """Decides which engine has a request's prefix; ``pinned``: no other engine can answer it."""

    data: bytes
    pinned: bool = False


def estimate_work(body: bytes) -> int:
    """An estimate of a request's cost in new tokens, from its bytes without parsing them."""
    limit, samples = _LIMIT.search(body), _SAMPLES.search(body)
    tokens = int(limit[1]) if limit is not None else _DEFAULT_NEW_TOKENS
    return tokens * (int(samples[1]) if samples is not None else 1) + len(body) // _BYTES_A_UNIT + 1


def extract_routing_key(request: HttpRequest, tokens: int) -> RoutingKey:
    """The session id, header ``x-routing-key``, field ``routing_key``, or else the prompt's first ``tokens``."""
    header = next((value for name in _KEY_HEADERS if (value := request.header(name)) is not None), None)
    if header is not None and b'"session_' not in request.body:
        return RoutingKey(header)
    fields = request.json()
    if fields is None:
        return RoutingKey(header or request.body[: tokens * _BYTES_A_TOKEN])
    if (session := _session_id(fields)) is not None:
        return RoutingKey(session.encode(), pinned=True)
    if header is None and (named := fields.get("routing_key")):
        header = str(named).encode()
    return RoutingKey(header or _prompt_prefix(fields, tokens))


def extract_session_id(request: HttpRequest) -> str | None:
    """The id of the session that a request opens, closes or uses."""
    fields = request.json()
    return _session_id(fields) if fields is not None else None


def _session_id(fields: dict[str, Any]) -> str | None:
    inner = fields.get("session_params")
    found = fields.get("session_id") or (inner.get("id") if isinstance(inner, dict) else None)
    return str(found) if found else None


def _prompt_prefix(fields: dict[str, Any], tokens: int) -> bytes:
    for name in ("input_ids", "text", "messages", "prompt", "input"):
        value = fields.get(name)
        if value is None:
            continue
        if (
            isinstance(value, list) and value and isinstance(value[0], list | str)
        ):  # a batch is routed by its first prompt
            value = value[0]
        if isinstance(value, list) and value and isinstance(value[0], int):
            return _encode_tokens(value[:tokens])
        text = value if isinstance(value, str) else json.dumps(value)
        return text.encode("utf-8", "surrogatepass")[: tokens * _BYTES_A_TOKEN]
    return b""


def _encode_tokens(tokens: list[Any]) -> bytes:
    """Equal bytes for equal tokens."""
    try:
        return array("q", tokens).tobytes()
    except (TypeError, OverflowError):  # not token ids; the engine reports that
        return json.dumps(tokens).encode()


def extract_rids(request: HttpRequest) -> list[str]:
    """The rids of a request: none, one, or one per prompt of a batch."""
    try:
        fields = request.json()
    except HttpError:
        return []
    rid = fields.get("rid") if fields is not None else None
    return [str(each) for each in (rid if isinstance(rid, list) else [rid]) if each]
