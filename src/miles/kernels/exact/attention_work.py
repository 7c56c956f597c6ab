"""How one step of single tokens is cut into chunks of positions, so that a card's processors all have some to read.

Shapes: B rows (sequences that bring one token each), I items, N trunks.

As in ``work``: a row's past is a stretch of tokens, the first tokens that neighbours share are a *trunk*, what follows
in each row is its *leaf*, and every piece of either leaves a partial result. Here pieces are the chunks that exact
attention is defined by. A trunk ends with a whole block, not with a chunk: a leaf that begins within a chunk takes up
the state in which the trunk left it, and leaves its own in the same place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles.kernels.cache import Ints
from miles.kernels.exact.attention_plain import BLOCK, CHUNK
from miles.kernels.work import DecodeWork

_NONE: Ints = np.zeros(0, np.int64)


class Parts(NamedTuple):
    """Partial results, a place a chunk: values weighted by powers, and the highest exponents and sums of powers."""

    out_IHe: Tensor
    top_sum_IH2: Tensor


class _Trunks(NamedTuple):
    """Tokens [begin, end) of rows [first, first + rows)."""

    first_N: Ints
    rows_N: Ints
    begin_N: Ints
    end_N: Ints


class _Grown(NamedTuple):
    """A step whose items serve while no row begins another chunk, and the item that holds each row's last token."""

    chunks_B: Ints
    group_B: Ints
    shared_B: Ints
    terms: tuple[int, ...]
    last_B: Ints


class ChunkWork(DecodeWork):
    """``DecodeWork`` whose items are chunks. Where there is no room for a place a chunk, a row's first are one item.

    That is the same sum: a row's chunks are joined from the first on.
    """

    def __init__(self, max_rows: int, max_items: int, device: torch.device, *, trunk_queries: int = 64) -> None:
        super().__init__(max_rows, max_items, device, trunk_queries=trunk_queries)
        self._grown: _Grown | None = None
        self._parts: dict[tuple[int, int], Parts] = {}

    def parts(self, heads: int, width: int) -> Parts:
        """Room for the partial results of layers of one shape; made when the first of them asks."""
        if (heads, width) not in self._parts:
            shape = (self.max_items, heads)
            self._parts[heads, width] = Parts(
                torch.zeros((*shape, width), device=self.device), torch.zeros((*shape, 2), device=self.device)
            )
        return self._parts[heads, width]

    def fill(
        self,
        lengths_B: Ints,
        group_B: Ints,
        shared_B: Ints,
        *,
        kv_heads: int,
        queries_per_kv: int,
        sms: int,
        window: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """Cut a step into items; arguments as of ``DecodeWork``."""
        assert len(lengths_B) <= self.max_rows, "more rows than the work was made for"
        self.sms = sms
        before, self._turn = self._lists[self._turn], (self._turn + 1) % len(self._lists)
        if self._sent is not None:
            self._sent[self._turn].synchronize()
        terms, chunks_B = (queries_per_kv, window or 0, chunk or 0), -(-lengths_B // CHUNK)
        kept = self._grown
        if kept is not None and _same(kept, chunks_B, group_B, shared_B, terms):
            self._grow(before, kept.last_B, lengths_B)
            return
        lowest_B = np.zeros(len(lengths_B), np.int64)
        if window is not None:
            lowest_B = np.maximum(lowest_B, lengths_B - window)
        if chunk is not None:
            lowest_B = np.maximum(lowest_B, (lengths_B - 1) // chunk * chunk)
        trunks = _trunks(lengths_B, lowest_B, group_B, shared_B, self.trunk_queries // queries_per_kv)
        last_B = self._cut(trunks, lowest_B // CHUNK * CHUNK, lengths_B)
        self._grown = _Grown(chunks_B, group_B.copy(), shared_B.copy(), terms, last_B)

    def _cut(self, trunks: _Trunks, begin_B: Ints, lengths_B: Ints) -> Ints:
        """Write the items of trunks and of leaves; says which item is each row's last, -1 for none."""
        rows = len(lengths_B)
        members = trunks.first_N.repeat(trunks.rows_N) + _counted(trunks.rows_N)
        above_B, leaf_B = np.zeros(rows, np.int64), begin_B.copy()
        pieces_N = -(-trunks.end_N // CHUNK) - trunks.begin_N // CHUNK
        above_B[members] = pieces_N.repeat(trunks.rows_N)
        leaf_B[members] = np.maximum(leaf_B[members], trunks.end_N.repeat(trunks.rows_N))
        above_B -= leaf_B % CHUNK != 0
        pieces_B = np.where(lengths_B > 0, -(-lengths_B // CHUNK) - leaf_B // CHUNK, 0)
        # A trunk that ends within its rows' first chunk is an item, and no place of its own.
        items = int(pieces_N.sum() + pieces_B.sum())
        if max(items, int((above_B + pieces_B).sum())) > self.max_items:
            if len(members):
                return self._cut(_Trunks(_NONE, _NONE, _NONE, _NONE), begin_B, lengths_B)
            return self._lay(trunks, pieces_N, above_B, leaf_B, lengths_B, _merged(pieces_B, self.max_items))
        return self._lay(trunks, pieces_N, above_B, leaf_B, lengths_B, np.minimum(pieces_B, 1))

    def _lay(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, trunks: _Trunks, pieces_N: Ints, above_B: Ints, leaf_B: Ints, lengths_B: Ints, head_B: Ints
    ) -> Ints:
        """``head_B`` chunks of each leaf are its first item."""
        lists, rows = self._lists[self._turn], len(lengths_B)
        middle = int(pieces_N.sum())
        at_I, trunk_I = _counted(pieces_N), np.arange(len(pieces_N)).repeat(pieces_N)
        first_I = trunks.begin_N[trunk_I] + at_I * CHUNK
        ends = np.minimum(first_I + CHUNK, trunks.end_N[trunk_I])
        columns = (trunks.first_N[trunk_I], trunks.rows_N[trunk_I], at_I, first_I, ends)
        for field, column in enumerate(columns if middle else ()):
            lists.items_I[:middle, field] = column
        chunks_B = np.where(lengths_B > 0, -(-lengths_B // CHUNK) - leaf_B // CHUNK, 0)
        pieces_B = chunks_B - np.maximum(head_B - 1, 0)
        at_I, row_I = _counted(pieces_B), np.arange(rows).repeat(pieces_B)
        skipped_I = np.where(at_I > 0, at_I + head_B[row_I] - 1, 0)
        chunk_I = leaf_B[row_I] // CHUNK + skipped_I
        begin_I = np.maximum(chunk_I * CHUNK, leaf_B[row_I])
        end_I = np.minimum((chunk_I + np.where(at_I > 0, 1, head_B[row_I])) * CHUNK, lengths_B[row_I])
        # The longest first: then programs that take turns all read alike.
        order = (begin_I - end_I).argsort(kind="stable")
        end = middle + len(order)
        lists.items_I[middle:end, 1] = 1
        for field, column in ((0, row_I), (2, above_B[row_I] + at_I), (3, begin_I), (4, end_I)):
            lists.items_I[middle:end, field] = column[order]
        place_I = np.empty_like(order)
        place_I[order] = middle + np.arange(len(order))
        last_B = np.full(rows, -1)
        live = pieces_B > 0
        last_B[live] = place_I[pieces_B.cumsum()[live] - 1]
        lists.counts[:] = middle, end - middle
        lists.length_B[:rows], lists.length_B[rows:] = lengths_B, 0
        (above_B + pieces_B).cumsum(out=lists.base_B[1 : rows + 1])
        lists.base_B[rows + 1 :] = lists.base_B[rows]
        self.has_trunks, self._used = middle > 0, self._places[2] + end * lists.items_I.shape[1]
        return last_B


def _same(kept: _Grown, chunks_B: Ints, group_B: Ints, shared_B: Ints, terms: tuple[int, ...]) -> bool:
    """Whether these are rows of as many chunks, that share as much."""
    return (
        terms == kept.terms
        and np.array_equal(chunks_B, kept.chunks_B)
        and np.array_equal(group_B, kept.group_B)
        and np.array_equal(shared_B, kept.shared_B)
    )


def _trunks(lengths_B: Ints, lowest_B: Ints, group_B: Ints, shared_B: Ints, most: int) -> _Trunks:
    """What neighbours have in common, in whole blocks, for up to ``most`` of them at a time."""
    rows = len(lengths_B)
    if rows < 2 or most < 2 or not shared_B.any():
        return _Trunks(_NONE, _NONE, _NONE, _NONE)
    fresh = np.ones(rows, bool)
    fresh[1:] = (group_B[1:] != group_B[:-1]) | (lengths_B[1:] == 0) | (lengths_B[:-1] == 0)
    first_N = np.flatnonzero(fresh)
    # The last token of every row stays in its leaf.
    common_B = np.minimum(np.where(fresh, lengths_B, shared_B), lengths_B - 1)
    end_N = np.maximum(np.minimum.reduceat(common_B, first_N), 0) // BLOCK * BLOCK
    begin_N = np.minimum.reduceat(lowest_B, first_N) // CHUNK * CHUNK
    rows_N = np.append(first_N[1:], rows) - first_N
    kept = (rows_N > 1) & (end_N > begin_N)
    first_N, rows_N, begin_N, end_N = first_N[kept], rows_N[kept], begin_N[kept], end_N[kept]
    parts_N = -(-rows_N // most)
    part_N = (-(-rows_N // parts_N)).repeat(parts_N)
    offset_N = _counted(parts_N) * part_N
    rows_N = np.minimum(part_N, rows_N.repeat(parts_N) - offset_N)
    return _Trunks(first_N.repeat(parts_N) + offset_N, rows_N, begin_N.repeat(parts_N), end_N.repeat(parts_N))


def _merged(pieces_B: Ints, room: int) -> Ints:
    """How many of each row's chunks are one item, so that all items find room: the fewest, the same for all rows."""
    low, high = 1, int(pieces_B.max())
    while low < high:
        middle = (low + high) // 2
        fits = int((pieces_B - np.maximum(np.minimum(pieces_B, middle) - 1, 0)).sum()) <= room
        low, high = (low, middle) if fits else (middle + 1, high)
    return np.minimum(pieces_B, low)


def _counted(counts_N: Ints) -> Ints:
    """0, 1, ... up to each count in turn."""
    ends_N = counts_N.cumsum()
    return np.arange(int(ends_N[-1]) if len(ends_N) else 0) - (ends_N - counts_N).repeat(counts_N)
