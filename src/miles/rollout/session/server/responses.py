"""OpenAI's ``/v1/responses`` of a session: its body as a ``TurnRequest``, its response, and its events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from miles.rollout.serving.body import Count, Int, PositiveInt, RequestBody, Texts, as_list, parse_body, require_text
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.messages import Message, Tool, format_tool_call
from miles.rollout.serving.openai_bodies import TemplateFields, check_function, join_text_parts, parse_tool_choice
from miles.rollout.serving.output_parser import ParsedOutput
from miles.rollout.serving.sampling_params import SamplingFields
from miles.rollout.session.server.chat import check_no_top_logprobs, find_choice_constraints, format_logprobs
from miles.rollout.session.server.deltas import DeltaEmitter, SegmentKind, StreamFormatter, TextSegment
from miles.rollout.session.server.sampling import find_biasing_fields
from miles.rollout.session.server.types import TurnHeader, TurnRequest, TurnResult

_UNSUPPORTED = {
    "background": "wait for the reply, or stream it",
    "conversation": "the session is the conversation; send the items, or previous_response_id",
    "prompt": "send the items themselves",
}
_ECHOED_FIELDS = {
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
"""Fields of a response that repeat those of its request, with their defaults."""


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = json.dumps(tool.get("type"))
        raise ValueError(f"is of type {kind}, which only OpenAI can run; give tools of type function")
    check_function(tool)
    return tool


class TextFormat(RequestBody):
    type: str


class TextConfig(RequestBody):
    format: TextFormat | None = None


class ReasoningConfig(RequestBody):
    effort: str | None = None


class ResponsesBody(SamplingFields, TemplateFields):
    """``/v1/responses``."""

    input: Any
    instructions: str | None = None
    model: str = "default"
    previous_response_id: str | None = None
    max_output_tokens: PositiveInt | None = None
    seed: Int | None = None
    tools: list[Annotated[dict[str, Any], AfterValidator(_check_tool)]] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Texts | None = None
    top_logprobs: Count = 0
    stream: bool = False
    store: bool = True
    background: Any = None
    conversation: Any = None
    prompt: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseEcho:
    """What a response repeats of its request. ``history``: the conversation's messages without the instructions."""

    fields: Mapping[str, Any]
    history: tuple[Message, ...]
    store: bool


def parse_responses(value: Any, get_history: Callable[[str], tuple[Message, ...]]) -> tuple[TurnRequest, ResponseEcho]:
    """A body as a turn request. ``get_history`` returns the messages up to and with an earlier response."""
    body = parse_body(ResponsesBody, value)
    for name, fix in _UNSUPPORTED.items():
        if getattr(body, name):
            raise RequestError(f"{name} is not supported by this server: {fix}.", param=name)
    check_no_top_logprobs(body.top_logprobs)
    tools = [_build_tool(tool) for tool in body.tools]
    choice, _ = parse_tool_choice(body.tool_choice, tools)
    constraints = find_choice_constraints(choice, body.parallel_tool_calls, has_tools=bool(tools))
    if body.text is not None and body.text.format is not None and body.text.format.type != "text":
        constraints = (*constraints, "text")
    previous = () if body.previous_response_id is None else get_history(body.previous_response_id)
    history = (*previous, *_build_messages(body.input))
    system: tuple[Message, ...] = ({"role": "system", "content": body.instructions},) if body.instructions else ()
    effort = None if body.reasoning is None else body.reasoning.effort
    effort_kwargs = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    request = TurnRequest(
        messages=(*system, *history),
        tools=tuple(tools),
        sampling=body,
        max_new_tokens=body.max_output_tokens,
        seed=body.seed,
        constraints=(*constraints, *find_biasing_fields(body)),
        model=body.model,
        allow_tool_calls=choice != "none",
        stream=body.stream,
        logprobs="message.output_text.logprobs" in as_list(body.include),
        template=effort_kwargs | body.template_kwargs(),
    )
    return request, ResponseEcho(fields=dict(value), history=history, store=body.store)


def _build_tool(tool: Mapping[str, Any]) -> Tool:
    fields = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in fields if tool.get(name) is not None}}


# -- items ----------------------------------------------------------------------------------


class InputItem(RequestBody):
    """An item of the input; the fields of each ``type``."""

    type: str = "message"
    role: str | None = None
    content: Any = None
    summary: Any = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Any = None


class ItemPart(RequestBody):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


def _build_messages(value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if not isinstance(value, list):
        raise RequestError("input must be a string or a list of items.", param="input", malformed=True)
    items = (_read_item(parse_body(InputItem, item, path=f"input[{i}]"), f"input[{i}]") for i, item in enumerate(value))
    return tuple(_merge_assistant_items(items))


def _read_item(item: InputItem, path: str) -> dict[str, Any]:
    """An item as a message of its own; an assistant item fills one field of a message."""
    if item.type == "message":
        if item.role not in ("system", "developer", "user", "assistant"):
            raise RequestError(f"{path}.role must be system, developer, user or assistant.", param=f"{path}.role")
        content = _read_content(item.content, f"{path}.content")
        if content is None:
            raise RequestError(f"{path}.content is missing.", param=f"{path}.content")
        return {"role": "system" if item.role == "developer" else item.role, "content": content}
    if item.type == "reasoning":
        name = "content" if item.content else "summary"
        parts = _read_parts(item.content or item.summary or [], f"{path}.{name}")
        return {"role": "assistant", "reasoning_content": "".join(require_text(part.text, path) for part, _ in parts)}
    if item.type == "function_call":
        name, arguments = require_text(item.name, f"{path}.name"), require_text(item.arguments, f"{path}.arguments")
        call = format_tool_call(require_text(item.call_id, f"{path}.call_id"), name, arguments)
        return {"role": "assistant", "tool_calls": [call]}
    if item.type == "function_call_output":
        content = _read_content(item.output, f"{path}.output")
        return {"role": "tool", "tool_call_id": require_text(item.call_id, f"{path}.call_id"), "content": content or ""}
    raise RequestError(
        f"{path}.type must be message, reasoning, function_call or function_call_output.", param=f"{path}.type"
    )


def _merge_assistant_items(items: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Consecutive assistant items are one message: reasoning, content and tool calls, in this order."""
    last: dict[str, Any] | None = None
    for item in items:
        is_assistant = item["role"] == "assistant"
        if last is not None and is_assistant and _can_merge(last, item):
            calls = [*last.get("tool_calls", ()), *item.get("tool_calls", ())]
            last |= item | ({"tool_calls": calls} if calls else {})
            continue
        if last is not None:
            yield last
            last = None
        if is_assistant:
            last = {"content": "", **item}
        else:
            yield item
    if last is not None:
        yield last


def _can_merge(last: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    if "tool_calls" in item:
        return True
    has_content = bool(last.get("content")) or "tool_calls" in last
    return not has_content and ("content" in item or "reasoning_content" not in last)


def _read_content(value: Any, path: str) -> Any:
    """Text, or parts where some are not text: images by URL, other media unchanged."""
    if value is None or isinstance(value, str):
        return value
    parts: list[Mapping[str, Any]] = []
    for part, raw in _read_parts(value, path):
        if part.type in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": require_text(part.text, f"{path}.text")})
        elif part.type == "refusal":
            parts.append({"type": "text", "text": require_text(part.refusal, f"{path}.refusal")})
        elif part.type == "input_image" and part.image_url is not None:
            parts.append({"type": "image_url", "image_url": {"url": part.image_url}})
        else:
            parts.append(raw)
    return join_text_parts(parts)


def _read_parts(value: Any, path: str) -> list[tuple[ItemPart, dict[str, Any]]]:
    if not isinstance(value, list):
        raise RequestError(f"{path} must be a string or a list of parts.", param=path, malformed=True)
    return [(parse_body(ItemPart, part, path=f"{path}[{i}]"), part) for i, part in enumerate(value)]


# -- the response ---------------------------------------------------------------------------


def format_response_id(header: TurnHeader) -> str:
    return f"resp_{header.id}"


def format_response(result: TurnResult, request: TurnRequest, echo: ResponseEcho) -> dict[str, Any]:
    """A ``response`` that has ended."""
    deltas = DeltaEmitter()
    list(deltas.update(result.reasoning, result.content))
    return _format_finished(result, request, echo, _close_segments(deltas, result))


class ResponseEvents(StreamFormatter):
    """The numbered events of a stream: output items that are added, grow and are done."""

    def __init__(self, header: TurnHeader, request: TurnRequest, echo: ResponseEcho) -> None:
        super().__init__(header, request)
        self._echo = echo
        self._numbers = count()

    def format_delta(self, output: ParsedOutput) -> Iterator[dict[str, Any]]:
        yield from map(self._number, self._format_delta(output))

    def format_end(self, result: TurnResult) -> Iterator[dict[str, Any]]:
        yield from map(self._number, self._format_end(result))

    def _number(self, event: dict[str, Any]) -> dict[str, Any]:
        return event | {"sequence_number": next(self._numbers)}

    def _format_delta(self, output: ParsedOutput) -> Iterator[dict[str, Any]]:
        for delta in self._deltas.update(output.reasoning, output.content):
            if delta.is_first:
                yield from self._open_once()
                yield from self._format_previous_done(delta.index)
                yield from self._format_item_added(delta.index, delta.kind)
            part = _format_part(delta.kind, delta.text)
            logprobs = {"logprobs": []} if delta.kind == "content" else {}
            position = self._format_position(delta.index)
            yield {"type": f"response.{part['type']}.delta", **position, "delta": delta.text, **logprobs}

    def _format_end(self, result: TurnResult) -> Iterator[dict[str, Any]]:
        yield from self._format_delta(ParsedOutput(reasoning=result.reasoning, content=result.content))
        yield from self._open_once()
        num_streamed = len(self._deltas.segments)
        segments = _close_segments(self._deltas, result)
        if len(segments) > num_streamed:  # an empty reply is an empty message
            yield from self._format_previous_done(num_streamed)
            yield from self._format_item_added(num_streamed, "content")
        response = _format_finished(result, self._request, self._echo, segments)
        output = response["output"]
        if segments:
            yield from self._format_item_done(len(segments) - 1, output[len(segments) - 1])
        for index, item in enumerate(output[len(segments) :], len(segments)):
            yield from _format_call_events(index, item)
        yield {"type": f"response.{response['status']}", "response": response}

    def _format_opening(self) -> Iterator[dict[str, Any]]:
        response = _format_header(self._header, self._request, self._echo)
        yield {"type": "response.created", "response": response}
        yield {"type": "response.in_progress", "response": response}

    def _format_previous_done(self, index: int) -> Iterator[dict[str, Any]]:
        """The end of the item before ``index``, if there is one."""
        if index > 0:
            item = _format_item(self._header, index - 1, self._deltas.segments[index - 1])
            yield from self._format_item_done(index - 1, item)

    def _format_item_added(self, index: int, kind: SegmentKind) -> Iterator[dict[str, Any]]:
        item = _format_item(self._header, index, TextSegment(kind, ""), "in_progress") | {"content": []}
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        part = _format_part(kind, "")
        yield {"type": "response.content_part.added", **self._format_position(index), "part": part}

    def _format_item_done(self, index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        (part,), position = item["content"], self._format_position(index)
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield {"type": f"response.{part['type']}.done", **position, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **position, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def _format_position(self, index: int) -> dict[str, Any]:
        kind = self._deltas.segments[index].kind
        return {"item_id": _format_item_id(self._header, index, kind), "output_index": index, "content_index": 0}


def _format_call_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a function call, whose arguments are sent at once."""
    position, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
    empty = item | {"arguments": "", "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": empty}
    yield {"type": "response.function_call_arguments.delta", **position, "delta": arguments}
    yield {
        "type": "response.function_call_arguments.done",
        **position,
        "arguments": arguments,
        "name": item["name"],
    }
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _format_header(header: TurnHeader, request: TurnRequest, echo: ResponseEcho) -> dict[str, Any]:
    repeated = {
        name: default if echo.fields.get(name) is None else echo.fields[name]
        for name, default in _ECHOED_FIELDS.items()
    }
    return {
        "id": format_response_id(header),
        "object": "response",
        "created_at": header.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "usage": None,
        "store": echo.store,
        **repeated,
    }


def _format_finished(
    result: TurnResult, request: TurnRequest, echo: ResponseEcho, segments: Sequence[TextSegment]
) -> dict[str, Any]:
    is_truncated = result.finish_reason == "length"
    return _format_header(result, request, echo) | {
        "status": "incomplete" if is_truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_truncated else None,
        "output": list(_format_items(result, request, segments)),
        "usage": _format_usage(result),
    }


def _close_segments(deltas: DeltaEmitter, result: TurnResult) -> Sequence[TextSegment]:
    """All segments of a finished reply; a reply without content or calls has an empty one."""
    if not result.content and not result.tool_calls:
        deltas.segments.append(TextSegment("content", ""))
    return deltas.segments


def _format_items(
    result: TurnResult, request: TurnRequest, segments: Sequence[TextSegment]
) -> Iterator[dict[str, Any]]:
    for index, segment in enumerate(segments):
        is_last = index == len(segments) - 1
        is_truncated = is_last and result.finish_reason == "length"
        item = _format_item(result, index, segment, "incomplete" if is_truncated else "completed")
        if is_last and segment.kind == "content" and request.logprobs:
            item["content"][0]["logprobs"] = format_logprobs(result)["content"]
        yield item
    for index, call in enumerate(result.tool_calls):
        yield {
            "id": f"fc_{result.id}_{index}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }


def _format_item(header: TurnHeader, index: int, segment: TextSegment, status: str = "completed") -> dict[str, Any]:
    is_content = segment.kind == "content"
    kind = {"type": "message", "role": "assistant"} if is_content else {"type": "reasoning", "summary": []}
    part = _format_part(segment.kind, segment.text)
    return {"id": _format_item_id(header, index, segment.kind), **kind, "content": [part], "status": status}


def _format_part(kind: SegmentKind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _format_item_id(header: TurnHeader, index: int, kind: SegmentKind) -> str:
    return f"{'msg' if kind == 'content' else 'rs'}_{header.id}_{index}"


def _format_usage(result: TurnResult) -> dict[str, Any]:
    num_prompt, num_completion, num_cached = result.usage
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": num_cached},
        "output_tokens": num_completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_completion,
    }
