"""Paged KV cache bookkeeping: page allocation by reference count, and the prefix tree that finds computed pages.

A page without holders is free, or evictable while its content can still be found by prefix; evictable pages are
reused oldest first. Prefixes form a tree of pages: a key is the node of the previous page and the tokens of this one,
so a match is exact. Prefixes computed with a LoRA adapter have another root, below 0. In place of an image's tokens
stand keys of its digest (``core.media.prefix_keys``). A prompt's last page, seldom full, is found by its own tokens in
the same way; a request that finds it copies it, since its holder writes on behind those tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.state_cache import CachedState, StateCache

ROOT = 0

PrefixKey = tuple[int, tuple[int, ...]]


class PrefixMatch(NamedTuple):
    """Full pages of a prefix and their nodes; ``tail`` is a page with all remaining tokens, to be copied."""

    pages: list[int]
    nodes: list[int]
    tail: int | None


class PageAllocator:
    """The pages of one KV cache. ``copies`` (target -> source) are due before the next tokens are written.

    ``epoch`` counts flushes: pages computed in an earlier epoch must not be inserted. ``states`` are the recurrent
    states of prefixes, of a model that has some: they are dropped with their pages.
    """

    def __init__(self, total: int, size: int, *, share: bool, states: StateCache | None = None) -> None:
        self.states = states
        self.total = total
        self.size = size
        self.share = share
        self.epoch = 0
        self.copies: dict[int, int] = {}
        self.unwritten: set[PrefixKey] = set()
        self._free = list(range(total - 1, -1, -1))
        self._ref_counts = [0] * total
        self._evictable: dict[int, None] = {}
        self._index: dict[PrefixKey, tuple[int, int]] = {}
        self._page_keys: dict[int, list[PrefixKey]] = {}
        self._next_node = count(ROOT + 1)

    @property
    def available(self) -> int:
        """Number of pages that can be allocated now."""
        return len(self._free) + len(self._evictable)

    def allocate(self) -> int:
        """Return an unshared page; at least one must be available."""
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._evictable))
            del self._evictable[page]
            for key in self._page_keys.pop(page):
                _, node = self._index.pop(key)
                if self.states is not None:
                    self.states.drop(node)
        self._ref_counts[page] = 1
        return page

    def acquire(self, pages: Sequence[int]) -> None:
        """Add a holder to each page."""
        for page in pages:
            if self._ref_counts[page] == 0:
                del self._evictable[page]
            self._ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a holder from a sequence's pages. Later pages become evictable first: they need the earlier ones."""
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            if self._ref_counts[page]:
                continue
            self.copies.pop(page, None)
            if page in self._page_keys:
                self._evictable[page] = None
            else:
                self._free.append(page)

    def match_state(self, tokens: Sequence[int], root: int = ROOT) -> tuple[PrefixMatch, CachedState | None]:
        """Return the longest cached prefix of ``tokens`` whose recurrent state is cached, and that state."""
        match = self.match_prefix(tokens, root)
        state = None if self.states is None else self.states.find(root, match.nodes, tokens, self.size)
        if state is None:
            return PrefixMatch([], [], None), None
        return PrefixMatch(match.pages[: state.num_pages], match.nodes[: state.num_pages], state.tail), state

    def match_prefix(self, tokens: Sequence[int], root: int = ROOT) -> PrefixMatch:
        """Return the longest cached prefix of ``tokens``, at least one token short: the last one must be computed."""
        size, full_pages = self.size, (len(tokens) - 1) // self.size
        match = PrefixMatch([], [], None)
        if not self.share:
            return match
        node = root
        for start in range(0, full_pages * size, size):
            entry = self._index.get((node, tuple(tokens[start : start + size])))
            if entry is None:
                return match
            page, node = entry
            match.pages.append(page)
            match.nodes.append(node)
        key = (node, tuple(tokens[full_pages * size :]))
        # Copies run before a step's writes, so a page that this step writes cannot be copied in it.
        tail = self._index.get(key) if len(key[1]) > 1 and key not in self.unwritten else None
        return match if tail is None else match._replace(tail=tail[0])

    def insert(self, node: int, tokens: Sequence[int], page: int) -> int:
        """Make a page findable by its tokens behind ``node``; return its node, or that of the page already there.

        A page may be inserted before it is written, by the step that is being scheduled.
        """
        key = (node, tuple(tokens))
        entry = self._index.get(key)
        if entry is None:
            entry = self._index[key] = (page, next(self._next_node))
            self._page_keys.setdefault(page, []).append(key)
            self.unwritten.add(key)
        return entry[1]

    def find_page(self, node: int, tokens: Sequence[int]) -> int:
        """Return the page of these tokens behind ``node``, which must have been inserted."""
        return self._index[node, tuple(tokens)][0]

    def flush(self) -> None:
        """Forget every prefix; holders keep their pages."""
        self.epoch += 1
        if self.states is not None:
            self.states.clear()
        self._index.clear()
        self._page_keys.clear()
        self.unwritten.clear()
        self._free.extend(self._evictable)
        self._evictable.clear()

    def take_copies(self) -> dict[int, int]:
        """Return the due copies; the caller must perform them."""
        copies, self.copies = self.copies, {}
        return copies

    def check(self, held_pages: Sequence[int]) -> None:
        """Assert that reference counts match ``held_pages``: every page of every sequence."""
        ref_counts = [0] * self.total
        for page in held_pages:
            ref_counts[page] += 1
        assert ref_counts == self._ref_counts
        unheld = [page for page, holders in enumerate(ref_counts) if holders == 0]
        assert sorted([*self._free, *self._evictable]) == unheld
        assert all(page in self._page_keys for page in self._evictable)
        assert {page for page, _ in self._index.values()} == set(self._page_keys)
        if self.states is not None:
            self.states.check()


def build_page_allocator(config: NativeConfig, num_pages: int, num_states: int | None) -> PageAllocator:
    """Return the pages of an engine with ``num_states`` cached states; None for a model without recurrent layers.

    Prefixes of a model with recurrent layers are shared only where states are cached.
    """
    states: StateCache | None = None
    if num_states is not None:
        states = StateCache(config.max_running + config.count_draft_states(True), num_states)
    share = config.engine_prefix_cache and num_states != 0
    return PageAllocator(num_pages, config.engine_page_size, share=share, states=states)
