"""Chat messages and tools in OpenAI's format, and accessors for their text, media and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
"""role, content (text, parts or None), tool_calls, tool_call_id, reasoning_content; media parts are kept unchanged."""
Tool = Mapping[str, Any]
"""``{"type": "function", "function": {"name": ..., "parameters": schema}}``"""
ToolSchemas = Mapping[str, Mapping[str, Any]]
"""The tools a request offers: name -> the JSON schema of its parameters."""

TEXT_TYPES = ("text", "input_text", "output_text")


def extract_text(message: Message) -> str:
    """The text of a message, without its media."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part["text"]) for part in get_parts(message) if part.get("type") in TEXT_TYPES)


def get_parts(message: Message) -> Sequence[Mapping[str, Any]]:
    """The content parts of a message; none where its content is a string."""
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def normalize_content(message: Message) -> list[Any]:
    """Text and media of a message in order, with adjacent texts joined and empty texts dropped.

    >>> normalize_content({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
    ['ab']
    """
    if not (parts := get_parts(message)):
        return [text] if (text := extract_text(message)) else []
    content: list[Any] = []
    for part in parts:
        if part.get("type") not in TEXT_TYPES:
            content.append(part)
        elif content and isinstance(content[-1], str):
            content[-1] += str(part["text"])
        elif part["text"]:
            content.append(str(part["text"]))
    return content


def extract_media(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    """Every part that is not text, in order; the very objects that were sent."""
    for message in messages:
        yield from (part for part in get_parts(message) if part.get("type") not in TEXT_TYPES)


def get_tool_calls(message: Message) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def get_function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``function`` of a tool or tool call; the object itself where it is written without that wrapper."""
    inner = call.get("function")
    return inner if isinstance(inner, Mapping) else call


def get_tool_schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """The JSON schema of each tool's parameters, by tool name."""
    return {str(get_function(tool)["name"]): get_function(tool).get("parameters") or {} for tool in tools}


def format_tool_call(id: str | None, name: str, arguments: str) -> dict[str, Any]:
    """A tool call as a chat message holds it; ``arguments`` is JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def dump_canonical_json(value: Any) -> str:
    """One text for equal values, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str, separators=(",", ":"))
