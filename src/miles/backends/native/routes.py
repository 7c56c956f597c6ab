"""The experts of every token whose keys and values are in the pages, kept beside them in host memory.

Shapes: C slots in all pages, T tokens, L layers with experts, x experts a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from miles.backends.native.order import Ints, Order, positions_of, slots_of
from miles.core.types import Array


class Routes:
    """A row for each slot of the cache, written as steps land; whoever finds a prefix finds its experts too.

    ``flying`` are copies of pages (to -> from) in steps that have not landed: what they copy is still where it was.
    """

    def __init__(self, none_expert: Array, pages: int, page_size: int) -> None:
        # numpy leaves zeroing to the operating system: slots nobody uses take no memory.
        self._experts_CLx = np.zeros((pages * page_size, *none_expert.shape), none_expert.dtype)
        self._size = page_size
        self.flying: dict[int, int] = {}
        self.none_TLx = self._experts_CLx[:0]

    def write(self, order: Order, routed_TLx: Array) -> None:
        """Take in what a step recorded, after its copies."""
        sources, targets = order.copies
        if len(targets):
            held = self._experts_CLx.reshape(-1, self._size, *self._experts_CLx.shape[1:])
            held[targets] = held[sources]
            for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                if self.flying.get(target) == source:
                    del self.flying[target]
        self._experts_CLx[slots_of(order, positions_of(order), self._size)] = routed_TLx

    def read(self, pages: Sequence[int], first: int, end: int, due: Mapping[int, int]) -> Array:
        """The experts of tokens ``first`` to ``end`` of a sequence in these pages, some of them copies that are
        ``due``: whoever ends with its first token never has its own."""
        copied = self.flying | dict(due)
        pages = [copied.get(page, page) for page in pages]
        places: Ints = np.arange(first, end)
        return self._experts_CLx[np.array(pages, np.int64)[places // self._size] * self._size + places % self._size]
