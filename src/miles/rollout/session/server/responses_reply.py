"""A finished turn as OpenAI's responses tell it, whole or in events."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from miles.rollout.session.server.ask import Ask, Told
from miles.rollout.session.server.chat_reply import logprobs_of
from miles.rollout.session.server.responses import Echo

_REPEATED = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}
"""Fields of a response that are those of its request, and what they are where it has none."""


def response_id(told: Told) -> str:
    return f"resp_{told.id}"


def response_body(told: Told, ask: Ask, echo: Echo) -> dict[str, Any]:
    """A ``response`` that has ended."""
    cut = told.finish == "length"
    end = {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_items(told, ask)),
        "usage": _usage(told),
    }
    return _open(told, ask, echo) | end


def response_events(told: Told, ask: Ask, echo: Echo) -> Iterator[dict[str, Any]]:
    """The events of a stream, numbered, each of the ``type`` it is sent under."""
    numbers = count()
    for event in _events(told, ask, echo):
        yield event | {"sequence_number": next(numbers)}


def _events(told: Told, ask: Ask, echo: Echo) -> Iterator[dict[str, Any]]:
    opened = _open(told, ask, echo)
    yield {"type": "response.created", "response": opened}
    yield {"type": "response.in_progress", "response": opened}
    for index, item in enumerate(_items(told, ask)):
        at = {"item_id": item["id"], "output_index": index}
        empty = item | {"arguments": ""} if item["type"] == "function_call" else item | {"content": []}
        yield {"type": "response.output_item.added", "output_index": index, "item": empty | {"status": "in_progress"}}
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
            done = {"arguments": arguments, "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **at, **done}
        else:
            yield from _part_events(at | {"content_index": 0}, item["content"][0])
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    whole = response_body(told, ask, echo)
    yield {"type": f"response.{whole['status']}", "response": whole}


def _part_events(at: dict[str, Any], part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kind = part["type"]
    more = {"logprobs": part.get("logprobs", [])} if kind == "output_text" else {}
    yield {"type": "response.content_part.added", **at, "part": part | {"text": ""}}
    yield {"type": f"response.{kind}.delta", **at, "delta": part["text"], **more}
    yield {"type": f"response.{kind}.done", **at, "text": part["text"], **more}
    yield {"type": "response.content_part.done", **at, "part": part}


def _open(told: Told, ask: Ask, echo: Echo) -> dict[str, Any]:
    given = {
        name: default if (value := echo.fields.get(name)) is None else value for name, default in _REPEATED.items()
    }
    return {
        "id": response_id(told),
        "object": "response",
        "created_at": told.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": ask.model,
        "output": [],
        "usage": None,
        "store": echo.store,
        **given,
    }


def _items(told: Told, ask: Ask) -> Iterator[dict[str, Any]]:
    status = "incomplete" if told.finish == "length" else "completed"
    if told.reasoning:
        thought = [{"type": "reasoning_text", "text": told.reasoning}]
        yield {"id": f"rs_{told.id}", "type": "reasoning", "summary": [], "content": thought, "status": status}
    if told.content or not told.calls:
        part: dict[str, Any] = {"type": "output_text", "text": told.content, "annotations": []}
        part["logprobs"] = logprobs_of(told)["content"] if ask.logprobs else []
        message = {"id": f"msg_{told.id}", "type": "message", "role": "assistant"}
        yield message | {"content": [part], "status": status}
    for index, call in enumerate(told.calls):
        item = {"id": f"fc_{told.id}_{index}", "type": "function_call", "call_id": call.id}
        yield item | {"name": call.name, "arguments": call.arguments, "status": "completed"}


def _usage(told: Told) -> dict[str, Any]:
    read, written, cached = told.usage
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }
