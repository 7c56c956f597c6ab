"""Who holds which page of the key-value cache, and which pages already hold a given prefix.

Pages are counted by their holders. A page nobody holds is free, or idle when its content can still be
found by prefix; idle pages are given away oldest first. Prefixes are a tree of pages: a key is the node
of the page before and the tokens of this one, so a match is exact. A prompt's last page, seldom full,
is found by its own tokens alike; whoever finds it takes a copy, since its holder writes on behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

ROOT = 0

Key = tuple[int, tuple[int, ...]]


class Found(NamedTuple):
    """Full pages of a prefix and their nodes; ``tail`` holds all the rest of the tokens, to be copied."""

    pages: list[int]
    nodes: list[int]
    tail: int | None


class Pages:
    """The pages of one cache. ``copies`` (to -> from) are due before the next tokens are written.

    ``epoch`` counts flushes: what was computed in an earlier one must not be entered.
    """

    def __init__(self, total: int, size: int, *, share: bool) -> None:
        self.total = total
        self.size = size
        self.share = share
        self.epoch = 0
        self.copies: dict[int, int] = {}
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._idle: dict[int, None] = {}
        self._index: dict[Key, tuple[int, int]] = {}
        self._keys: dict[int, list[Key]] = {}
        self._nodes = count(ROOT + 1)
        self._unwritten: set[Key] = set()

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """A page of one's own; there must be one available."""
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._idle))
            del self._idle[page]
            self._forget(page)
        self._holders[page] = 1
        return page

    def hold(self, pages: Sequence[int]) -> None:
        """Share pages."""
        for page in pages:
            if self._holders[page] == 0:
                del self._idle[page]
            self._holders[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Let go of a sequence's pages, in its order. Later pages grow old first: they are of no use alone."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            self.copies.pop(page, None)
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    def find(self, tokens: Sequence[int]) -> Found:
        """The longest known prefix of ``tokens``, at least one token short: its last one is to be computed."""
        size, whole = self.size, (len(tokens) - 1) // self.size
        found = Found([], [], None)
        if not self.share:
            return found
        node = ROOT
        for start in range(0, whole * size, size):
            entry = self._index.get((node, tuple(tokens[start : start + size])))
            if entry is None:
                return found
            page, node = entry
            found.pages.append(page)
            found.nodes.append(node)
        key = (node, tuple(tokens[whole * size :]))
        # Copies come before a step's writes, so what this step is going to write cannot be copied in it.
        tail = self._index.get(key) if len(key[1]) > 1 and key not in self._unwritten else None
        return found if tail is None else found._replace(tail=tail[0])

    def enter(self, node: int, tokens: Sequence[int], page: int) -> int:
        """Make a page found by its tokens behind ``node``; returns its node, or that of the one already there.

        It may be entered ahead of being written, by the step that is being planned.
        """
        key = (node, tuple(tokens))
        entry = self._index.get(key)
        if entry is None:
            entry = self._index[key] = (page, next(self._nodes))
            self._keys.setdefault(page, []).append(key)
            self._unwritten.add(key)
        return entry[1]

    def written(self) -> None:
        """All that was entered is there now."""
        self._unwritten.clear()

    def flush(self) -> None:
        """Forget every prefix; holders keep their pages."""
        self.epoch += 1
        self._index.clear()
        self._keys.clear()
        self._unwritten.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def take_copies(self) -> dict[int, int]:
        """The copies that are due, now the caller's duty."""
        copies, self.copies = self.copies, {}
        return copies

    def _forget(self, page: int) -> None:
        for key in self._keys.pop(page):
            del self._index[key]

    def check(self, held: Sequence[int]) -> None:
        """Assert that the books balance, given every holding of every sequence."""
        holders = [0] * self.total
        for page in held:
            holders[page] += 1
        assert holders == self._holders
        unheld = [page for page, n in enumerate(holders) if n == 0]
        assert sorted([*self._free, *self._idle]) == unheld
        assert all(page in self._keys for page in self._idle)
        assert {page for page, _ in self._index.values()} == set(self._keys)
