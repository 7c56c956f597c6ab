"""How a step's sequences are laid out over their pages, so that all layers attend in a few fused calls.

Shapes: T new tokens of all sequences, B sequences, M most pages of one; in a block: N rows of pages, Q most queries
of a row, X its real queries, C most tokens of context.

Sequences are attended to in blocks, padded to the longest; what a block needs is laid out once for all layers that
look back alike. There are three kinds. A *chunk* is a row for each sequence with several new tokens, which see
causally. A *leaf* is a row for each sequence with one. Where neighbours begin with the same pages (samples of one
prompt), these are cut off their leaves and become one row of a *trunk*, whose queries are all of theirs; the two
results are weighted by their sums of exponentials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.cache import Ints

# A further block costs about as much as attending to this many pages with one query.
_BLOCK_COST = 160


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of pages and their queries.

    ``queries`` are the N * Q tokens that ask, some twice where a row has fewer; ``real`` are those of
    the N * Q places that count, in order. Both are None when every place counts and they are neighbours,
    from token ``first`` on. ``mask`` [N, 1, Q or 1, C] is added to the scores.
    """

    rows: int
    width: int
    first: int
    context: int
    pages: Tensor
    mask: Tensor
    queries: Tensor | None = None
    real: Tensor | None = None

    def ask(self, q_THd: Tensor) -> Tensor:
        """The queries of all places, [N * Q, H, d]; of any tensor with a row a token, its rows."""
        if self.queries is None:
            return q_THd[self.first : self.first + self.rows * self.width]
        return q_THd.index_select(0, self.queries)


@dataclass(frozen=True, slots=True)
class Blocks:
    """All blocks of a step for layers that look back alike.

    Single tokens come first. Leaves give them in the order ``leaf_order`` (None: their own); trunks
    give those of ``trunk_tokens``. Chunks follow in their own order.
    """

    leaves: tuple[Block, ...]
    leaf_order: Tensor | None
    trunks: tuple[Block, ...]
    trunk_tokens: Tensor | None
    chunks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class _Reach:
    """How far back a token sees: no further than ``window`` tokens, nothing outside its ``chunk`` of positions."""

    window: int | None = None
    chunk: int | None = None

    def lowest(self, positions: Ints) -> Ints:
        """The first position that each of these sees."""
        lowest = np.zeros_like(positions)
        if self.window is not None:
            lowest = np.maximum(lowest, positions + 1 - self.window)
        if self.chunk is not None:
            lowest = np.maximum(lowest, positions // self.chunk * self.chunk)
        return lowest


_ALL = _Reach()


@dataclass(frozen=True, slots=True)
class _Site:
    """Where a layout is made, and for what."""

    page_size: int
    device: torch.device
    dtype: torch.dtype

    def send(self, values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self.device)

    def mask(self, visible: Tensor, context: int, lowest: Tensor | None = None) -> Tensor:
        """Minus infinity from the ``visible``-th token of the context on, and before the ``lowest``."""
        places = torch.arange(context, device=self.device)
        hidden = places >= visible[..., None]
        if lowest is not None:
            hidden = hidden | (places < lowest[..., None])
        return torch.zeros(hidden.shape, device=self.device, dtype=self.dtype).masked_fill_(hidden, -math.inf)


class Layout:
    """One step: ``slots_T`` of its new tokens, and its blocks, laid out when the first layer asks.

    ``longest`` is the most tokens a sequence has, its new ones among them.
    """

    def __init__(self, starts_B: Ints, counts_B: Ints, pages_BM: Ints, slots_T: Ints, site: _Site) -> None:
        self._starts_B, self._counts_B, self._pages_BM, self._site = starts_B, counts_B, pages_BM, site
        self._one = int((counts_B == 1).sum())
        self._seen: dict[_Reach, Blocks] = {}
        self.slots_T = site.send(slots_T)
        self.longest = int((starts_B + counts_B).max())

    @cached_property
    def shared(self) -> Blocks:
        """Everyone sees all that came before; what neighbours have in common is a trunk."""
        singles = _singles(self._starts_B[: self._one], self._pages_BM[: self._one], self._site)
        return Blocks(*singles, self._chunks(_ALL))

    def seen(self, window: int | None = None, chunk: int | None = None) -> Blocks:
        """No trunks: every row holds all that its queries see, where they see only so far back."""
        reach = _Reach(window, chunk)
        if reach not in self._seen:
            self._seen[reach] = self._lay_out(reach)
        return self._seen[reach]

    def _lay_out(self, reach: _Reach) -> Blocks:
        if reach == _ALL and self.shared.trunk_tokens is None:
            return self.shared
        starts_B = self._starts_B[: self._one]
        leaves, order = (), None
        if self._one:
            lowest_B = None if reach == _ALL else reach.lowest(starts_B)
            base_B = np.zeros_like(starts_B) if lowest_B is None else lowest_B // self._site.page_size
            leaves, order = _leaves(starts_B, base_B, lowest_B, self._pages_BM[: self._one], self._site)
        return Blocks(leaves, order, (), None, self._chunks(reach))

    def _chunks(self, reach: _Reach) -> tuple[Block, ...]:
        one, size = self._one, self._site.page_size
        if one == len(self._counts_B):
            return ()
        firsts = np.cumsum(self._counts_B)[one:] - self._counts_B[one:]
        starts, counts, pages = self._starts_B[one:], self._counts_B[one:], self._pages_BM[one:]
        needed = -(-(starts + counts) // size) - reach.lowest(starts) // size
        return tuple(
            _chunk(starts[lo:hi], counts[lo:hi], int(firsts[lo]), pages[lo:hi], reach, self._site)
            for lo, hi in _split(counts, needed)
        )


def lay_out(
    starts_B: Ints, counts_B: Ints, pages_BM: Ints, page_size: int, *, device: torch.device, dtype: torch.dtype
) -> tuple[Ints, Layout]:
    """Positions of the new tokens, and the layout of a step.

    Sequence b has ``starts_B[b]`` tokens in its pages and brings ``counts_B[b]`` more. Sequences with
    one new token come first, those that share pages as neighbours; further on, those of like length.
    """
    ends_B = np.cumsum(counts_B)
    firsts_B = ends_B - counts_B
    owner_T = np.repeat(np.arange(len(counts_B)), counts_B)
    positions_T = np.arange(int(ends_B[-1])) - (firsts_B - starts_B)[owner_T]
    slots_T = pages_BM[owner_T, positions_T // page_size] * page_size + positions_T % page_size
    return positions_T, Layout(starts_B, counts_B, pages_BM, slots_T, _Site(page_size, device, dtype))


# -- singles --------------------------------------------------------------------------------


def _singles(
    starts_B: Ints, pages_BM: Ints, site: _Site
) -> tuple[tuple[Block, ...], Tensor | None, tuple[Block, ...], Tensor | None]:
    """Leaves and trunks of sequences with one new token each."""
    if len(starts_B) == 0:
        return (), None, (), None
    groups = _common(starts_B // site.page_size, pages_BM) if site.device.type == "cpu" else []
    trunk_B = np.zeros(len(starts_B), np.int64)
    for lo, hi, depth in groups:
        trunk_B[lo:hi] = depth
    trunks, tokens = (), None
    if groups:
        groups.sort(key=lambda group: group[2])
        firsts, ends, depths = (np.array(column) for column in zip(*groups, strict=True))
        cuts = _split(ends - firsts, depths)
        trunks = tuple(_trunk(firsts[lo:hi], (ends - firsts)[lo:hi], depths[lo:hi], pages_BM, site) for lo, hi in cuts)
        tokens = site.send(np.concatenate([np.arange(lo, hi) for lo, hi, _ in groups]))
    leaves, order = _leaves(starts_B, trunk_B, None, pages_BM, site)
    return leaves, order, trunks, tokens


def _common(whole_B: Ints, pages_BM: Ints) -> list[tuple[int, int, int]]:
    """Neighbours (from, to) that begin with the same (count) full pages, where that saves more than it costs."""
    most = int(whole_B.max())
    both = np.minimum(whole_B[1:], whole_B[:-1])
    same = (pages_BM[1:, :most] == pages_BM[:-1, :most]) & (np.arange(most) < both[:, None])
    groups: list[tuple[int, int, int]] = []
    first = depth = saved = 0
    for last, common in enumerate([*np.logical_and.accumulate(same, 1).sum(1).tolist(), 0]):
        size = last + 1 - first
        joined = common if size == 1 else min(depth, common)
        if joined and joined * size >= depth * (size - 1):
            depth = joined
            continue
        if size > 1:
            groups.append((first, last + 1, depth))
            saved += (size - 1) * depth
        first, depth = last + 1, 0
    return groups if saved > _BLOCK_COST else []


def _leaves(
    starts_B: Ints, base_B: Ints, lowest_B: Ints | None, pages_BM: Ints, site: _Site
) -> tuple[tuple[Block, ...], Tensor | None]:
    """Blocks of one query a row, over the pages from ``base_B`` on; and the order that puts their results right."""
    visible_B = starts_B + 1 - base_B * site.page_size
    if lowest_B is not None:
        lowest_B = lowest_B - base_B * site.page_size
    needed_B = -(-visible_B // site.page_size)
    order = np.argsort(needed_B, kind="stable")
    cuts = _split(np.ones_like(needed_B), needed_B[order])
    if len(cuts) == 1:
        return (_leaf(None, visible_B, base_B, lowest_B, pages_BM, site),), None
    leaves = tuple(_leaf(order[lo:hi], visible_B, base_B, lowest_B, pages_BM, site) for lo, hi in cuts)
    return leaves, site.send(np.argsort(order))


def _leaf(
    rows: Ints | None, visible_B: Ints, base_B: Ints, lowest_B: Ints | None, pages_BM: Ints, site: _Site
) -> Block:
    """One block of leaves; ``rows`` None is all of them."""
    if rows is not None:
        visible_B, base_B, pages_BM = visible_B[rows], base_B[rows], pages_BM[rows]
        lowest_B = None if lowest_B is None else lowest_B[rows]
    context = int(visible_B.max())
    lowest = None if lowest_B is None else site.send(lowest_B)[:, None, None]
    return Block(
        rows=len(visible_B),
        width=1,
        first=0,
        context=context,
        pages=site.send(_from(base_B, -(-context // site.page_size), pages_BM).ravel()),
        mask=site.mask(site.send(visible_B)[:, None, None], context, lowest),
        queries=None if rows is None else site.send(rows),
    )


def _trunk(firsts: Ints, sizes: Ints, depths: Ints, pages_BM: Ints, site: _Site) -> Block:
    """A row for each group of neighbours: their common pages, asked by all of them."""
    queries, real = _padded(sizes)
    queries += (firsts - (np.cumsum(sizes) - sizes))[:, None]
    context = int(depths.max()) * site.page_size
    return Block(
        rows=len(firsts),
        width=int(sizes.max()),
        first=0,
        context=context,
        pages=site.send(pages_BM[firsts, : int(depths.max())].ravel()),
        mask=site.mask(site.send(depths * site.page_size)[:, None, None], context),
        queries=site.send(queries.ravel()),
        real=site.send(real),
    )


# -- chunks ---------------------------------------------------------------------------------


def _chunk(starts: Ints, counts: Ints, first: int, pages_NM: Ints, reach: _Reach, site: _Site) -> Block:
    """A row for each sequence: its new tokens see what came before them."""
    base_N = reach.lowest(starts) // site.page_size
    width, context = int(counts.max()), int((starts + counts - base_N * site.page_size).max())
    queries = real = lowest = None
    if int(counts.min()) < width:
        places, kept = _padded(counts)
        queries, real = site.send((places + first).ravel()), site.send(kept)
    offset_N1 = base_N[:, None] * site.page_size
    if reach != _ALL:
        # A filling place asks as the last real one does, so that it too sees something.
        positions_NQ = starts[:, None] + np.minimum(np.arange(width), counts[:, None] - 1)
        lowest = site.send(reach.lowest(positions_NQ) - offset_N1)[:, None]
    visible_NQ = site.send(starts[:, None] - offset_N1 + np.arange(1, width + 1))
    return Block(
        rows=len(starts),
        width=width,
        first=first,
        context=context,
        pages=site.send(_from(base_N, -(-context // site.page_size), pages_NM).ravel()),
        mask=site.mask(visible_NQ[:, None], context, lowest),
        queries=queries,
        real=real,
    )


# -- both -----------------------------------------------------------------------------------


def _from(base_N: Ints, count: int, pages_NM: Ints) -> Ints:
    """``count`` pages of each row from its ``base_N`` on; where it has no more, any that exists."""
    if not base_N.any():
        return pages_NM[:, :count]
    columns_NM = base_N[:, None] + np.arange(count)
    return np.take_along_axis(pages_NM, np.minimum(columns_NM, pages_NM.shape[1] - 1), 1)


def _padded(counts_N: Ints) -> tuple[Ints, Ints]:
    """Runs of neighbours as rows of equal width, each filled up with its last one; and which places are not filling."""
    places_Q = np.arange(int(counts_N.max()))
    firsts_N = np.cumsum(counts_N) - counts_N
    queries_NQ = firsts_N[:, None] + np.minimum(places_Q, counts_N[:, None] - 1)
    return queries_NQ, np.flatnonzero(places_Q < counts_N[:, None])


def _split(width: Ints, pages: Ints, base: int = 0) -> list[tuple[int, int]]:
    """Cut neighbours into blocks while that saves more padding than a block costs: the best cut, then each half."""
    total = len(width)
    whole = total * int(width.max()) * int(pages.max())
    if total > 1 and whole > 2 * _BLOCK_COST:
        sizes = np.arange(1, total)
        left = sizes * np.maximum.accumulate(width)[:-1] * np.maximum.accumulate(pages)[:-1]
        right = sizes * np.maximum.accumulate(width[::-1])[:-1] * np.maximum.accumulate(pages[::-1])[:-1]
        cost = left + right[::-1]
        cut = int(cost.argmin())
        if cost[cut] + _BLOCK_COST < whole:
            cut += 1
            return _split(width[:cut], pages[:cut], base) + _split(width[cut:], pages[cut:], base + cut)
    return [(base, base + total)]
