"""A finished turn as Anthropic's messages tell it, whole or in events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from miles.rollout.session.server.ask import Ask, Call, Told
from miles.rollout.session.server.messages import UNREAD

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def anthropic_body(told: Told, ask: Ask) -> dict[str, Any]:
    """A ``message``."""
    return _open(told, ask) | {"content": list(_blocks(told)), **_end(told), "usage": _usage(told)}


def anthropic_events(told: Told, ask: Ask) -> Iterator[dict[str, Any]]:
    """The events of a stream, each of the ``type`` it is sent under."""
    start = _open(told, ask) | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": start | {"usage": _usage(told) | {"output_tokens": 0}}}
    for index, block in enumerate(_blocks(told)):
        empty, deltas = _opened(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _end(told), "usage": _usage(told)}
    yield {"type": "message_stop"}


def _open(told: Told, ask: Ask) -> dict[str, Any]:
    return {"id": f"msg_{told.id}", "type": "message", "role": "assistant", "model": ask.model}


def _end(told: Told) -> dict[str, Any]:
    reason = "stop_sequence" if told.matched is not None and not told.calls else _REASONS[told.finish]
    return {"stop_reason": reason, "stop_sequence": told.matched if reason == "stop_sequence" else None}


def _usage(told: Told) -> dict[str, Any]:
    read, written, cached = told.usage
    return {
        "input_tokens": read - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
    }


def _blocks(told: Told) -> Iterator[dict[str, Any]]:
    if told.reasoning:
        yield {"type": "thinking", "thinking": told.reasoning, "signature": ""}
    if told.content:
        yield {"type": "text", "text": told.content}
    for call in told.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)}


def _input(call: Call) -> dict[str, Any]:
    try:
        value = json.loads(call.arguments)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # some of what Python reads could not be written again
        value = None
    return value if isinstance(value, dict) else {UNREAD: call.arguments}


def _opened(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what is then added to it."""
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        grown = {"type": "thinking_delta", "thinking": block["thinking"]}
        return block | {"thinking": ""}, [grown, {"type": "signature_delta", "signature": block["signature"]}]
    text = json.dumps(block["input"], ensure_ascii=False)
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]
