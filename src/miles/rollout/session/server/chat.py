"""The body of OpenAI's ``/v1/chat/completions``, read into an ``Ask``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles.rollout.session.message import Tool
from miles.rollout.session.server.ask import Ask
from miles.rollout.session.server.drawing import read_wish
from miles.rollout.session.server.fields import Fields
from miles.rollout.session.server.refusal import Refusal

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT = ("text", "input_text", "output_text")
_TEMPLATE_OWN = frozenset(("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "tokenize"))
_GONE = {"functions": "tools", "function_call": "tool_choice"}


def read_chat(body: Any) -> Ask:
    """What a chat body asks for."""
    fields = Fields(body)
    for old, new in _GONE.items():
        if old in fields:
            raise Refusal(f"{old} is no longer part of the API; use {new}.", param=old)
    only_one(fields)
    if fields.maybe_integer("top_logprobs", low=0):
        raise Refusal(
            "top_logprobs must be 0: a turn's log-probs are those of the tokens it drew.", param="top_logprobs"
        )
    tools = tuple(_tool(each) for each in fields.objects("tools"))
    calls, forced = read_choice(fields, tools)
    limit = fields.maybe_integer("max_completion_tokens", low=1)
    if limit is None:
        limit = fields.maybe_integer("max_tokens", low=1)
    options = fields.object("stream_options")
    return Ask(
        messages=read_messages(fields),
        tools=tools,
        wish=read_wish(fields, limit, unforced=(*forced, *_formats(fields, "response_format"))),
        model=fields.text("model") or "default",
        calls=calls,
        stream=fields.flag("stream"),
        usage=options is not None and options.flag("include_usage"),
        logprobs=fields.flag("logprobs"),
        token_ids=fields.flag("return_token_ids"),
        template=read_template(fields),
    )


def only_one(fields: Fields) -> None:
    """A turn has one reply."""
    if (n := fields.maybe_integer("n", low=1)) not in (None, 1):
        raise Refusal(
            f"n is {n}, but a turn of a session has one reply; send the request again for another.", param="n"
        )


# -- messages -------------------------------------------------------------------------------


def read_messages(fields: Fields) -> tuple[dict[str, Any], ...]:
    """The conversation; text in parts is put together, media stay as they are."""
    given = fields.objects("messages")
    if not given:
        raise fields.refuse("messages", "a list of at least one message")
    return tuple(_message(each) for each in given)


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.needed_text("role")
    if role not in ROLES:
        raise fields.refuse("role", f"one of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": template_role(role), "content": read_content(fields)}
    if message["content"] is None and role != "assistant":
        raise fields.refuse("content", "a string or a list of parts")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if fields.text(name):
            message[name] = fields.text(name)
    if calls := fields.objects("tool_calls"):
        message["tool_calls"] = [_past_call(each) for each in calls]
    return message


def template_role(role: str) -> str:
    """What a role is called in chat templates; they would pass over a developer without a word."""
    return "system" if role == "developer" else role


def read_content(fields: Fields, name: str = "content") -> str | list[Any] | None:
    """Text, or parts where some of them are not text."""
    value = fields.raw(name)
    if value is None or isinstance(value, str):
        return value
    parts = fields.objects(name)
    if any(part.needed_text("type") not in _TEXT for part in parts):
        return [part.all() for part in parts]
    return "".join(part.needed_text("text") for part in parts)


def _past_call(fields: Fields) -> dict[str, Any]:
    function = fields.needed_object("function")
    arguments = function.raw("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        raise function.refuse("arguments", "a JSON object, or its text")
    return {
        "id": fields.text("id") or "",
        "type": "function",
        "function": {"name": function.needed_text("name"), "arguments": "{}" if arguments is None else arguments},
    }


# -- tools and words ------------------------------------------------------------------------


def _tool(fields: Fields) -> Tool:
    if fields.raw("type") not in (None, "function") or "function" not in fields:
        raise Refusal(f"{fields.where} must be an object of type function, with a function in it.", param=fields.where)
    checked_function(fields.needed_object("function"))
    return fields.all()


def checked_function(function: Fields) -> None:
    """A tool's name and schema are of the right kinds."""
    function.needed_text("name")
    if not isinstance(function.raw("parameters"), Mapping | None):
        raise function.refuse("parameters", "a JSON schema")


def read_choice(fields: Fields, tools: Sequence[Tool]) -> tuple[bool, tuple[str, ...]]:
    """May tools be called, and what is asked for beyond ``auto`` that nothing here can force."""
    choice = fields.raw("tool_choice")
    forced = ("parallel_tool_calls",) if tools and fields.raw("parallel_tool_calls") is False else ()
    if choice in (None, "auto"):
        return True, forced
    if choice == "none":
        return False, ()
    named = [str(tool["function"]["name"]) for tool in tools]
    if choice == "required":
        if not tools:
            raise Refusal("tool_choice is required, but there are no tools.", param="tool_choice")
        return True, ("tool_choice", *forced)
    must = "none, auto, required, or an object that names a function"
    if not isinstance(choice, Mapping):
        raise fields.refuse("tool_choice", must)
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise fields.refuse("tool_choice", must)
    if name not in named:
        raise Refusal(f"tool_choice names {name!r}, but there is no such tool.", param="tool_choice")
    return True, ("tool_choice", *forced)


def read_template(fields: Fields) -> dict[str, Any]:
    """What a client tells the chat template: its own keywords, and how much to think."""
    given = fields.object("chat_template_kwargs")
    words: dict[str, Any] = {} if given is None else given.all()
    for name in words:
        if name in _TEMPLATE_OWN:
            raise Refusal(f"chat_template_kwargs may not set {name}.", param="chat_template_kwargs")
    effort = fields.text("reasoning_effort")
    return words if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"} | words


def _formats(fields: Fields, name: str) -> tuple[str, ...]:
    given = fields.object(name)
    return () if given is None or given.raw("type") == "text" else (name,)
