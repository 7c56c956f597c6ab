"""What was told of a reply so far: thoughts and words in the stretches they came in, each told once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from miles.rollout.session.server.ask import Ask, Opened, Told
from miles.rollout.session.speech import Parts

Kind = Literal["reasoning", "content"]


@dataclass(slots=True)
class Stretch:
    """Thoughts, or words, with nothing of the other kind between them."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class News:
    """More of a stretch, told by its place among them; ``begins``: it is the first of it."""

    index: int
    kind: Kind
    text: str
    begins: bool


class Pieces(Protocol):
    """An API's way of telling a turn while it comes: ``more`` as it grows, and once, at the end, ``last``."""

    def more(self, parts: Parts) -> Iterator[dict[str, Any]]: ...
    def last(self, told: Told) -> Iterator[dict[str, Any]]: ...


class Telling:
    """Keeps what was told. ``news`` is given all there is, and tells only what is new of it."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self._told: dict[Kind, int] = {"reasoning": 0, "content": 0}

    def news(self, reasoning: str, content: str) -> Iterator[News]:
        given: tuple[tuple[Kind, str], ...] = (("reasoning", reasoning), ("content", content))
        for kind, text in given:
            fresh = text[self._told[kind] :]
            if not fresh:
                continue
            self._told[kind] = len(text)
            begins = not self.stretches or self.stretches[-1].kind != kind
            if begins:
                self.stretches.append(Stretch(kind, ""))
            self.stretches[-1].text += fresh
            yield News(len(self.stretches) - 1, kind, fresh, begins)


class Opener(ABC):
    """What every API's telling of one turn begins with: nothing told, and an opening that comes once."""

    def __init__(self, opened: Opened, ask: Ask) -> None:
        self._opened, self._ask = opened, ask
        self._telling = Telling()
        self._begun = False

    @abstractmethod
    def _first(self) -> Iterator[dict[str, Any]]:
        """What opens the turn."""

    def _opening(self) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            yield from self._first()
