"""Who of many has least to do, without looking at each: what that costs does not grow with their number."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

_ROOM = 64


class Bearer(Hashable, Protocol):
    """Only those that are ``open`` are given more."""

    load: int

    @property
    def open(self) -> bool: ...


B = TypeVar("B", bound=Bearer)


class Loads(Generic[B]):
    """Whoever changes someone's ``load``, or opens one, says so with ``note``.

    Of those that have as much to do, who was noted first comes first. Every word is kept until it comes to the top,
    where it counts if it is still true.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, B]] = []
        self._places: dict[B, int] = {}
        self._most = _ROOM

    def note(self, bearer: B) -> None:
        heapq.heappush(self._heap, (bearer.load, self._places.setdefault(bearer, len(self._places)), bearer))
        if len(self._heap) > self._most:
            true = {word[1]: word for word in self._heap if _true(word[0], word[2])}
            self._heap = list(true.values())
            heapq.heapify(self._heap)
            self._most = 4 * len(self._heap) + _ROOM

    def least(self) -> B | None:
        """The open one with the least load, of several the first; None where none is open."""
        while self._heap:
            load, _, bearer = self._heap[0]
            if _true(load, bearer):
                return bearer
            heapq.heappop(self._heap)
        return None


def _true(load: int, bearer: Bearer) -> bool:
    return bearer.load == load and bearer.open
