"""A ring of hashes on which every key has a place, and walks from there over the engines.

Each engine stands at many points of the ring. A key belongs to the engine at the first point after its own hash,
so an engine that joins takes its share of keys from all others alike, one that leaves gives its own to all others,
and every other key stays where it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from hashlib import blake2b


def place_of(key: bytes) -> int:
    """Where a key is on the ring: the same in every process, on every machine."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


class Ring:
    """Names, each at ``points`` places; more points share keys out more evenly."""

    def __init__(self, points: int = 160) -> None:
        self._points = points
        self._members: dict[str, list[tuple[int, str]]] = {}
        self._places: list[int] = []
        self._names: list[str] = []
        self._arranged = True

    def add(self, name: str) -> None:
        self._members[name] = [(place_of(f"{name}#{i}".encode()), name) for i in range(self._points)]
        self._arranged = False

    def remove(self, name: str) -> None:
        self._members.pop(name, None)
        self._arranged = False

    def walk(self, key: bytes) -> Iterator[str]:
        """Every name once: the key's own first, then those it falls to when it cannot have that."""
        if not self._arranged:
            self._arrange()
        start, count = bisect_right(self._places, place_of(key)), len(self._names)
        seen: set[str] = set()
        for step in range(count):
            name = self._names[(start + step) % count]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == len(self._members):
                    return

    def _arrange(self) -> None:
        """When it is next walked, as many may join at once."""
        stops = sorted(stop for stops in self._members.values() for stop in stops)
        self._places = [place for place, _ in stops]
        self._names = [name for _, name in stops]
        self._arranged = True
