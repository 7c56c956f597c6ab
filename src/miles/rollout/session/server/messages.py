"""Anthropic's ``/v1/messages`` of a session: its body as a ``TurnRequest``, its response, and its events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from miles.rollout.serving.body import Int, PositiveInt, RequestBody, Texts, as_list, parse_body, require_text
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.messages import Message, Tool, format_tool_call
from miles.rollout.serving.openai_bodies import TemplateFields, join_text_parts
from miles.rollout.serving.output_parser import ParsedOutput
from miles.rollout.serving.sampling_params import SamplingFields
from miles.rollout.serving.tool_parsers import ToolCall
from miles.rollout.session.server.chat import check_single_choice
from miles.rollout.session.server.deltas import SegmentKind, StreamFormatter
from miles.rollout.session.server.sampling import find_biasing_fields
from miles.rollout.session.server.types import TurnHeader, TurnRequest, TurnResult

UNPARSED_ARGUMENTS = "unread_arguments"
"""The only key of a ``tool_use`` input whose arguments are no JSON object, which this API cannot express."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class ImageSource(RequestBody):
    type: str = "url"
    media_type: str = ""
    data: str = ""
    url: str = ""


class ContentBlock(RequestBody):
    """A block of a message; the fields of each ``type``."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    source: ImageSource | None = None


class AnthropicMessage(RequestBody):
    role: Literal["user", "assistant", "system"]
    content: Any


class AnthropicTool(RequestBody):
    type: str = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(RequestBody):
    type: str


class AnthropicBody(SamplingFields, TemplateFields):
    """``/v1/messages`` and ``/v1/messages/count_tokens``, which needs no ``max_tokens``."""

    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: Any = None
    model: str = "default"
    max_tokens: PositiveInt | None = None
    n: PositiveInt = 1
    seed: Int | None = None
    stop_sequences: Texts | None = None
    stream: bool = False
    tools: list[AnthropicTool] = Field(default_factory=list)
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


def parse_anthropic(value: Any, *, count_only: bool = False) -> TurnRequest:
    """A messages body as a turn request; ``count_only``: the tokens are only counted."""
    body = parse_body(AnthropicBody, value)
    check_single_choice(body.n)
    if body.max_tokens is None and not count_only:
        raise RequestError("max_tokens is missing.", param="max_tokens")
    tools = tuple(_build_tool(tool, index) for index, tool in enumerate(body.tools))
    allow_tool_calls, constraints = _read_tool_choice(body.tool_choice, tools)
    if body.output_config is not None and body.output_config.get("format") is not None:
        constraints = (*constraints, "output_config")
    if body.output_format is not None:
        constraints = (*constraints, "output_format")
    thinking = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    return TurnRequest(
        messages=tuple(_build_messages(body)),
        tools=tools,
        sampling=body.model_copy(update={"stop": as_list(body.stop_sequences)}),
        max_new_tokens=body.max_tokens,
        seed=body.seed,
        constraints=(*constraints, *find_biasing_fields(body)),
        model=body.model,
        allow_tool_calls=allow_tool_calls,
        stream=body.stream,
        template=thinking | body.template_kwargs(),
    )


def _build_messages(body: AnthropicBody) -> Iterator[Message]:
    if body.system:
        yield {"role": "system", "content": _read_text(body.system, "system")}
    for index, message in enumerate(body.messages):
        path = f"messages[{index}].content"
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
            continue
        blocks = _parse_blocks(message.content, path)
        if message.role == "assistant":
            yield _build_assistant_message(blocks, path)
        else:
            yield from _build_user_messages(blocks, message.role, path)


def _parse_blocks(value: Any, path: str) -> list[tuple[ContentBlock, dict[str, Any]]]:
    """Each block with the object it was parsed from, since unknown media are kept unchanged."""
    if not isinstance(value, list):
        raise RequestError(f"{path} must be a string or a list of blocks.", param=path, malformed=True)
    return [(parse_body(ContentBlock, block, path=f"{path}[{i}]"), block) for i, block in enumerate(value)]


def _read_text(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    return "".join(
        require_text(block.text if block.type == "text" else None, f"{path}.text")
        for block, _ in _parse_blocks(value, path)
    )


def _build_assistant_message(blocks: Sequence[tuple[ContentBlock, dict[str, Any]]], path: str) -> Message:
    """Reasoning, text and tool-use blocks as one message."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, _ in blocks:
        if block.type == "text":
            content.append(require_text(block.text, f"{path}.text"))
        elif block.type == "thinking":
            reasoning.append(require_text(block.thinking, f"{path}.thinking"))
        elif block.type == "tool_use":
            arguments = block.input
            if arguments is None:
                raise RequestError(f"{path}.input is missing.", param=path, malformed=True)
            is_unparsed = set(arguments) == {UNPARSED_ARGUMENTS}
            text = arguments[UNPARSED_ARGUMENTS] if is_unparsed else json.dumps(arguments, ensure_ascii=False)
            id, name = require_text(block.id, f"{path}.id"), require_text(block.name, f"{path}.name")
            calls.append(format_tool_call(id, name, str(text)))
        else:
            problem = f"{path} has a block of type {block.type!r}, but the assistant's are text, thinking or tool_use."
            raise RequestError(problem, param=path)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    return message | ({"tool_calls": calls} if calls else {})


def _build_user_messages(
    blocks: Sequence[tuple[ContentBlock, dict[str, Any]]], role: str, path: str
) -> Iterator[Message]:
    """Tool results become messages of their own; what is between them is the user's."""
    parts: list[dict[str, Any]] = []
    for block, raw in blocks:
        if block.type != "tool_result":
            parts.append(_build_part(block, raw, path))
            continue
        if parts:
            yield {"role": role, "content": join_text_parts(parts)}
            parts = []
        result = block.content or ""
        if not isinstance(result, str):
            inner = _parse_blocks(result, f"{path}.content")
            result = join_text_parts([_build_part(each, raw_each, path) for each, raw_each in inner])
        yield {
            "role": "tool",
            "tool_call_id": require_text(block.tool_use_id, f"{path}.tool_use_id"),
            "content": result,
        }
    if parts:
        yield {"role": role, "content": join_text_parts(parts)}


def _build_part(block: ContentBlock, raw: dict[str, Any], path: str) -> dict[str, Any]:
    """A block as a part of a chat message: images by URL, other media unchanged."""
    if block.type == "text":
        return {"type": "text", "text": require_text(block.text, f"{path}.text")}
    if block.type in ("tool_use", "thinking", "redacted_thinking"):
        message = f"{path} has a block of type {block.type!r}, but a user's are text, tool_result or media."
        raise RequestError(message, param=path)
    if block.type != "image":
        return raw
    source = block.source
    if source is None:
        raise RequestError(f"{path}.source is missing.", param=path, malformed=True)
    is_inline = source.type == "base64"
    url = f"data:{source.media_type};base64,{source.data}" if is_inline else source.url
    return {"type": "image_url", "image_url": {"url": url}}


def _build_tool(tool: AnthropicTool, index: int) -> Tool:
    if tool.type != "custom":
        raise RequestError(
            f"tools[{index}] is of type {tool.type!r}, which only Anthropic can run; give tools with an input_schema.",
            param=f"tools[{index}]",
        )
    if tool.input_schema is None:
        raise RequestError(f"tools[{index}].input_schema is missing.", param=f"tools[{index}].input_schema")
    description = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _read_tool_choice(choice: AnthropicToolChoice | None, tools: Sequence[Tool]) -> tuple[bool, tuple[str, ...]]:
    """Whether tools may be called, and the fields that only constrained decoding could enforce."""
    if choice is None:
        return True, ()
    constraints = ("disable_parallel_tool_use",) if choice.disable_parallel_tool_use else ()
    if choice.type in ("auto", "none"):
        return choice.type == "auto", constraints
    if choice.type == "tool" and choice.name not in [tool["function"]["name"] for tool in tools]:
        raise RequestError(f"tool_choice names {choice.name!r}, but there is no such tool.", param="tool_choice")
    return True, ("tool_choice", *constraints)


# -- the response ---------------------------------------------------------------------------


def format_anthropic(result: TurnResult, request: TurnRequest) -> dict[str, Any]:
    """A ``message``."""
    blocks: list[dict[str, Any]] = []
    if result.reasoning:
        blocks.append(_EMPTY_BLOCKS["reasoning"] | {"thinking": result.reasoning})
    if result.content:
        blocks.append(_EMPTY_BLOCKS["content"] | {"text": result.content})
    blocks += map(_format_tool_use, result.tool_calls)
    header = _format_header(result, request)
    return header | {"content": blocks, **_format_end(result), "usage": _format_usage(*result.usage)}


class AnthropicEvents(StreamFormatter):
    """The events of a stream: content blocks that start, grow and stop one after the other."""

    error_format = "anthropic"

    def format_delta(self, output: ParsedOutput) -> Iterator[dict[str, Any]]:
        for delta in self._deltas.update(output.reasoning, output.content):
            yield from self._open_once()
            block = _EMPTY_BLOCKS[delta.kind]
            if delta.is_first:
                yield from self._format_block_stop(delta.index - 1)
                yield {"type": "content_block_start", "index": delta.index, "content_block": block}
            yield _format_block_delta(delta.index, str(block["type"]), delta.text)

    def format_end(self, result: TurnResult) -> Iterator[dict[str, Any]]:
        yield from self.format_delta(ParsedOutput(reasoning=result.reasoning, content=result.content))
        yield from self._open_once()
        num_segments = len(self._deltas.segments)
        yield from self._format_block_stop(num_segments - 1)
        for index, call in enumerate(result.tool_calls, num_segments):
            block = _format_tool_use(call)
            yield {"type": "content_block_start", "index": index, "content_block": block | {"input": {}}}
            partial_json = json.dumps(block["input"], ensure_ascii=False)
            delta = {"type": "input_json_delta", "partial_json": partial_json}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        yield {"type": "message_delta", "delta": _format_end(result), "usage": _format_usage(*result.usage)}
        yield {"type": "message_stop"}

    def _format_opening(self) -> Iterator[dict[str, Any]]:
        """The message's start. How much of the prompt was cached is known, and sent, at its end."""
        message = _format_header(self._header, self._request)
        message |= {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": message | {"usage": _format_usage(len(self._header.context), 0, 0)}}

    def _format_block_stop(self, index: int) -> Iterator[dict[str, Any]]:
        if index < 0:
            return
        if self._deltas.segments[index].kind == "reasoning":
            yield _format_block_delta(index, "signature", "")
        yield {"type": "content_block_stop", "index": index}


_EMPTY_BLOCKS: dict[SegmentKind, dict[str, Any]] = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "content": {"type": "text", "text": ""},
}


def _format_block_delta(index: int, field: str, text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": f"{field}_delta", field: text}}


def _format_header(header: TurnHeader, request: TurnRequest) -> dict[str, Any]:
    return {"id": f"msg_{header.id}", "type": "message", "role": "assistant", "model": request.model}


def _format_end(result: TurnResult) -> dict[str, Any]:
    if result.matched_stop is not None and not result.tool_calls:
        return {"stop_reason": "stop_sequence", "stop_sequence": result.matched_stop}
    return {"stop_reason": _STOP_REASONS[result.finish_reason], "stop_sequence": None}


def _format_usage(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_completion,
    }


def _format_tool_use(call: ToolCall) -> dict[str, Any]:
    try:
        value = json.loads(call.arguments)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # Python reads some JSON that cannot be written again
        value = None
    arguments = value if isinstance(value, dict) else {UNPARSED_ARGUMENTS: call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
