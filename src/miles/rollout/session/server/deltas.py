"""Streaming deltas of a reply: splits growing reasoning and content into segments, each delta emitted once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from miles.rollout.serving.output_parser import ParsedOutput
from miles.rollout.session.server.types import TurnHeader, TurnRequest, TurnResult

SegmentKind = Literal["reasoning", "content"]


@dataclass(slots=True)
class TextSegment:
    """Reasoning, or content, with nothing of the other kind in between."""

    kind: SegmentKind
    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a segment, which has this ``index``; ``is_first``: the segment begins with it."""

    index: int
    kind: SegmentKind
    text: str
    is_first: bool


class DeltaEmitter:
    """Remembers what was emitted: ``update`` takes all text so far and yields only what is new."""

    def __init__(self) -> None:
        self.segments: list[TextSegment] = []
        self._emitted: dict[SegmentKind, int] = {"reasoning": 0, "content": 0}

    def update(self, reasoning: str, content: str) -> Iterator[TextDelta]:
        texts: tuple[tuple[SegmentKind, str], ...] = (("reasoning", reasoning), ("content", content))
        for kind, text in texts:
            delta = text[self._emitted[kind] :]
            if not delta:
                continue
            self._emitted[kind] = len(text)
            is_first = not self.segments or self.segments[-1].kind != kind
            if is_first:
                self.segments.append(TextSegment(kind, ""))
            self.segments[-1].text += delta
            yield TextDelta(len(self.segments) - 1, kind, delta, is_first)


class StreamFormatter(ABC):
    """How an API streams one turn: an opening, ``format_delta`` as the reply grows, and ``format_end`` once.

    ``error_format`` is the API's; ``named_events``: events carry their type as event name; ``done`` ends the stream.
    """

    error_format: Literal["openai", "anthropic"] = "openai"
    named_events = True
    done = b""

    def __init__(self, header: TurnHeader, request: TurnRequest) -> None:
        self._header = header
        self._request = request
        self._deltas = DeltaEmitter()
        self._opened = False

    @abstractmethod
    def format_delta(self, output: ParsedOutput) -> Iterator[dict[str, Any]]:
        """The events for what is new of a reply that is streaming."""

    @abstractmethod
    def format_end(self, result: TurnResult) -> Iterator[dict[str, Any]]:
        """The events for the rest of the reply, its tool calls, and its end."""

    @abstractmethod
    def _format_opening(self) -> Iterator[dict[str, Any]]:
        """The events that open the stream."""

    def _open_once(self) -> Iterator[dict[str, Any]]:
        if not self._opened:
            self._opened = True
            yield from self._format_opening()
