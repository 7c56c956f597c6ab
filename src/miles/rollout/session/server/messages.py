"""The body of Anthropic's ``/v1/messages``, read into an ``Ask``: its blocks become chat messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from miles.rollout.session.message import Tool
from miles.rollout.session.server.ask import Ask
from miles.rollout.session.server.chat import only_one, read_template
from miles.rollout.session.server.drawing import read_wish
from miles.rollout.session.server.fields import Fields
from miles.rollout.session.server.refusal import Refusal

UNREAD = "unread_arguments"
"""The one key of a call's input whose arguments are no JSON object: this API knows no other input."""


def read_anthropic(body: Any, *, counting: bool = False) -> Ask:
    """What a body asks for; one that is only ``counting`` tokens needs no limit."""
    fields = Fields(body)
    only_one(fields)
    limit = fields.maybe_integer("max_tokens", low=1)
    if limit is None and not counting:
        raise fields.refuse("max_tokens", "an integer of at least 1")
    tools = tuple(_tool(each) for each in fields.objects("tools"))
    calls, forced = _choice(fields, tools)
    formats = tuple(name for name in ("output_config", "output_format") if name in fields and _is_format(fields, name))
    return Ask(
        messages=tuple(_messages(fields)),
        tools=tools,
        wish=read_wish(fields, limit, stop="stop_sequences", unforced=(*forced, *formats)),
        model=fields.text("model") or "default",
        calls=calls,
        stream=fields.flag("stream"),
        template=_thinking(fields) | read_template(fields),
    )


def _messages(fields: Fields) -> Iterator[dict[str, Any]]:
    system = fields.raw("system")
    if system:
        text = system if isinstance(system, str) else "".join(_text(each) for each in fields.objects("system"))
        yield {"role": "system", "content": text}
    given = fields.objects("messages")
    if not given:
        raise fields.refuse("messages", "a list of at least one message")
    for each in given:
        role = each.needed_text("role")
        if role not in ("user", "assistant", "system"):
            raise each.refuse("role", "user, assistant or system")
        if isinstance(each.raw("content"), str):
            yield {"role": role, "content": each.raw("content")}
        elif "content" not in each:
            raise each.refuse("content", "a string or a list of blocks")
        elif role == "assistant":
            yield _assistant(each)
        else:
            yield from _user(each, role)


def _assistant(fields: Fields) -> dict[str, Any]:
    """Blocks of thought, text and calls are one message."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in fields.objects("content"):
        kind = block.needed_text("type")
        if kind == "text":
            texts.append(block.needed_text("text"))
        elif kind == "thinking":
            thoughts.append(block.needed_text("thinking"))
        elif kind == "tool_use":
            name, given = block.needed_text("name"), block.needed_object("input").all()
            arguments = given[UNREAD] if set(given) == {UNREAD} else json.dumps(given, ensure_ascii=False)
            function = {"name": name, "arguments": str(arguments)}
            calls.append({"id": block.needed_text("id"), "type": "function", "function": function})
        else:
            raise block.refuse("type", "text, thinking or tool_use in a message of the assistant's")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _user(fields: Fields, role: str) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own; what stands between them is the user's."""
    waiting: list[dict[str, Any]] = []
    for block in fields.objects("content"):
        if block.needed_text("type") != "tool_result":
            waiting.append(_part(block))
            continue
        if waiting:
            yield {"role": role, "content": _joined(waiting)}
            waiting = []
        yield {
            "role": "tool",
            "tool_call_id": block.needed_text("tool_use_id"),
            "content": _result(block),
        }
    if waiting:
        yield {"role": role, "content": _joined(waiting)}


def _result(block: Fields) -> str | list[dict[str, Any]]:
    value = block.raw("content")
    if value is None or isinstance(value, str):
        return value or ""
    return _joined([_part(each) for each in block.objects("content")])


def _part(block: Fields) -> dict[str, Any]:
    """A block as a part of a chat message: images by their address, other media as they are."""
    kind = block.needed_text("type")
    if kind == "text":
        return {"type": "text", "text": _text(block)}
    if kind != "image":
        if kind in ("tool_use", "thinking", "redacted_thinking"):
            raise block.refuse("type", "text, tool_result or media in a message of the user's")
        return block.all()
    source = block.needed_object("source")
    if source.raw("type") == "base64":
        url = f"data:{source.needed_text('media_type')};base64,{source.needed_text('data')}"
    else:
        url = source.needed_text("url")
    return {"type": "image_url", "image_url": {"url": url}}


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _text(block: Fields) -> str:
    if block.raw("type") != "text":
        raise block.refuse("type", "text")
    return block.needed_text("text")


def _tool(fields: Fields) -> Tool:
    kind = fields.raw("type")
    if kind not in (None, "custom"):
        raise Refusal(
            f"{fields.where} is of type {kind!r}, which only its maker can run; give tools with an input_schema.",
            param=fields.where,
        )
    schema = fields.raw("input_schema")
    if not isinstance(schema, Mapping):
        raise fields.refuse("input_schema", "a JSON schema")
    function: dict[str, Any] = {"name": fields.needed_text("name")}
    if fields.text("description") is not None:
        function["description"] = fields.text("description")
    return {"type": "function", "function": function | {"parameters": schema}}


def _choice(fields: Fields, tools: tuple[Tool, ...]) -> tuple[bool, tuple[str, ...]]:
    choice = fields.object("tool_choice")
    if choice is None:
        return True, ()
    kind = choice.needed_text("type")
    forced = ("disable_parallel_tool_use",) if choice.flag("disable_parallel_tool_use") else ()
    if kind in ("auto", "none"):
        return kind == "auto", forced
    if kind not in ("any", "tool"):
        raise choice.refuse("type", "auto, any, tool or none")
    if kind == "tool":
        name = choice.needed_text("name")
        if name not in [tool["function"]["name"] for tool in tools]:
            raise Refusal(f"tool_choice names {name!r}, but there is no such tool.", param="tool_choice")
    return True, ("tool_choice", *forced)


def _is_format(fields: Fields, name: str) -> bool:
    given = fields.needed_object(name)
    return name == "output_format" or "format" in given


def _thinking(fields: Fields) -> dict[str, Any]:
    given = fields.object("thinking")
    return {} if given is None else {"enable_thinking": given.needed_text("type") != "disabled"}
