"""Messages as OpenAI's chat writes them, and the few things everyone here asks of one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles.core.errors import MilesError

Message = Mapping[str, Any]
"""role, content (text, parts or None), tool_calls, tool_call_id, reasoning_content; parts of media stay as they are."""
Tool = Mapping[str, Any]
"""``{"type": "function", "function": {"name": ..., "parameters": schema}}``"""

_TEXT = ("text", "input_text", "output_text")


class SessionError(MilesError):
    """A request that a session cannot serve; says what in it, and the mend."""


class ContextFull(SessionError):
    """A conversation that leaves no room for a reply; agents that compact their context wait for this one."""


def text_of(message: Message) -> str:
    """The words of a message, without its media."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part["text"]) for part in parts_of(message) if part.get("type") in _TEXT)


def parts_of(message: Message) -> Sequence[Mapping[str, Any]]:
    """The parts of a message whose content is given in parts; none where it is text."""
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def said_in(message: Message) -> list[Any]:
    """Text and media of a message in order, texts that stand side by side as one; an empty text is none.

    >>> said_in({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "image_url"}]})
    ['ab', {'type': 'image_url'}]
    """
    if not (parts := parts_of(message)):
        return [text] if (text := text_of(message)) else []
    said: list[Any] = []
    for part in parts:
        if part.get("type") not in _TEXT:
            said.append(part)
        elif said and isinstance(said[-1], str):
            said[-1] += str(part["text"])
        elif part["text"]:
            said.append(str(part["text"]))
    return said


def media_of(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    """Every part that is not text, in order, the very objects that were given."""
    for message in messages:
        yield from (part for part in parts_of(message) if part.get("type") not in _TEXT)


def calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    """The tool calls of a message."""
    return message.get("tool_calls") or ()


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function a call names, also where a call is written without the wrapper."""
    inner = call.get("function")
    return inner if isinstance(inner, Mapping) else call


def canonical_json(value: Any) -> str:
    """One text for equal values, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str, separators=(",", ":"))


def schemas_of(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """The JSON schema of each tool's parameters, by its name."""
    return {str(function_of(tool)["name"]): function_of(tool).get("parameters") or {} for tool in tools}
