"""A turn as OpenAI's responses tell it, whole or in events while it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from miles.rollout.session.server.ask import Ask, Opened, Told
from miles.rollout.session.server.chat_reply import logprobs_of
from miles.rollout.session.server.responses import Echo
from miles.rollout.session.server.telling import Kind, Opener, Stretch, Telling
from miles.rollout.session.speech import Parts

_REPEATED = {
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
"""Fields of a response that are those of its request, and what they are where it has none."""


def response_id(opened: Opened) -> str:
    return f"resp_{opened.id}"


def response_body(told: Told, ask: Ask, echo: Echo) -> dict[str, Any]:
    """A ``response`` that has ended."""
    telling = Telling()
    list(telling.news(told.reasoning, told.content))
    return _body(told, ask, echo, _ended(telling, told))


class ResponseEvents(Opener):
    """The events of a stream, numbered, each of the ``type`` it is sent under: items that open, grow and close."""

    def __init__(self, opened: Opened, ask: Ask, echo: Echo) -> None:
        super().__init__(opened, ask)
        self._echo = echo
        self._numbers = count()

    def more(self, parts: Parts) -> Iterator[dict[str, Any]]:
        """What is new of a reply that is coming."""
        yield from map(self._numbered, self._more(parts))

    def last(self, told: Told) -> Iterator[dict[str, Any]]:
        """The rest of it, its calls, and its end."""
        yield from map(self._numbered, self._last(told))

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        return event | {"sequence_number": next(self._numbers)}

    def _more(self, parts: Parts) -> Iterator[dict[str, Any]]:
        for news in self._telling.news(parts.reasoning, parts.content):
            if news.begins:
                yield from self._opening()
                yield from self._closing(news.index - 1)
                yield from self._item_opening(news.index, news.kind)
            part = _part(news.kind, news.text)
            logprobs = {"logprobs": []} if news.kind == "content" else {}
            yield {"type": f"response.{part['type']}.delta", **self._at(news.index), "delta": news.text, **logprobs}

    def _last(self, told: Told) -> Iterator[dict[str, Any]]:
        yield from self._more(Parts(reasoning=told.reasoning, content=told.content))
        yield from self._opening()
        known = len(self._telling.stretches)
        stretches = _ended(self._telling, told)
        if len(stretches) > known:  # nothing was said, and a message says so
            yield from self._closing(known - 1)
            yield from self._item_opening(known, "content")
        whole = _body(told, self._ask, self._echo, stretches)
        if stretches:
            yield from self._item_closing(len(stretches) - 1, whole["output"][len(stretches) - 1])
        for index, item in enumerate(whole["output"][len(stretches) :], len(stretches)):
            yield from _call_events(index, item)
        yield {"type": f"response.{whole['status']}", "response": whole}

    def _first(self) -> Iterator[dict[str, Any]]:
        opened = _open(self._opened, self._ask, self._echo)
        yield {"type": "response.created", "response": opened}
        yield {"type": "response.in_progress", "response": opened}

    def _closing(self, index: int) -> Iterator[dict[str, Any]]:
        """The end of an item behind which others come, if there is such an item."""
        if index >= 0:
            yield from self._item_closing(index, _item(self._opened, index, self._telling.stretches[index]))

    def _item_opening(self, index: int, kind: Kind) -> Iterator[dict[str, Any]]:
        item = _item(self._opened, index, Stretch(kind, ""), "in_progress") | {"content": []}
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        yield {"type": "response.content_part.added", **self._at(index), "part": _part(kind, "")}

    def _item_closing(self, index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        (part,), at = item["content"], self._at(index)
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield {"type": f"response.{part['type']}.done", **at, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **at, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def _at(self, index: int) -> dict[str, Any]:
        kind = self._telling.stretches[index].kind
        return {"item_id": _id(self._opened, index, kind), "output_index": index, "content_index": 0}


def _call_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A call's item, which is told whole."""
    at, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
    empty = item | {"arguments": "", "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": empty}
    yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
    yield {"type": "response.function_call_arguments.done", **at, "arguments": arguments, "name": item["name"]}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _body(told: Told, ask: Ask, echo: Echo, stretches: Sequence[Stretch]) -> dict[str, Any]:
    cut = told.finish == "length"
    end = {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_items(told, ask, stretches)),
        "usage": _usage(told),
    }
    return _open(told, ask, echo) | end


def _open(opened: Opened, ask: Ask, echo: Echo) -> dict[str, Any]:
    given = {
        name: default if (value := echo.fields.get(name)) is None else value for name, default in _REPEATED.items()
    }
    return {
        "id": response_id(opened),
        "object": "response",
        "created_at": opened.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": ask.model,
        "output": [],
        "usage": None,
        "store": echo.store,
        **given,
    }


def _ended(telling: Telling, told: Told) -> Sequence[Stretch]:
    """All stretches of a reply that has ended; one that neither says nor calls anything says nothing in words."""
    if not told.content and not told.calls:
        telling.stretches.append(Stretch("content", ""))
    return telling.stretches


def _items(told: Told, ask: Ask, stretches: Sequence[Stretch]) -> Iterator[dict[str, Any]]:
    for index, stretch in enumerate(stretches):
        last = index == len(stretches) - 1
        cut = last and told.finish == "length"
        item = _item(told, index, stretch, "incomplete" if cut else "completed")
        if last and stretch.kind == "content" and ask.logprobs:
            item["content"][0]["logprobs"] = logprobs_of(told)["content"]
        yield item
    for index, call in enumerate(told.calls):
        item = {"id": f"fc_{told.id}_{index}", "type": "function_call", "call_id": call.id}
        yield item | {"name": call.name, "arguments": call.arguments, "status": "completed"}


def _item(opened: Opened, index: int, stretch: Stretch, status: str = "completed") -> dict[str, Any]:
    kind = (
        {"type": "message", "role": "assistant"} if stretch.kind == "content" else {"type": "reasoning", "summary": []}
    )
    part = _part(stretch.kind, stretch.text)
    return {"id": _id(opened, index, stretch.kind), **kind, "content": [part], "status": status}


def _part(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _id(opened: Opened, index: int, kind: Kind) -> str:
    return f"{'msg' if kind == 'content' else 'rs'}_{opened.id}_{index}"


def _usage(told: Told) -> dict[str, Any]:
    read, written, cached = told.usage
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }
