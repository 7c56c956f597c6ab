"""Prefix cache of recurrent states: rows of the state pool that hold the state after a prefix in the prefix tree.

A recurrent state belongs to one position, so a prefix is of use only up to a position whose state was saved: at the end
of a prompt's chunks, one token before the end of a prompt, and where a request ended. A node of the prefix tree (a
page, or the first tokens of one) may have one. The state used least recently is replaced; it is dropped with its page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class CachedState(NamedTuple):
    """The state after ``num_tokens`` of a prefix, at ``row`` of the pool: after ``num_pages`` full pages of it, and the
    tokens of the page ``tail`` behind them, which has to be copied.
    """

    num_tokens: int
    row: int
    num_pages: int
    tail: int | None


class StateCache:
    """``count`` rows of the state pool from ``first_row`` on, by node of the prefix tree."""

    def __init__(self, first_row: int, count: int) -> None:
        self.count = count
        self._free = list(range(first_row + count - 1, first_row - 1, -1))
        self._rows: OrderedDict[int, int] = OrderedDict()
        # The partial pages with a state behind each node: their tokens, node and page.
        self._partials: dict[int, list[tuple[tuple[int, ...], int, int]]] = {}
        self._parents: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def save(self, node: int) -> int | None:
        """Return a row for the state at a node, to which the caller must copy it; None if it is there already."""
        if node in self._rows:
            self._rows.move_to_end(node)
            return None
        if not self._free:
            self.drop(next(iter(self._rows)))
        self._rows[node] = self._free.pop()
        return self._rows[node]

    def add_partial(self, parent: int, tokens: Sequence[int], node: int, page: int) -> None:
        """Let ``find`` see a node that is the first ``tokens`` of a page behind ``parent``."""
        if node not in self._parents:
            self._parents[node] = parent
            self._partials.setdefault(parent, []).append((tuple(tokens), node, page))

    def drop(self, node: int) -> None:
        """Forget the state at a node, if there is one."""
        row = self._rows.pop(node, None)
        if row is not None:
            self._free.append(row)
        parent = self._parents.pop(node, None)
        if parent is not None:
            self._partials[parent] = [each for each in self._partials[parent] if each[1] != node]
            if not self._partials[parent]:
                del self._partials[parent]

    def clear(self) -> None:
        """Forget all states."""
        for node in [*self._rows, *self._parents]:
            self.drop(node)

    def find(self, root: int, nodes: Sequence[int], tokens: Sequence[int], page_size: int) -> CachedState | None:
        """Return the longest prefix of ``tokens`` with a state, at least one token short; None if there is none.

        ``nodes`` are those of its full pages that are in the prefix tree.
        """
        for depth in range(len(nodes), -1, -1):
            node, start = (nodes[depth - 1] if depth else root), depth * page_size
            ends = [each for each in self._partials.get(node, ()) if self._matches(each[0], tokens, start)]
            if ends:
                partial, end_node, page = max(ends, key=lambda each: len(each[0]))
                return CachedState(start + len(partial), self._use(end_node), depth, page)
            if node in self._rows:
                return CachedState(start, self._use(node), depth, None)
        return None

    def check(self) -> None:
        """Assert that every row is free or has one node."""
        assert len(self._free) + len(self._rows) == self.count
        assert len({*self._free, *self._rows.values()}) == self.count
        assert set(self._parents) <= set(self._rows)

    def _matches(self, partial: tuple[int, ...], tokens: Sequence[int], start: int) -> bool:
        return start + len(partial) < len(tokens) and tuple(tokens[start : start + len(partial)]) == partial

    def _use(self, node: int) -> int:
        self._rows.move_to_end(node)
        return self._rows[node]
