"""Replies as OpenAI's endpoints write them, with the few fields SGLang adds: whole, or as the pieces of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from miles.backends.native.server.chat import Told
from miles.backends.native.server.native import body_of, experts_of
from miles.backends.native.server.reply import Line, Lines, Reply
from miles.backends.native.server.speech import Parts
from miles.backends.native.server.tools import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What every object of one reply, and every piece of one stream, begins with."""

    id: str
    model: str
    created: int
    cache_report: bool = False

    def open(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


# -- whole ----------------------------------------------------------------------------------


def chat_body(replies: Sequence[Reply], told: Told, frame: Frame) -> dict[str, Any]:
    """A ``chat.completion``."""
    choices: list[dict[str, Any]] = []
    for index, reply in enumerate(replies):
        parts = told.manner.parts(reply.text or "", whole=True)
        choice: dict[str, Any] = {
            "index": index,
            "message": {
                "role": "assistant",
                "content": parts.content,
                "reasoning_content": parts.reasoning or None,
                "tool_calls": [_call(i, call) for i, call in enumerate(parts.calls)] or None,
            },
            "logprobs": _chat_logprobs(reply.output) if told.logprobs else None,
            **_end(reply, parts),
        }
        if told.prompt_ids:
            choice["prompt_token_ids"] = [int(token) for token in reply.prompt]
        if told.token_ids:
            choice["response_token_ids"] = list(reply.tokens)
        if told.meta:
            choice["meta_info"] = body_of(reply)["meta_info"]
        choices.append(choice)
    return _closed(frame.open("chat.completion"), choices, replies, told, frame)


def text_body(replies: Sequence[Reply], told: Told, frame: Frame) -> dict[str, Any]:
    """A ``text_completion``."""
    choices: list[dict[str, Any]] = []
    for index, reply in enumerate(replies):
        echo = told.prompts[index] if told.prompts else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + (reply.text or ""),
            "logprobs": _text_logprobs(reply.input() if echo else Lines(), reply.output) if told.logprobs else None,
            **_end(reply, None),
        }
        if told.token_ids:
            choice["token_ids"] = list(reply.tokens)
        if told.prompt_ids:
            choice["prompt_token_ids"] = [int(token) for token in reply.prompt]
        choices.append(choice)
    return _closed(frame.open("text_completion"), choices, replies, told, frame)


def _closed(
    body: dict[str, Any], choices: list[dict[str, Any]], replies: Sequence[Reply], told: Told, frame: Frame
) -> dict[str, Any]:
    body |= {
        "choices": choices,
        "usage": usage_of(replies, told.n, frame.cache_report),
        "metadata": {"weight_version": replies[0].version},
    }
    if (experts := experts_of(replies[0])) is not None:
        body["sglext"] = {"routed_experts": experts}
    return body


def usage_of(replies: Sequence[Reply], n: int, cache_report: bool) -> dict[str, Any]:
    """Tokens read and written; a prompt counts once however many answers it got."""
    prompt = sum(len(reply.prompt) for reply in replies[::n])
    written = sum(len(reply.tokens) for reply in replies)
    cached = sum(reply.answer.cached_tokens for reply in replies[::n])
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + written,
        "completion_tokens": written,
        "prompt_tokens_details": {"cached_tokens": cached} if cache_report and cached else None,
        "reasoning_tokens": 0,
    }


def _end(reply: Reply, parts: Parts | None) -> dict[str, Any]:
    finish = reply.finish
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    if finish.kind == "stop" and parts is not None and parts.calls:
        return {"finish_reason": "tool_calls", "matched_stop": None}
    return {"finish_reason": finish.kind, "matched_stop": finish.matched if finish.kind == "stop" else None}


def _call(index: int, call: Call) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "index": index,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


# -- log-probs ------------------------------------------------------------------------------


def _chat_logprobs(lines: Lines, since: int = 0) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for i, line in enumerate(lines.tokens[since:], since):
        tops = lines.tops[i] if lines.tops else None
        content.append({**_token(line), "top_logprobs": [_token(each) for each in tops or ()]})
    return {"content": content}


def _token(line: Line) -> dict[str, Any]:
    logprob, _, word = line
    word = word or ""
    return {"token": word, "bytes": list(word.encode()), "logprob": logprob}


def _text_logprobs(given: Lines, output: Lines, since: int = 0) -> dict[str, Any]:
    tokens = [*given.tokens, *output.tokens[since:]]
    tops = [*given.tops, *output.tops[since:]]
    return {
        "text_offset": [-1] * len(tokens),
        "token_logprobs": [logprob for logprob, _, _ in tokens],
        "tokens": [word for _, _, word in tokens],
        "top_logprobs": [None if row is None else {word or "": logprob for logprob, _, word in row} for row in tops],
    }


# -- pieces ---------------------------------------------------------------------------------


class ChatPieces:
    """The pieces of a chat stream, choice by choice; what was told is not told again."""

    def __init__(self, count: int, told: Told, frame: Frame) -> None:
        self._told, self._frame = told, frame
        self._reasoning, self._content = [0] * count, [0] * count
        self._calls, self._lines = [0] * count, [0] * count
        self._begun = [False] * count

    def news(self, index: int, reply: Reply, so_far: Sequence[Reply]) -> Iterator[dict[str, Any]]:
        """What is new of one choice; its last piece says why it ended."""
        finish, told = reply.finish, self._told
        parts = told.manner.parts(reply.text or "", whole=finish is not None)
        if not self._begun[index]:
            self._begun[index] = True
            yield self._piece(index, {"role": "assistant", "content": ""}, None)
        for delta in self._deltas(index, parts):
            yield self._piece(index, delta, self._logprobs(index, reply), so_far)
        if finish is not None:
            left = self._logprobs(index, reply)
            if left is not None:
                yield self._piece(index, {"content": ""}, left, so_far)
            yield self._piece(index, {}, None, (), _end(reply, parts))

    def _deltas(self, index: int, parts: Parts) -> Iterator[dict[str, Any]]:
        if reasoning := parts.reasoning[self._reasoning[index] :]:
            self._reasoning[index] = len(parts.reasoning)
            yield {"reasoning_content": reasoning}
        if content := parts.content[self._content[index] :]:
            self._content[index] = len(parts.content)
            yield {"content": content}
        for number, call in enumerate(parts.calls[self._calls[index] :], self._calls[index]):
            self._calls[index] = number + 1
            yield {"tool_calls": [_call(number, call)]}

    def _logprobs(self, index: int, reply: Reply) -> dict[str, Any] | None:
        if not self._told.logprobs:
            return None
        lines = reply.output
        since, self._lines[index] = self._lines[index], len(lines.tokens)
        return _chat_logprobs(lines, since) if since < len(lines.tokens) else None

    def _piece(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        so_far: Sequence[Reply] = (),
        end: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        piece = self._frame.open("chat.completion.chunk")
        choice = {"index": index, "delta": {"reasoning_content": None} | delta, "logprobs": logprobs}
        piece["choices"] = [choice | (end or {"finish_reason": None, "matched_stop": None})]
        if so_far and self._told.running_usage:
            piece["usage"] = usage_of(so_far, self._told.n, self._frame.cache_report)
        return piece


class TextPieces:
    """The pieces of a completions stream."""

    def __init__(self, count: int, told: Told, frame: Frame) -> None:
        self._told, self._frame = told, frame
        self._text, self._lines = [0] * count, [0] * count
        self._begun = [False] * count

    def news(self, index: int, reply: Reply, so_far: Sequence[Reply]) -> Iterator[dict[str, Any]]:
        """What is new of one choice."""
        told, text = self._told, reply.text or ""
        first, self._begun[index] = not self._begun[index], True
        echo = told.prompts[index] if told.prompts and first else ""
        delta, self._text[index] = text[self._text[index] :], len(text)
        tokens, since = reply.tokens, self._lines[index]
        self._lines[index] = len(tokens)
        choice: dict[str, Any] = {"index": index, "text": echo + delta, "logprobs": None, **_end(reply, None)}
        if told.logprobs and (since < len(tokens) or first):
            choice["logprobs"] = _text_logprobs(reply.input() if echo else Lines(), reply.output, since)
        if told.token_ids:
            choice["token_ids"] = list(tokens[since:])
            if first:
                choice["prompt_token_ids"] = [int(token) for token in reply.prompt]
        piece = self._frame.open("text_completion") | {"choices": [choice], "usage": None}
        if told.running_usage:
            piece["usage"] = usage_of(so_far, told.n, self._frame.cache_report)
        yield piece


def usage_piece(kind: str, replies: Sequence[Reply], told: Told, frame: Frame) -> dict[str, Any]:
    """The last piece of a stream that was asked to count."""
    return frame.open(kind) | {"choices": [], "usage": usage_of(replies, told.n, frame.cache_report)}
