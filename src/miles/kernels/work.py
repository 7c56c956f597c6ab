"""How one step of single tokens is cut into pieces, so that a card's processors all have as much to read.

Shapes: B rows (sequences that bring one token each), I items, N stretches of tokens to be cut, K lengths tried.

A row's past is a stretch of tokens. Where neighbours of one group begin with the same tokens, these are one stretch, a
*trunk*, read once for all of them; what follows it in each row is a *leaf*. Every stretch is cut into pieces of like
length; a piece of a trunk or a leaf is an *item*. A row gets a partial result from every piece of its trunk and of its
leaf, in neighbouring places from ``base[row]`` on, the trunk's first.

All that a kernel needs is one array of int32 on the device, at places that never change: a captured graph reads what
was sent last.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.cache import Ints

# A shorter trunk is not worth an item of its own, and nothing shorter is cut. Pieces are multiples of a few tokens.
STEP = 64
_GRAIN = 16
# Fields of an item: first row, rows, which of a row's partial results, first token, behind the last token.
FIELDS = 5

# What an item costs beyond reading its tokens, in tokens, and how many programs a processor runs at once.
_ITEM_COST = 48
_RESIDENT = 2
# Lengths of pieces that are tried, the last of them longer than any context.
_LADDER_K = STEP * np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1 << 24], np.float64)
_PARTS_K1 = (1.0 / _LADDER_K)[:, None]
_HEADER = 16
# How many steps may be under way on the device while the next is filled in.
_RING = 3
_NONE: Ints = np.zeros(0, np.int64)
_Whole = TypeVar("_Whole", int, Ints)


class Lists(NamedTuple):
    """What was filled in: how many items of trunks and of leaves, each row's length and first place, the items."""

    counts: NDArray[np.int32]
    length_B: NDArray[np.int32]
    base_B: NDArray[np.int32]
    items_I: NDArray[np.int32]


class Scratch(NamedTuple):
    """Partial results, a place a piece, and the base-2 logarithms of their sums of exponentials."""

    out_IHe: Tensor
    sum_IH: Tensor


class _Stretches(NamedTuple):
    """Tokens [begin, end) of rows [first, first + rows), and the partial results these rows have before them."""

    first_N: Ints
    rows_N: Ints
    above_N: Ints
    begin_N: Ints
    end_N: Ints


class _Cut(NamedTuple):
    """How each of some stretches is cut: into so many pieces of so many tokens (the last may be shorter)."""

    pieces_N: Ints
    length_N: Ints


class _Kept(NamedTuple):
    """A step whose pieces serve while its rows grow, and the item that holds each row's last token."""

    lengths_B: Ints
    group_B: Ints
    shared_B: Ints
    terms: tuple[int, ...]
    last_B: Ints


class DecodeWork:
    """The items of a step, on the host to be filled in and on the device to be read.

    ``max_items`` bounds the partial results of all rows (and so the items), at least two a row. An item of a trunk
    serves up to ``trunk_queries`` (16, 32 or 64) queries of a key-value head at once.
    """

    def __init__(self, max_rows: int, max_items: int, device: torch.device, *, trunk_queries: int = 64) -> None:
        assert max_items >= 2 * max_rows, "a row may need a piece of a trunk and one of a leaf"
        assert trunk_queries in (16, 32, 64), "tiles have as many queries"
        self.max_rows, self.max_items, self.trunk_queries = max_rows, max_items, trunk_queries
        self.device = device
        self.has_trunks = False
        self.sms = 1
        base = _up(_HEADER + max_rows, 16)
        self._places = (_HEADER, base, _up(base + max_rows + 1, 16))
        size = self._used = self._places[2] + max_items * FIELDS
        pinned = device.type == "cuda"
        self._ring = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(_RING)]
        self._lists = [Lists(*(view.numpy() for view in self._views(whole))) for whole in self._ring]
        self._sent = [torch.cuda.Event() for _ in range(_RING)] if pinned else None
        self._turn = 0
        self._kept: _Kept | None = None
        self._held = torch.zeros(size, dtype=torch.int32, device=device)
        self.counts, self.length_B, self.base_B, self.items_I = self._views(self._held)
        self._scratch: dict[tuple[int, int], Scratch] = {}

    def _views(self, whole: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        lengths, base, items = self._places
        return (
            whole[:2],
            whole[lengths : lengths + self.max_rows],
            whole[base : base + self.max_rows + 1],
            whole[items:].view(-1, FIELDS),
        )

    def lists(self) -> Lists:
        """What was filled in last, on the host; items of trunks come first."""
        lists = self._lists[self._turn]
        return lists._replace(items_I=lists.items_I[: lists.counts.sum()])

    def scratch(self, heads: int, width: int) -> Scratch:
        """Room for the partial results of layers of one shape; made when the first of them asks."""
        if (heads, width) not in self._scratch:
            shape = (self.max_items, heads)
            self._scratch[heads, width] = Scratch(
                torch.zeros((*shape, width), device=self.device), torch.zeros(shape, device=self.device)
            )
        return self._scratch[heads, width]

    def send(self) -> None:
        """Copy what was filled in to the device; the host does not wait for it."""
        self._held[: self._used].copy_(self._ring[self._turn][: self._used], non_blocking=True)
        if self._sent is not None:
            self._sent[self._turn].record()

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
        """Cut a step into items.

        ``lengths_B`` are tokens of each row, its new one among them; 0 is a row nobody asks for, and rows beyond the
        last are such. Neighbours of one ``group_B`` have their first ``shared_B`` tokens in common (what the first of
        them says does not count). With a ``window`` or a ``chunk`` there are items only for what is seen, and a little
        more.
        """
        assert len(lengths_B) <= self.max_rows, "more rows than the work was made for"
        self.sms = sms
        before, self._turn = self._lists[self._turn], (self._turn + 1) % _RING
        if self._sent is not None:
            self._sent[self._turn].synchronize()
        terms = (kv_heads, queries_per_kv, sms, window or 0, chunk or 0)
        if self._kept is not None and _only_grew(self._kept, lengths_B, group_B, shared_B, terms):
            self._grow(before, self._kept.last_B, lengths_B)
            return
        lowest_B = _lowest(lengths_B, window, chunk)
        trunks, begin_B = _trunks(lengths_B, lowest_B, group_B, shared_B, self.trunk_queries // queries_per_kv)
        last_B = self._lay(trunks, begin_B, lengths_B, kv_heads, sms * _RESIDENT)
        self._kept = _Kept(lengths_B.copy(), group_B.copy(), shared_B.copy(), terms, last_B)

    def _grow(self, before: Lists, last_B: Ints, lengths_B: Ints) -> None:
        """The items of the step before, the last of each row as long as the row is now."""
        lists = self._lists[self._turn]
        lists.counts[:], lists.base_B[:] = before.counts, before.base_B
        lists.length_B[:] = before.length_B
        lists.length_B[: len(lengths_B)] = lengths_B
        end = int(before.counts.sum())
        lists.items_I[:end] = before.items_I[:end]
        live = last_B >= 0
        lists.items_I[last_B[live], 4] = lengths_B[live]

    def _lay(self, trunks: _Stretches, begin_B: Ints, lengths_B: Ints, heads: int, slots: int) -> Ints:
        """Write the items of trunks and of leaves that begin at ``begin_B``; says which item is each row's last."""
        lists, rows = self._lists[self._turn], len(lengths_B)
        above_B, middle, room = np.zeros(rows, np.int64), 0, self.max_items
        if len(trunks.first_N):
            cut = _cut(trunks, heads, slots, self.max_items // 2)
            above_B[_members(trunks.first_N, trunks.rows_N)] = cut.pieces_N.repeat(trunks.rows_N)
            middle, room = int(cut.pieces_N.sum()), room - int(above_B.sum())
            _write(lists.items_I[:middle], cut, trunks)
        leaves = _Stretches(np.arange(rows), np.ones(rows, np.int64), above_B, begin_B, lengths_B)
        cut = _cut(leaves, heads, slots, room)
        end = middle + int(cut.pieces_N.sum())
        last_B = _write(lists.items_I[middle:end], cut, leaves)
        last_B[last_B >= 0] += middle
        lists.counts[:] = middle, end - middle
        lists.length_B[:rows], lists.length_B[rows:] = lengths_B, 0
        (above_B + cut.pieces_N).cumsum(out=lists.base_B[1 : rows + 1])
        lists.base_B[rows + 1 :] = lists.base_B[rows]
        self.has_trunks, self._used = middle > 0, self._places[2] + end * FIELDS
        return last_B


def _only_grew(kept: _Kept, lengths_B: Ints, group_B: Ints, shared_B: Ints, terms: tuple[int, ...]) -> bool:
    """Whether these are the same rows, each with a few tokens more: then no piece is much too long."""
    if len(lengths_B) != len(kept.lengths_B) or terms != kept.terms:
        return False
    more_B = lengths_B - kept.lengths_B
    return (
        bool(((more_B >= 0) & (more_B < STEP) & ((lengths_B == 0) == (kept.lengths_B == 0))).all())
        and np.array_equal(group_B, kept.group_B)
        and np.array_equal(shared_B, kept.shared_B)
    )


def _lowest(lengths_B: Ints, window: int | None, chunk: int | None) -> Ints:
    """The first token that each row sees."""
    lowest_B = np.zeros(len(lengths_B), np.int64)
    if window is not None:
        lowest_B = np.maximum(lowest_B, lengths_B - window)
    if chunk is not None:
        lowest_B = np.maximum(lowest_B, (lengths_B - 1) // chunk * chunk)
    return lowest_B


def _trunks(lengths_B: Ints, lowest_B: Ints, group_B: Ints, shared_B: Ints, most: int) -> tuple[_Stretches, Ints]:
    """What neighbours have in common, for up to ``most`` of them at a time; and where each row's leaf begins."""
    rows = len(lengths_B)
    if rows < 2 or most < 2 or not shared_B.any():
        return _Stretches(_NONE, _NONE, _NONE, _NONE, _NONE), lowest_B
    fresh = np.ones(rows, bool)
    fresh[1:] = (group_B[1:] != group_B[:-1]) | (lengths_B[1:] == 0) | (lengths_B[:-1] == 0)
    first_N = np.flatnonzero(fresh)
    # The last token of every row stays in its leaf.
    common_B = np.minimum(np.where(fresh, lengths_B, shared_B), lengths_B - 1)
    end_N, begin_N = np.minimum.reduceat(common_B, first_N), np.minimum.reduceat(lowest_B, first_N)
    rows_N = np.append(first_N[1:], rows) - first_N
    kept = (rows_N > 1) & (end_N - begin_N >= STEP)
    first_N, rows_N, begin_N, end_N = first_N[kept], rows_N[kept], begin_N[kept], end_N[kept]
    begin_B, members = lowest_B.copy(), _members(first_N, rows_N)
    begin_B[members] = np.maximum(begin_B[members], end_N.repeat(rows_N))
    if rows_N.max(initial=0) > most:
        parts_N = -(-rows_N // most)
        part_N = (-(-rows_N // parts_N)).repeat(parts_N)
        offset_N = _counted(parts_N) * part_N
        end_N, begin_N = end_N.repeat(parts_N), begin_N.repeat(parts_N)
        first_N, rows_N = first_N.repeat(parts_N) + offset_N, np.minimum(part_N, rows_N.repeat(parts_N) - offset_N)
    return _Stretches(first_N, rows_N, np.zeros_like(first_N), begin_N, end_N), begin_B


def _cut(stretches: _Stretches, heads: int, slots: int, room: int) -> _Cut:
    """Cut stretches so that ``slots`` programs end soonest, with no more than ``room`` partial results.

    If all items run at once, the longest decides. Otherwise all programs read alike, and the last item is begun when
    the others are nearly done.
    """
    span_N = stretches.end_N - stretches.begin_N
    longest = int(span_N.max(initial=0))
    if longest <= STEP:
        return _Cut((span_N > 0).astype(np.int64), np.full_like(span_N, STEP))
    steps = int(np.searchsorted(_LADDER_K, longest)) + 1
    pieces_KN = np.ceil((span_N - 0.5) * _PARTS_K1[:steps])
    items_K, length_K = pieces_KN.sum(1) * heads, np.minimum(_LADDER_K[:steps], longest)
    together_K = (int(span_N.sum()) * heads + items_K * _ITEM_COST) / slots + length_K / 2
    cost_K = np.where(items_K <= slots, length_K + _ITEM_COST, together_K)
    cost_K[pieces_KN @ stretches.rows_N.astype(np.float64) > room] = np.inf
    pieces_N = np.maximum(pieces_KN[int(cost_K.argmin())].astype(np.int64), 1)
    length_N = np.maximum(_up(-(-span_N // pieces_N), _GRAIN), _GRAIN)
    return _Cut(-(-span_N // length_N), length_N)


def _write(items_I: NDArray[np.int32], cut: _Cut, stretches: _Stretches) -> Ints:
    """Write the items, those with long pieces first: then programs that take turns all read alike.

    Says which item is the last of each stretch, -1 if it has none.
    """
    order = (-cut.length_N).argsort(kind="stable")
    pieces_N = cut.pieces_N[order]
    last_N = np.empty_like(order)
    last_N[order] = np.where(pieces_N > 0, pieces_N.cumsum() - 1, -1)
    at_I, stretch_I = _counted(pieces_N), order.repeat(pieces_N)
    length_I = cut.length_N[stretch_I]
    begin_I = stretches.begin_N[stretch_I] + at_I * length_I
    items_I[:, 0] = stretches.first_N[stretch_I]
    items_I[:, 1] = stretches.rows_N[stretch_I]
    items_I[:, 2] = stretches.above_N[stretch_I] + at_I
    items_I[:, 3] = begin_I
    items_I[:, 4] = np.minimum(begin_I + length_I, stretches.end_N[stretch_I])
    return last_N


def _members(first_N: Ints, rows_N: Ints) -> Ints:
    """All rows of runs of neighbours."""
    return first_N.repeat(rows_N) + _counted(rows_N)


def _counted(counts_N: Ints) -> Ints:
    """0, 1, ... up to each count in turn."""
    ends_N = counts_N.cumsum()
    return np.arange(int(ends_N[-1]) if len(ends_N) else 0) - (ends_N - counts_N).repeat(counts_N)


def _up(value: _Whole, step: int) -> _Whole:
    return -(-value // step) * step
