"""Consistent hashing: maps keys to engines on a hash ring.

Each engine has many points on the ring. A key belongs to the engine of the first point after its own hash, so an engine
that is added takes an equal share of keys from all others, one that is removed gives its keys to all others, and every
other key stays where it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from hashlib import blake2b


def hash_key(key: bytes) -> int:
    """The position of a key on the ring, the same in every process."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


class HashRing:
    """A ring of names with ``points`` points each; more points distribute keys more evenly."""

    def __init__(self, points: int = 160) -> None:
        self._points = points
        self._members: dict[str, list[tuple[int, str]]] = {}
        self._positions: list[int] = []
        self._names: list[str] = []
        self._sorted = True

    def add(self, name: str) -> None:
        self._members[name] = [(hash_key(f"{name}#{i}".encode()), name) for i in range(self._points)]
        self._sorted = False

    def remove(self, name: str) -> None:
        self._members.pop(name, None)
        self._sorted = False

    def walk(self, key: bytes) -> Iterator[str]:
        """Every name once: the key's own first, then its fallbacks in order."""
        if not self._sorted:
            self._sort()
        start, count = bisect_right(self._positions, hash_key(key)), len(self._names)
        seen: set[str] = set()
        for step in range(count):
            name = self._names[(start + step) % count]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == len(self._members):
                    return

    def _sort(self) -> None:
        """Done at the next walk, because many engines may be added at once."""
        points = sorted(point for points in self._members.values() for point in points)
        self._positions = [position for position, _ in points]
        self._names = [name for _, name in points]
        self._sorted = True
