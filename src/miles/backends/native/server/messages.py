"""The messages and tools of an OpenAI chat body, checked and put as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from miles.backends.native.server.fields import Fields
from miles.backends.native.server.refusal import Refusal, malformed
from miles.backends.native.server.tools import Tools
from miles.core.errors import MilesError
from miles.models.tokenizer import HubTokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEMPLATE_OWN = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "kwargs", "tokenizer_kwargs"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    )
)


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation; content in parts is put together, and what is null is left out."""
    given = fields.array("messages")
    if given is None:
        raise fields.refuse("messages", "a list of messages")
    if not given:
        raise Refusal("messages is empty, but a conversation has at least one message.", param="messages")
    return [_message(Fields(each, f"messages[{i}]")) for i, each in enumerate(given)]


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.needed_text("role").lower()
    if role not in ROLES:
        raise fields.refuse("role", f"one of {', '.join(ROLES)}")
    content = _content(fields)
    if content is None and role == "user":
        raise fields.refuse("content", "a string or a list of parts")
    message: dict[str, Any] = {"role": role, "content": content or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := fields.text(name)) is not None:
            message[name] = value
    calls = fields.array("tool_calls")
    if calls:
        message["tool_calls"] = [
            _past_call(Fields(each, f"{fields.where}.tool_calls[{i}]")) for i, each in enumerate(calls)
        ]
    return message


def _content(fields: Fields) -> str | None:
    value = fields.raw("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.refuse("content", "a string or a list of parts")
    texts: list[str] = []
    for i, each in enumerate(value):
        part = Fields(each, f"{fields.where}.content[{i}]")
        kind = part.needed_text("type")
        if kind not in ("text", "input_text"):
            raise Refusal(
                f"{part.where} is of type {kind!r}, but this model reads text only.", param=f"{part.where}.type"
            )
        texts.append(part.needed_text("text"))
    return " ".join(texts)


def _past_call(fields: Fields) -> dict[str, Any]:
    """A call of an earlier turn; templates want its arguments as an object."""
    function = fields.object("function")
    if function is None:
        raise fields.refuse("function", "an object")
    arguments = function.raw("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise Refusal(f"{function.where}.arguments is not valid JSON: {error}.") from error
    if arguments is not None and not isinstance(arguments, dict):
        raise function.refuse("arguments", "a JSON object, or its text")
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": function.needed_text("name"), "arguments": arguments or {}},
    }
    return call if (found := fields.text("id")) is None else {"id": found, **call}


def read_tools(fields: Fields) -> tuple[list[dict[str, Any]], Tools]:
    """The tools as they were given, and the parameters of each by name."""
    given = fields.array("tools") or []
    tools: dict[str, Mapping[str, Any]] = {}
    for i, each in enumerate(given):
        tool = Fields(each, f"tools[{i}]")
        function = tool.object("function")
        if function is None or tool.raw("type") not in (None, "function"):
            raise malformed(f"tools[{i}] must be an object of type function, with a function in it.", "tools")
        parameters = function.raw("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise function.refuse("parameters", "a JSON schema")
        tools[function.needed_text("name")] = parameters or {}
    return given, tools


def read_choice(fields: Fields, tools: Tools) -> tuple[str, Tools]:
    """``none``, ``auto`` or ``required``, and the tools that are left to choose from; one that is named is required."""
    choice = fields.raw("tool_choice")
    if choice is None:
        choice = "auto" if tools else "none"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise fields.refuse("tool_choice", "none, auto, required, or an object that names a function")
        if choice == "required" and not tools:
            raise Refusal("tool_choice is required, but there are no tools.", param="tool_choice")
        return (choice if tools else "none"), tools
    function = Fields(choice, "tool_choice").object("function")
    name = None if function is None else function.text("name")
    if name is None:
        raise fields.refuse("tool_choice", "none, auto, required, or an object that names a function")
    if name not in tools:
        raise Refusal(f"tool_choice names {name!r}, but there is no such tool.", param="tool_choice")
    return "required", {name: tools[name]}


def read_template(fields: Fields) -> dict[str, Any]:
    """What a client tells the chat template: its own keywords, and how much to think."""
    given = fields.object("chat_template_kwargs")
    words: dict[str, Any] = {} if given is None else {name: given.raw(name) for name in given}
    for name in words:
        if name in _TEMPLATE_OWN:
            raise Refusal(f"chat_template_kwargs may not set {name}.", param="chat_template_kwargs")
    effort = fields.raw("reasoning_effort")
    if effort is not None:
        if isinstance(effort, bool) or not isinstance(effort, str | int | float):
            raise fields.refuse("reasoning_effort", "a word or a number")
        thinking = effort != "none"
        words = {"reasoning_effort": effort, "thinking": thinking, "enable_thinking": thinking} | words
    return words


def render(
    tokenizer: HubTokenizer,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]],
    template: Mapping[str, Any],
    go_on: bool,
) -> tuple[int, ...]:
    """The prompt of a conversation. ``go_on``: a last message of the assistant's is continued, not answered."""
    begun = ""
    if go_on and messages[-1]["role"] == "assistant":
        *messages, last = messages
        begun = last["content"]
    try:
        tokens = tokenizer.render(messages, add_generation_prompt=True, tools=tools or None, **template)
    except MilesError as error:
        raise Refusal(str(error)) from error
    except Exception as error:  # a template is a program of the model's maker, and may fail in any way
        raise Refusal(f"The chat template cannot write this conversation: {error}.") from error
    return (*tokens, *(tokenizer.encode(begun) if begun else ()))
