"""What a request's body tells a router: which prefix it shares, how much work it asks for, which rids it has."""

from __future__ import annotations

import json
import re
from array import array
from typing import Any, NamedTuple

from miles.cluster.route.message import Request

_KEY_HEADERS = (b"x-routing-key", b"x-smg-routing-key", b"x-session-id")
_LIMIT = re.compile(rb'"max_(?:new_|completion_)?tokens"\s*:\s*(\d{1,9})')
_SAMPLES = re.compile(rb'"n"\s*:\s*(\d{1,6})')
_DEFAULT_NEW_TOKENS = 128  # what SGLang generates when it is not told
_BYTES_A_TOKEN = 4
# Reading a prompt is cheap beside writing a reply: so many bytes of body count as much as one new token.
_BYTES_A_UNIT = 64


class Key(NamedTuple):
    """What decides which engine holds a request's prefix; ``firm`` when no other engine could answer it."""

    data: bytes
    firm: bool = False


def work_of(body: bytes) -> int:
    """An estimate of a generation's cost, in tokens to be written, from the bytes alone."""
    limit, samples = _LIMIT.search(body), _SAMPLES.search(body)
    tokens = int(limit[1]) if limit is not None else _DEFAULT_NEW_TOKENS
    return tokens * (int(samples[1]) if samples is not None else 1) + len(body) // _BYTES_A_UNIT + 1


def key_of(request: Request, tokens: int) -> Key:
    """A session's id, a header ``x-routing-key``, the field ``routing_key``, or else the prompt's first ``tokens``."""
    header = next((value for name in _KEY_HEADERS if (value := request.header(name)) is not None), None)
    if header is not None and b'"session_' not in request.body:
        return Key(header)
    fields = request.json()
    if fields is None:
        return Key(header or request.body[: tokens * _BYTES_A_TOKEN])
    if (session := _session_of(fields)) is not None:
        return Key(session.encode(), firm=True)
    if header is None and (named := fields.get("routing_key")):
        header = str(named).encode()
    return Key(header or _beginning_of(fields, tokens))


def session_of(request: Request) -> str | None:
    """The id of the session a request opens, closes or belongs to."""
    fields = request.json()
    return _session_of(fields) if fields is not None else None


def _session_of(fields: dict[str, Any]) -> str | None:
    inner = fields.get("session_params")
    found = fields.get("session_id") or (inner.get("id") if isinstance(inner, dict) else None)
    return str(found) if found else None


def _beginning_of(fields: dict[str, Any], tokens: int) -> bytes:
    for name in ("input_ids", "text", "messages", "prompt", "input"):
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, list) and value and isinstance(value[0], list | str):  # a batch goes where its first goes
            value = value[0]
        if isinstance(value, list) and value and isinstance(value[0], int):
            return _packed(value[:tokens])
        text = value if isinstance(value, str) else json.dumps(value)
        return text.encode("utf-8", "surrogatepass")[: tokens * _BYTES_A_TOKEN]
    return b""


def _packed(tokens: list[Any]) -> bytes:
    """The same bytes for the same tokens."""
    try:
        return array("q", tokens).tobytes()
    except (TypeError, OverflowError):  # no token ids at all; the engine will say so
        return json.dumps(tokens).encode()


def rids_of(request: Request) -> list[str]:
    """The ids a client gave to what it asks for: none, one, or one for each of a batch."""
    fields = request.json()
    rid = fields.get("rid") if fields is not None else None
    return [str(each) for each in (rid if isinstance(rid, list) else [rid]) if each]
