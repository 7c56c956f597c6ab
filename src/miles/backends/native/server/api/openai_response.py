"""Responses of OpenAI's endpoints with the few fields SGLang adds: complete, or as the chunks of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from miles.backends.native.server.api.chat import ResponseOptions
from miles.backends.native.server.api.generate import format_meta_info, format_routed_experts
from miles.backends.native.server.output_state import LogprobRow, LogprobRows, OutputState
from miles.rollout.serving.messages import format_tool_call
from miles.rollout.serving.output_parser import ParsedOutput
from miles.rollout.serving.tool_parsers import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHeader:
    """What every object of one response, and every chunk of one stream, begins with."""

    id: str
    model: str
    created: int
    cache_report: bool = False

    def build(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


# -- complete responses ---------------------------------------------------------------------


def format_chat_completion(
    states: Sequence[OutputState], options: ResponseOptions, header: ResponseHeader
) -> dict[str, Any]:
    """A ``chat.completion``."""
    choices: list[dict[str, Any]] = []
    for index, state in enumerate(states):
        output = options.output_parser.parse(state.text or "")
        choice: dict[str, Any] = {
            "index": index,
            "message": {
                "role": "assistant",
                "content": output.content,
                "reasoning_content": output.reasoning or None,
                "tool_calls": [_format_call(i, call) for i, call in enumerate(output.tool_calls)] or None,
            },
            "logprobs": _format_chat_logprobs(state.output_logprobs) if options.logprobs else None,
            **_format_finish(state, output),
        }
        if options.return_prompt_token_ids:
            choice["prompt_token_ids"] = [int(token) for token in state.prompt]
        if options.return_token_ids:
            choice["response_token_ids"] = list(state.tokens)
        if options.return_meta_info:
            choice["meta_info"] = format_meta_info(state)
        choices.append(choice)
    return _format_response("chat.completion", choices, states, options, header)


def format_text_completion(
    states: Sequence[OutputState], options: ResponseOptions, header: ResponseHeader
) -> dict[str, Any]:
    """A ``text_completion``."""
    choices: list[dict[str, Any]] = []
    for index, state in enumerate(states):
        echo = options.echoes[index] if options.echoes else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + (state.text or ""),
            "logprobs": _format_text_logprobs(state, echo=bool(echo)) if options.logprobs else None,
            **_format_finish(state, None),
        }
        if options.return_token_ids:
            choice["token_ids"] = list(state.tokens)
        if options.return_prompt_token_ids:
            choice["prompt_token_ids"] = [int(token) for token in state.prompt]
        choices.append(choice)
    return _format_response("text_completion", choices, states, options, header)


def _format_response(
    kind: str,
    choices: list[dict[str, Any]],
    states: Sequence[OutputState],
    options: ResponseOptions,
    header: ResponseHeader,
) -> dict[str, Any]:
    body = header.build(kind) | {
        "choices": choices,
        "usage": _format_usage(states, options.n, header.cache_report),
        "metadata": {"weight_version": states[0].weight_version},
    }
    if (experts := format_routed_experts(states[0])) is not None:
        body["sglext"] = {"routed_experts": experts}
    return body


def _format_usage(states: Sequence[OutputState], n: int, cache_report: bool) -> dict[str, Any]:
    """Token counts; a prompt counts once, however many completions it has."""
    num_prompt = sum(len(state.prompt) for state in states[::n])
    num_completion = sum(len(state.tokens) for state in states)
    num_cached = sum(state.output.cached_tokens for state in states[::n])
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_completion,
        "completion_tokens": num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached} if cache_report and num_cached else None,
        "reasoning_tokens": 0,
    }


def _format_finish(state: OutputState, output: ParsedOutput | None) -> dict[str, Any]:
    reason = state.finish_reason
    if reason is None:
        return {"finish_reason": None, "matched_stop": None}
    if reason.kind == "stop" and output is not None and output.tool_calls:
        return {"finish_reason": "tool_calls", "matched_stop": None}
    return {"finish_reason": reason.kind, "matched_stop": reason.matched if reason.kind == "stop" else None}


def _format_call(index: int, call: ToolCall) -> dict[str, Any]:
    return {"index": index, **format_tool_call(f"call_{uuid.uuid4().hex[:24]}", call.name, call.arguments)}


def _format_chat_logprobs(rows: LogprobRows, since: int = 0) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for i, row in enumerate(rows.tokens[since:], since):
        tops = rows.top_logprobs[i] if rows.top_logprobs else None
        content.append({**_format_token(row), "top_logprobs": [_format_token(top) for top in tops or ()]})
    return {"content": content}


def _format_token(row: LogprobRow) -> dict[str, Any]:
    logprob, _, text = row
    text = text or ""
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob}


def _format_text_logprobs(state: OutputState, *, echo: bool, since: int = 0) -> dict[str, Any]:
    prompt, output = state.prompt_logprobs() if echo else LogprobRows(), state.output_logprobs
    tokens = [*prompt.tokens, *output.tokens[since:]]
    tops = [*prompt.top_logprobs, *output.top_logprobs[since:]]
    return {
        "text_offset": [-1] * len(tokens),
        "token_logprobs": [logprob for logprob, _, _ in tokens],
        "tokens": [text for _, _, text in tokens],
        "top_logprobs": [None if row is None else {text or "": logprob for logprob, _, text in row} for row in tops],
    }


# -- chunks of a stream ---------------------------------------------------------------------


@dataclass(slots=True)
class _Progress:
    """What was already sent of one choice."""

    started: bool = False
    reasoning: int = 0
    content: int = 0
    tool_calls: int = 0
    tokens: int = 0


class ChatChunkFormatter:
    """The chunks of a chat stream, choice by choice; nothing is sent twice."""

    kind = "chat.completion.chunk"

    def __init__(self, states: Sequence[OutputState], options: ResponseOptions, header: ResponseHeader) -> None:
        self._states = states
        self._options = options
        self._header = header
        self._progress = [_Progress() for _ in states]

    def format_chunks(self, index: int) -> Iterator[dict[str, Any]]:
        """What is new of one choice; its last chunk has the finish reason."""
        state, progress = self._states[index], self._progress[index]
        is_finished = state.finish_reason is not None
        output = self._options.output_parser.parse(state.text or "", complete=is_finished)
        if not progress.started:
            progress.started = True
            yield self._format_chunk(index, {"role": "assistant", "content": ""}, None)
        for delta in self._find_deltas(progress, output):
            yield self._format_chunk(index, delta, self._find_logprobs(index), usage=True)
        if is_finished:
            remaining = self._find_logprobs(index)
            if remaining is not None:
                yield self._format_chunk(index, {"content": ""}, remaining, usage=True)
            yield self._format_chunk(index, {}, None, finish=_format_finish(state, output))

    def format_end(self) -> Iterator[dict[str, Any]]:
        """The last chunk of a stream that reports its usage."""
        if self._options.include_usage:
            usage = _format_usage(self._states, self._options.n, self._header.cache_report)
            yield self._header.build(self.kind) | {"choices": [], "usage": usage}

    def _find_deltas(self, progress: _Progress, output: ParsedOutput) -> Iterator[dict[str, Any]]:
        if reasoning := output.reasoning[progress.reasoning :]:
            progress.reasoning = len(output.reasoning)
            yield {"reasoning_content": reasoning}
        if content := output.content[progress.content :]:
            progress.content = len(output.content)
            yield {"content": content}
        for number, call in enumerate(output.tool_calls[progress.tool_calls :], progress.tool_calls):
            progress.tool_calls = number + 1
            yield {"tool_calls": [_format_call(number, call)]}

    def _find_logprobs(self, index: int) -> dict[str, Any] | None:
        if not self._options.logprobs:
            return None
        rows, progress = self._states[index].output_logprobs, self._progress[index]
        since, progress.tokens = progress.tokens, len(rows.tokens)
        return _format_chat_logprobs(rows, since) if since < len(rows.tokens) else None

    def _format_chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        *,
        usage: bool = False,
        finish: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        chunk = self._header.build(self.kind)
        choice = {"index": index, "delta": {"reasoning_content": None} | delta, "logprobs": logprobs}
        chunk["choices"] = [choice | (finish or {"finish_reason": None, "matched_stop": None})]
        if usage and self._options.continuous_usage:
            chunk["usage"] = _format_usage(self._states, self._options.n, self._header.cache_report)
        return chunk


class TextChunkFormatter(ChatChunkFormatter):
    """The chunks of a completions stream."""

    kind = "text_completion"

    def format_chunks(self, index: int) -> Iterator[dict[str, Any]]:
        """What is new of one choice."""
        options = self._options
        state = self._states[index]
        progress = self._progress[index]
        text = state.text or ""
        tokens = state.tokens
        since = progress.tokens
        is_first = not progress.started
        echo = options.echoes[index] if options.echoes and is_first else ""
        delta = text[progress.content :]
        progress.started = True
        progress.content = len(text)
        progress.tokens = len(tokens)
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + delta,
            "logprobs": None,
            **_format_finish(state, None),
        }
        if options.logprobs and (since < len(tokens) or is_first):
            choice["logprobs"] = _format_text_logprobs(state, echo=bool(echo), since=since)
        if options.return_token_ids:
            choice["token_ids"] = list(tokens[since:])
            if is_first:
                choice["prompt_token_ids"] = [int(token) for token in state.prompt]
        chunk = self._header.build(self.kind) | {"choices": [choice], "usage": None}
        if options.continuous_usage:
            chunk["usage"] = _format_usage(self._states, options.n, self._header.cache_report)
        yield chunk
