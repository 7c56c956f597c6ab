"""A finished turn as OpenAI's chat tells it, whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miles.rollout.session.server.ask import Ask, Call, Told


def chat_body(told: Told, ask: Ask) -> dict[str, Any]:
    """A ``chat.completion``."""
    message: dict[str, Any] = {"role": "assistant", "content": told.content if not told.calls else told.content or None}
    message["refusal"] = None
    if told.reasoning:
        message["reasoning_content"] = told.reasoning
    if told.calls:
        message["tool_calls"] = [_call(call) for call in told.calls]
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "logprobs": logprobs_of(told) if ask.logprobs else None,
        "finish_reason": told.finish,
    }
    if ask.token_ids:
        choice |= {"prompt_token_ids": told.context.tolist(), "token_ids": told.tokens}
    return _open(told, ask, "chat.completion") | {"choices": [choice], "usage": usage_of(told)}


def chat_pieces(told: Told, ask: Ask) -> Iterator[dict[str, Any]]:
    """``chat.completion.chunk``s: who speaks, what was thought, said and called, why it ended, and the count."""
    yield _piece(told, ask, {"role": "assistant", "content": ""})
    if told.reasoning:
        yield _piece(told, ask, {"reasoning_content": told.reasoning})
    logprobs = logprobs_of(told) if ask.logprobs else None
    if told.content or logprobs:
        yield _piece(told, ask, {"content": told.content}, logprobs=logprobs)
    for index, call in enumerate(told.calls):
        yield _piece(told, ask, {"tool_calls": [{"index": index, **_call(call)}]})
    end = {"prompt_token_ids": told.context.tolist(), "token_ids": told.tokens} if ask.token_ids else {}
    yield _piece(told, ask, {}, finish=told.finish, **end)
    if ask.usage:
        yield _open(told, ask, "chat.completion.chunk") | {"choices": [], "usage": usage_of(told)}


def usage_of(told: Told) -> dict[str, Any]:
    """Tokens read and written."""
    read, written, cached = told.usage
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def logprobs_of(told: Told) -> dict[str, Any]:
    """The log-prob of each token that was drawn, the last of the turn included."""
    lines = [
        {"token": word, "logprob": logprob, "bytes": list(word.encode()), "top_logprobs": []}
        for word, logprob in zip(told.words, told.logprobs, strict=True)
    ]
    return {"content": lines, "refusal": None}


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _open(told: Told, ask: Ask, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{told.id}", "object": kind, "created": told.created, "model": ask.model}


def _piece(
    told: Told,
    ask: Ask,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **more}
    return _open(told, ask, "chat.completion.chunk") | {"choices": [choice]}
