"""A turn as OpenAI's chat tells it, whole or in pieces while it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miles.rollout.session.server.ask import Ask, Call, Opened, Told
from miles.rollout.session.server.telling import Opener
from miles.rollout.session.speech import Parts


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


_FIELDS = {"reasoning": "reasoning_content", "content": "content"}


class ChatPieces(Opener):
    """``chat.completion.chunk``s: who speaks, what was thought, said and called, why it ended, and the count."""

    def more(self, parts: Parts) -> Iterator[dict[str, Any]]:
        """What is new of a reply that is coming."""
        for news in self._telling.news(parts.reasoning, parts.content):
            yield from self._opening()
            yield self._piece({_FIELDS[news.kind]: news.text})

    def last(self, told: Told) -> Iterator[dict[str, Any]]:
        """The rest of it, with the log-probs of all of it, and its end."""
        ask = self._ask
        yield from self._opening()
        yield from self.more(Parts(reasoning=told.reasoning, content=told.content))
        if ask.logprobs:
            yield self._piece({"content": ""}, logprobs=logprobs_of(told))
        for index, call in enumerate(told.calls):
            yield self._piece({"tool_calls": [{"index": index, **_call(call)}]})
        end = {"prompt_token_ids": told.context.tolist(), "token_ids": told.tokens} if ask.token_ids else {}
        yield self._piece({}, finish=told.finish, **end)
        if ask.usage:
            yield _open(told, ask, "chat.completion.chunk") | {"choices": [], "usage": usage_of(told)}

    def _first(self) -> Iterator[dict[str, Any]]:
        yield self._piece({"role": "assistant", "content": ""})

    def _piece(
        self,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **more}
        return _open(self._opened, self._ask, "chat.completion.chunk") | {"choices": [choice]}


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


def _open(opened: Opened, ask: Ask, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{opened.id}", "object": kind, "created": opened.created, "model": ask.model}
