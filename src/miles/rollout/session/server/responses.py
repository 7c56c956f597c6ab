"""The body of OpenAI's ``/v1/responses``, read into an ``Ask``: its items become chat messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.rollout.session.message import Message, Tool
from miles.rollout.session.server.ask import Ask, Told
from miles.rollout.session.server.chat import ROLES, checked_function, read_choice, read_template, template_role
from miles.rollout.session.server.drawing import read_wish
from miles.rollout.session.server.fields import Fields
from miles.rollout.session.server.refusal import Refusal

_NOT_HERE = {
    "background": "wait for the reply, or stream it",
    "conversation": "the session is the conversation; send the items, or previous_response_id",
    "prompt": "send the items themselves",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """What a response repeats of its request. ``past`` are the conversation's messages but for the instructions."""

    fields: Mapping[str, Any]
    past: tuple[Message, ...]
    store: bool


def read_responses(body: Any, past_of: Callable[[str], tuple[Message, ...]]) -> tuple[Ask, Echo]:
    """What a body asks for. ``past_of`` gives the messages up to and with an earlier response."""
    fields = Fields(body)
    for name, mend in _NOT_HERE.items():
        if fields.raw(name):
            raise Refusal(f"{name} is not supported by this server: {mend}.", param=name)
    if fields.maybe_integer("top_logprobs", low=0):
        raise Refusal(
            "top_logprobs must be 0: a turn's log-probs are those of the tokens it drew.", param="top_logprobs"
        )
    tools = tuple(_tool(each) for each in fields.objects("tools"))
    calls, forced = read_choice(fields, tools)
    before = fields.text("previous_response_id")
    past = (*(() if before is None else past_of(before)), *_input(fields))
    instructions = fields.text("instructions")
    system: tuple[Message, ...] = ({"role": "system", "content": instructions},) if instructions else ()
    ask = Ask(
        messages=(*system, *past),
        tools=tools,
        wish=read_wish(fields, fields.maybe_integer("max_output_tokens", low=1), unforced=(*forced, *_format(fields))),
        model=fields.text("model") or "default",
        calls=calls,
        stream=fields.flag("stream"),
        logprobs="message.output_text.logprobs" in fields.texts("include"),
        template=_effort(fields) | read_template(fields),
    )
    return ask, Echo(fields=fields.all(), past=past, store=fields.flag("store", True))


def reply_message(told: Told) -> Message:
    """A finished turn as the chat message a later request of this API stands for."""
    message: dict[str, Any] = {"role": "assistant", "content": told.content}
    if told.reasoning:
        message["reasoning_content"] = told.reasoning
    if told.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in told.calls
        ]
    return message


# -- items ----------------------------------------------------------------------------------


def _input(fields: Fields) -> tuple[Message, ...]:
    given = fields.raw("input")
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    if not isinstance(given, list):
        raise fields.refuse("input", "a string or a list of items")
    return tuple(_joined(_items(fields.objects("input"))))


def _items(items: Sequence[Fields]) -> Iterator[dict[str, Any]]:
    """Each item as a message of its own, those of the assistant's in the fields of a message they fill."""
    for item in items:
        kind = item.text("type") or "message"
        if kind == "message":
            yield _message(item)
        elif kind == "reasoning":
            yield {"role": "assistant", "reasoning_content": _thought(item)}
        elif kind == "function_call":
            function = {"name": item.needed_text("name"), "arguments": item.needed_text("arguments")}
            call = {"id": item.needed_text("call_id"), "type": "function", "function": function}
            yield {"role": "assistant", "tool_calls": [call]}
        elif kind == "function_call_output":
            output = item.raw("output")
            text = output if isinstance(output, str) else _content(item, "output")
            yield {"role": "tool", "tool_call_id": item.needed_text("call_id"), "content": text or ""}
        else:
            raise item.refuse("type", "message, reasoning, function_call or function_call_output")


def _joined(items: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The assistant's items in a row are one message: what it thought, what it said, what it called, in this order."""
    last: dict[str, Any] | None = None
    for item in items:
        if last is not None and item["role"] == "assistant" and _goes_on(last, item):
            calls = [*last.get("tool_calls", ()), *item.get("tool_calls", ())]
            last |= item | ({"tool_calls": calls} if calls else {})
            continue
        if last is not None:
            yield last
        last = {"content": "", **item} if item["role"] == "assistant" and "content" not in item else item
        if item["role"] != "assistant":
            yield last
            last = None
    if last is not None:
        yield last


def _goes_on(last: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    if "tool_calls" in item:
        return True
    said = bool(last.get("content")) or "tool_calls" in last
    return not said and ("content" in item or "reasoning_content" not in last)


def _message(item: Fields) -> dict[str, Any]:
    role = item.needed_text("role")
    if role not in ROLES or role == "tool":
        raise item.refuse("role", "system, developer, user or assistant")
    content = _content(item, "content")
    if content is None:
        raise item.refuse("content", "a string or a list of parts")
    return {"role": template_role(role), "content": content}


def _content(item: Fields, name: str) -> str | list[dict[str, Any]] | None:
    """Text, or parts where some are not text: images by their address, other media as they are."""
    value = item.raw(name)
    if value is None or isinstance(value, str):
        return value
    parts = [_part(each) for each in item.objects(name)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(fields: Fields) -> dict[str, Any]:
    kind = fields.needed_text("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": fields.needed_text("text")}
    if kind == "refusal":
        return {"type": "text", "text": fields.needed_text("refusal")}
    if kind == "input_image" and fields.text("image_url") is not None:
        return {"type": "image_url", "image_url": {"url": fields.text("image_url")}}
    return fields.all()


def _thought(item: Fields) -> str:
    parts = item.objects("content") or item.objects("summary")
    return "".join(part.needed_text("text") for part in parts)


# -- the rest -------------------------------------------------------------------------------


def _tool(fields: Fields) -> Tool:
    if fields.raw("type") != "function":
        kind = json.dumps(fields.raw("type"))
        raise Refusal(
            f"{fields.where} is of type {kind}, which only its maker can run; give tools of type function.",
            param=fields.where,
        )
    checked_function(fields)
    kept = ("name", "description", "parameters")
    return {"type": "function", "function": {name: fields.raw(name) for name in kept if name in fields}}


def _format(fields: Fields) -> tuple[str, ...]:
    text = fields.object("text")
    form = None if text is None else text.object("format")
    return () if form is None or form.raw("type") == "text" else ("text",)


def _effort(fields: Fields) -> dict[str, Any]:
    reasoning = fields.object("reasoning")
    effort = None if reasoning is None else reasoning.text("effort")
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
