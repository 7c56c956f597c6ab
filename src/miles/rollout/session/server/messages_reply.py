"""A turn as Anthropic's messages tell it, whole or in events while it comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from miles.rollout.session.server.ask import Ask, Call, Opened, Told
from miles.rollout.session.server.messages import UNREAD
from miles.rollout.session.server.telling import Kind, Opener
from miles.rollout.session.speech import Parts

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def anthropic_body(told: Told, ask: Ask) -> dict[str, Any]:
    """A ``message``."""
    return _open(told, ask) | {"content": list(_blocks(told)), **_end(told), "usage": _usage(told)}


class AnthropicEvents(Opener):
    """The events of a stream, each of the ``type`` it is sent under: blocks that open, grow and close in turn."""

    def more(self, parts: Parts) -> Iterator[dict[str, Any]]:
        """What is new of a reply that is coming."""
        for news in self._telling.news(parts.reasoning, parts.content):
            yield from self._opening()
            if news.begins:
                yield from self._closing(news.index - 1)
                yield {"type": "content_block_start", "index": news.index, "content_block": _EMPTY[news.kind]}
            yield _grown(news.index, str(_EMPTY[news.kind]["type"]), news.text)

    def last(self, told: Told) -> Iterator[dict[str, Any]]:
        """The rest of it, its calls, and its end."""
        yield from self.more(Parts(reasoning=told.reasoning, content=told.content))
        yield from self._opening()
        known = len(self._telling.stretches)
        yield from self._closing(known - 1)
        for index, call in enumerate(told.calls, known):
            block = _called(call)
            yield {"type": "content_block_start", "index": index, "content_block": block | {"input": {}}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        yield {"type": "message_delta", "delta": _end(told), "usage": _usage(told)}
        yield {"type": "message_stop"}

    def _first(self) -> Iterator[dict[str, Any]]:
        """The message's beginning. What of the prompt was found computed is known, and told, at its end."""
        start = _open(self._opened, self._ask) | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": start | {"usage": _counted(len(self._opened.context), 0, 0)}}

    def _closing(self, index: int) -> Iterator[dict[str, Any]]:
        """The end of a stretch's block, if there is such a stretch."""
        if index < 0:
            return
        if self._telling.stretches[index].kind == "reasoning":
            yield _grown(index, "signature", "")
        yield {"type": "content_block_stop", "index": index}


def _grown(index: int, word: str, text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": f"{word}_delta", word: text}}


_EMPTY: dict[Kind, dict[str, Any]] = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "content": {"type": "text", "text": ""},
}


def _open(opened: Opened, ask: Ask) -> dict[str, Any]:
    return {"id": f"msg_{opened.id}", "type": "message", "role": "assistant", "model": ask.model}


def _end(told: Told) -> dict[str, Any]:
    reason = "stop_sequence" if told.matched is not None and not told.calls else _REASONS[told.finish]
    return {"stop_reason": reason, "stop_sequence": told.matched if reason == "stop_sequence" else None}


def _usage(told: Told) -> dict[str, Any]:
    return _counted(*told.usage)


def _counted(read: int, written: int, cached: int) -> dict[str, Any]:
    return {
        "input_tokens": read - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
    }


def _blocks(told: Told) -> Iterator[dict[str, Any]]:
    if told.reasoning:
        yield _EMPTY["reasoning"] | {"thinking": told.reasoning}
    if told.content:
        yield _EMPTY["content"] | {"text": told.content}
    yield from map(_called, told.calls)


def _called(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)}


def _input(call: Call) -> dict[str, Any]:
    try:
        value = json.loads(call.arguments)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # some of what Python reads could not be written again
        value = None
    return value if isinstance(value, dict) else {UNREAD: call.arguments}
