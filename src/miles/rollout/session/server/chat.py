"""OpenAI's ``/v1/chat/completions`` of a session: its body as a ``TurnRequest``, its response, and its chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from miles.rollout.serving.body import parse_body
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.http import SSE_DONE
from miles.rollout.serving.messages import Message, format_tool_call
from miles.rollout.serving.openai_bodies import ChatBody, MessageBody, join_text_parts, parse_tool_choice
from miles.rollout.serving.output_parser import ParsedOutput
from miles.rollout.session.server.deltas import StreamFormatter
from miles.rollout.session.server.sampling import find_biasing_fields
from miles.rollout.session.server.types import TurnHeader, TurnRequest, TurnResult


class SessionChatBody(ChatBody):
    """``/v1/chat/completions`` of a session."""

    functions: Any = None
    function_call: Any = None


def parse_chat(value: Any) -> TurnRequest:
    """A chat body as a turn request."""
    body = parse_body(SessionChatBody, value)
    for name, new_name in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, name) is not None:
            raise RequestError(f"{name} is no longer part of the API; use {new_name}.", param=name)
    check_single_choice(body.n)
    check_no_top_logprobs(body.top_logprobs)
    choice, _ = parse_tool_choice(body.tool_choice, list(body.tools))
    constraints = find_choice_constraints(choice, body.parallel_tool_calls, has_tools=bool(body.tools))
    if body.response_format is not None and body.response_format.type != "text":
        constraints = (*constraints, "response_format")
    if body.max_new_tokens == 0:
        raise RequestError("max_tokens is 0, but must be at least 1.", param="max_tokens")
    return TurnRequest(
        messages=build_messages(body.messages),
        tools=tuple(body.tools),
        sampling=body,
        max_new_tokens=body.max_new_tokens,
        seed=body.seed,
        constraints=(*constraints, *find_biasing_fields(body)),
        model=body.model,
        allow_tool_calls=choice != "none",
        stream=body.stream,
        include_usage=body.stream_options.include_usage,
        logprobs=body.logprobs,
        return_token_ids=body.return_token_ids,
        template=body.effort_kwargs() | body.template_kwargs(),
    )


def check_single_choice(n: int) -> None:
    if n != 1:
        raise RequestError(
            f"n is {n}, but a turn of a session has one reply; send the request again for another.", param="n"
        )


def check_no_top_logprobs(count: int) -> None:
    if count:
        raise RequestError(
            "top_logprobs must be 0: a turn has the log-probs of the tokens it sampled.", param="top_logprobs"
        )


def find_choice_constraints(choice: str, parallel_tool_calls: bool, *, has_tools: bool) -> tuple[str, ...]:
    """The fields of a tool choice that only constrained decoding could enforce."""
    if choice == "none":
        return ()
    parallel = ("parallel_tool_calls",) if has_tools and not parallel_tool_calls else ()
    return ("tool_choice", *parallel) if choice == "required" else parallel


def build_messages(messages: Sequence[MessageBody]) -> tuple[Message, ...]:
    """The conversation; text parts are joined, media parts are kept unchanged."""
    return tuple(_build_message(message, index) for index, message in enumerate(messages))


def _build_message(body: MessageBody, index: int) -> Message:
    path = f"messages[{index}]"
    content = join_text_parts(body.content)
    if content is None and body.role != "assistant":
        raise RequestError(f"{path}.content is missing.", param=f"{path}.content")
    # Templates know no developer and would skip the message.
    message: dict[str, Any] = {"role": "system" if body.role == "developer" else body.role, "content": content}
    fields = {"name": body.name, "tool_call_id": body.tool_call_id, "reasoning_content": body.reasoning_content}
    message |= {name: value for name, value in fields.items() if value}
    calls: list[dict[str, Any]] = []
    for call in body.tool_calls:
        arguments = "{}" if call.function.arguments is None else call.function.arguments
        if not isinstance(arguments, str | dict):
            raise RequestError(f"{path}.tool_calls has arguments that are neither an object nor its text.", param=path)
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id or "", "type": "function", "function": function})
    return message | ({"tool_calls": calls} if calls else {})


# -- the response ---------------------------------------------------------------------------


def format_chat(result: TurnResult, request: TurnRequest) -> dict[str, Any]:
    """A ``chat.completion``."""
    message: dict[str, Any] = dict(result.message) | {"refusal": None}
    if result.tool_calls:
        message["content"] = result.content or None
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "logprobs": format_logprobs(result) if request.logprobs else None,
        "finish_reason": result.finish_reason,
        **_format_token_ids(result, request),
    }
    return _format_header(result, request, "chat.completion") | {"choices": [choice], "usage": _format_usage(result)}


class ChatChunks(StreamFormatter):
    """``chat.completion.chunk``s: the role, reasoning, content and tool calls, the finish reason, and the usage."""

    named_events = False
    done = SSE_DONE

    def format_delta(self, output: ParsedOutput) -> Iterator[dict[str, Any]]:
        for delta in self._deltas.update(output.reasoning, output.content):
            yield from self._open_once()
            yield self._format_chunk({"content" if delta.kind == "content" else "reasoning_content": delta.text})

    def format_end(self, result: TurnResult) -> Iterator[dict[str, Any]]:
        request = self._request
        yield from self._open_once()
        yield from self.format_delta(ParsedOutput(reasoning=result.reasoning, content=result.content))
        if request.logprobs:
            yield self._format_chunk({"content": ""}, logprobs=format_logprobs(result))
        for index, call in enumerate(result.tool_calls):
            tool_call = {"index": index, **format_tool_call(call.id, call.name, call.arguments)}
            yield self._format_chunk({"tool_calls": [tool_call]})
        last = self._format_chunk({}, finish_reason=result.finish_reason)
        last["choices"][0] |= _format_token_ids(result, request)
        yield last
        if request.include_usage:
            header = _format_header(result, request, "chat.completion.chunk")
            yield header | {"choices": [], "usage": _format_usage(result)}

    def _format_opening(self) -> Iterator[dict[str, Any]]:
        yield self._format_chunk({"role": "assistant", "content": ""})

    def _format_chunk(
        self, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _format_header(self._header, self._request, "chat.completion.chunk") | {"choices": [choice]}


def format_logprobs(result: TurnResult) -> dict[str, Any]:
    """The log-prob of each sampled token, including the one that ended the turn."""
    tokens = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(result.token_texts, result.logprobs, strict=True)
    ]
    return {"content": tokens, "refusal": None}


def _format_usage(result: TurnResult) -> dict[str, Any]:
    num_prompt, num_completion, num_cached = result.usage
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _format_token_ids(result: TurnResult, request: TurnRequest) -> dict[str, Any]:
    if not request.return_token_ids:
        return {}
    return {"prompt_token_ids": result.context.tolist(), "token_ids": result.tokens}


def _format_header(header: TurnHeader, request: TurnRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{header.id}", "object": kind, "created": header.created, "model": request.model}
