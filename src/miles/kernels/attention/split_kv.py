"""Split-KV plans for decode attention with shared-prefix (cascade) items, balanced over the SMs of a GPU.

Shapes: B rows (sequences with one new token each), I items, N token ranges to be split, K split lengths tried.

The context of a row is a range of tokens. Where adjacent rows of one group begin with the same tokens, these are one
range, a *prefix*, read once for all of them; the rest of each row is its *suffix*. Every range is split into pieces of
similar length; a piece of a prefix or a suffix is an *item*. A row gets one partial result from every piece of its
prefix and its suffix, at consecutive indices from ``base[row]`` on, the prefix's first.

All that a kernel needs is one int32 array at a fixed device address: a captured CUDA graph reads what was copied last.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.runtime.kv_cache import Ints

# A shorter prefix is no item of its own, and nothing shorter is split. Pieces are multiples of ``_GRAIN`` tokens.
STEP = 64
_GRAIN = 16
# Fields of an item: first row, number of rows, index among the row's partial results, first token, end token.
FIELDS = 5

# Cost of an item beyond reading its tokens, in tokens, and resident programs per SM.
_ITEM_COST = 48
_RESIDENT = 2
# Split lengths that are tried, the last of them longer than any context.
_SPLIT_LENGTHS_K = STEP * np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1 << 24], np.float64)
_INVERSE_LENGTHS_K1 = (1.0 / _SPLIT_LENGTHS_K)[:, None]
_HEADER = 16
# Steps that may be in flight on the device while the next one is planned.
_NUM_BUFFERS = 3
_EMPTY: Ints = np.zeros(0, np.int64)
_IntOrInts = TypeVar("_IntOrInts", int, Ints)


class PlanArrays(NamedTuple):
    """The plan: number of prefix and suffix items, each row's length and first partial result, the items."""

    counts: NDArray[np.int32]
    length_B: NDArray[np.int32]
    base_B: NDArray[np.int32]
    items_I: NDArray[np.int32]


class SplitKVScratch(NamedTuple):
    """Partial results, one per piece, and the base-2 logarithms of their sums of exponentials."""

    out_IHe: Tensor
    sum_IH: Tensor


class _TokenRanges(NamedTuple):
    """Tokens [begin, end) of rows [first, first + rows), and the partial results these rows have before them."""

    first_N: Ints
    rows_N: Ints
    above_N: Ints
    begin_N: Ints
    end_N: Ints


class _Splits(NamedTuple):
    """How each of some ranges is split: pieces, and tokens of a piece (the last may be shorter)."""

    pieces_N: Ints
    length_N: Ints


class _ReusablePlan(NamedTuple):
    """A step whose items can be reused while its rows grow, and the item with each row's last token."""

    lengths_B: Ints
    group_B: Ints
    shared_B: Ints
    plan_key: tuple[int, ...]
    last_B: Ints


class SplitKVPlan:
    """The split-KV items of a step, filled on the host and read on the device.

    ``max_items`` bounds the partial results of all rows (and so the items), at least two per row. A prefix item serves
    up to ``prefix_queries`` (16, 32 or 64) queries of a key-value head at once.
    """

    def __init__(self, max_rows: int, max_items: int, device: torch.device, *, prefix_queries: int = 64) -> None:
        assert max_items >= 2 * max_rows, "max_items must be at least two per row: a prefix and a suffix piece"
        assert prefix_queries in (16, 32, 64), "prefix_queries must be 16, 32 or 64"
        self.max_rows = max_rows
        self.max_items = max_items
        self.prefix_queries = prefix_queries
        self.device = device
        self.has_prefixes = False
        self.sms = 1
        base = _round_up(_HEADER + max_rows, 16)
        self._offsets = (_HEADER, base, _round_up(base + max_rows + 1, 16))
        size = self._used = self._offsets[2] + max_items * FIELDS
        pinned = device.type == "cuda"
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(_NUM_BUFFERS)]
        self._host_arrays = [PlanArrays(*(view.numpy() for view in self._views(buffer))) for buffer in self._buffers]
        self._copy_events = [torch.cuda.Event() for _ in range(_NUM_BUFFERS)] if pinned else None
        self._current = 0
        self._reusable: _ReusablePlan | None = None
        self._device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self.counts, self.length_B, self.base_B, self.items_I = self._views(self._device_buffer)
        self._scratch: dict[tuple[int, int], SplitKVScratch] = {}

    def _views(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        lengths, base, items = self._offsets
        return (
            buffer[:2],
            buffer[lengths : lengths + self.max_rows],
            buffer[base : base + self.max_rows + 1],
            buffer[items:].view(-1, FIELDS),
        )

    def host_arrays(self) -> PlanArrays:
        """The arrays filled last, on the host; prefix items come first."""
        arrays = self._host_arrays[self._current]
        return arrays._replace(items_I=arrays.items_I[: arrays.counts.sum()])

    def get_scratch(self, heads: int, width: int) -> SplitKVScratch:
        """Scratch for the partial results of layers of one shape, allocated on first use."""
        if (heads, width) not in self._scratch:
            shape = (self.max_items, heads)
            self._scratch[heads, width] = SplitKVScratch(
                torch.zeros((*shape, width), device=self.device), torch.zeros(shape, device=self.device)
            )
        return self._scratch[heads, width]

    def copy_to_device(self) -> None:
        """Copy the plan to the device without waiting for it."""
        self._device_buffer[: self._used].copy_(self._buffers[self._current][: self._used], non_blocking=True)
        if self._copy_events is not None:
            self._copy_events[self._current].record()

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
        """Split a step into items.

        ``lengths_B`` are the tokens of each row including the new one; 0 is an unused row, as are rows beyond the last.
        Adjacent rows of one ``group_B`` share their first ``shared_B`` tokens (the first row's value is ignored). With
        a ``window`` or a ``chunk`` there are items only for visible tokens, rounded to a few more.
        """
        previous = self._next_buffer(len(lengths_B), sms)
        plan_key = (kv_heads, queries_per_kv, sms, window or 0, chunk or 0)
        if self._reusable is not None and _only_grew(self._reusable, lengths_B, group_B, shared_B, plan_key):
            self._extend_items(previous, self._reusable.last_B, lengths_B)
            return
        lowest_B = find_first_visible(lengths_B, window, chunk)
        prefixes, begin_B = _find_prefixes(
            lengths_B, lowest_B, group_B, shared_B, self.prefix_queries // queries_per_kv
        )
        last_B = self._write_plan(prefixes, begin_B, lengths_B, kv_heads, sms * _RESIDENT)
        self._reusable = _ReusablePlan(lengths_B.copy(), group_B.copy(), shared_B.copy(), plan_key, last_B)

    def _next_buffer(self, rows: int, sms: int) -> PlanArrays:
        """Move on to the next host buffer once its last copy is done; returns the arrays filled before."""
        assert rows <= self.max_rows, "more rows than max_rows"
        self.sms = sms
        previous, self._current = self._host_arrays[self._current], (self._current + 1) % _NUM_BUFFERS
        if self._copy_events is not None:
            self._copy_events[self._current].synchronize()
        return previous

    def _extend_items(self, previous: PlanArrays, last_B: Ints, lengths_B: Ints) -> None:
        """Reuse the items of the previous step, with the last item of each row extended to the new length."""
        arrays = self._host_arrays[self._current]
        arrays.counts[:], arrays.base_B[:] = previous.counts, previous.base_B
        arrays.length_B[:] = previous.length_B
        arrays.length_B[: len(lengths_B)] = lengths_B
        end = int(previous.counts.sum())
        arrays.items_I[:end] = previous.items_I[:end]
        has_items = last_B >= 0
        arrays.items_I[last_B[has_items], 4] = lengths_B[has_items]

    def _write_plan(self, prefixes: _TokenRanges, begin_B: Ints, lengths_B: Ints, heads: int, slots: int) -> Ints:
        """Write the prefix and suffix items, suffixes starting at ``begin_B``; returns each row's last item."""
        arrays, rows = self._host_arrays[self._current], len(lengths_B)
        above_B = np.zeros(rows, np.int64)
        num_prefix_items = 0
        max_partials = self.max_items
        if len(prefixes.first_N):
            cut = _split_ranges(prefixes, heads, slots, self.max_items // 2)
            above_B[_list_rows(prefixes.first_N, prefixes.rows_N)] = cut.pieces_N.repeat(prefixes.rows_N)
            num_prefix_items, max_partials = int(cut.pieces_N.sum()), max_partials - int(above_B.sum())
            _write_items(arrays.items_I[:num_prefix_items], cut, prefixes)
        suffixes = _TokenRanges(np.arange(rows), np.ones(rows, np.int64), above_B, begin_B, lengths_B)
        cut = _split_ranges(suffixes, heads, slots, max_partials)
        end = num_prefix_items + int(cut.pieces_N.sum())
        last_B = _write_items(arrays.items_I[num_prefix_items:end], cut, suffixes)
        last_B[last_B >= 0] += num_prefix_items
        arrays.counts[:] = num_prefix_items, end - num_prefix_items
        arrays.length_B[:rows], arrays.length_B[rows:] = lengths_B, 0
        (above_B + cut.pieces_N).cumsum(out=arrays.base_B[1 : rows + 1])
        arrays.base_B[rows + 1 :] = arrays.base_B[rows]
        self.has_prefixes, self._used = num_prefix_items > 0, self._offsets[2] + end * FIELDS
        return last_B


def _only_grew(
    reusable: _ReusablePlan, lengths_B: Ints, group_B: Ints, shared_B: Ints, plan_key: tuple[int, ...]
) -> bool:
    """Whether these are the same rows with a few more tokens each, so that no piece is much too long."""
    if len(lengths_B) != len(reusable.lengths_B) or plan_key != reusable.plan_key:
        return False
    more_B = lengths_B - reusable.lengths_B
    return (
        bool(((more_B >= 0) & (more_B < STEP) & ((lengths_B == 0) == (reusable.lengths_B == 0))).all())
        and np.array_equal(group_B, reusable.group_B)
        and np.array_equal(shared_B, reusable.shared_B)
    )


def find_first_visible(lengths_B: Ints, window: int | None, chunk: int | None) -> Ints:
    """The first token that each row attends to."""
    lowest_B = np.zeros(len(lengths_B), np.int64)
    if window is not None:
        lowest_B = np.maximum(lowest_B, lengths_B - window)
    if chunk is not None:
        lowest_B = np.maximum(lowest_B, (lengths_B - 1) // chunk * chunk)
    return lowest_B


def group_rows(lengths_B: Ints, group_B: Ints, shared_B: Ints) -> tuple[Ints, Ints, Ints]:
    """Adjacent rows of one group: the first row, the number of rows, and how many tokens they all begin with."""
    starts_group = np.ones(len(lengths_B), bool)
    starts_group[1:] = (group_B[1:] != group_B[:-1]) | (lengths_B[1:] == 0) | (lengths_B[:-1] == 0)
    first_N = np.flatnonzero(starts_group)
    # The last token of every row stays in its suffix.
    common_B = np.minimum(np.where(starts_group, lengths_B, shared_B), lengths_B - 1)
    return first_N, np.append(first_N[1:], len(lengths_B)) - first_N, np.minimum.reduceat(common_B, first_N)


def divide_groups(first_N: Ints, rows_N: Ints, max_rows: int) -> tuple[Ints, Ints, Ints]:
    """Groups of at most ``max_rows`` rows: the first row, the number of rows, and how many each given one makes."""
    groups_N = -(-rows_N // max_rows)
    group_rows_N = (-(-rows_N // groups_N)).repeat(groups_N)
    offset_N = count_each(groups_N) * group_rows_N
    divided_N = np.minimum(group_rows_N, rows_N.repeat(groups_N) - offset_N)
    return first_N.repeat(groups_N) + offset_N, divided_N, groups_N


def _find_prefixes(
    lengths_B: Ints, lowest_B: Ints, group_B: Ints, shared_B: Ints, max_rows_per_item: int
) -> tuple[_TokenRanges, Ints]:
    """Prefixes that adjacent rows share, up to ``max_rows_per_item`` rows each; and each row's first suffix token."""
    if len(lengths_B) < 2 or max_rows_per_item < 2 or not shared_B.any():
        return _TokenRanges(_EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY), lowest_B
    first_N, rows_N, end_N = group_rows(lengths_B, group_B, shared_B)
    begin_N = np.minimum.reduceat(lowest_B, first_N)
    is_prefix = (rows_N > 1) & (end_N - begin_N >= STEP)
    first_N, rows_N, begin_N, end_N = first_N[is_prefix], rows_N[is_prefix], begin_N[is_prefix], end_N[is_prefix]
    begin_B, members = lowest_B.copy(), _list_rows(first_N, rows_N)
    begin_B[members] = np.maximum(begin_B[members], end_N.repeat(rows_N))
    if rows_N.max(initial=0) > max_rows_per_item:
        first_N, rows_N, groups_N = divide_groups(first_N, rows_N, max_rows_per_item)
        end_N, begin_N = end_N.repeat(groups_N), begin_N.repeat(groups_N)
    return _TokenRanges(first_N, rows_N, np.zeros_like(first_N), begin_N, end_N), begin_B


def _split_ranges(ranges: _TokenRanges, heads: int, slots: int, max_partials: int) -> _Splits:
    """Split ranges so that ``slots`` programs finish soonest, with at most ``max_partials`` partial results.

    If all items run at once, the longest decides. Otherwise all programs read the same amount, and the last item starts
    when the others are nearly done.
    """
    span_N = ranges.end_N - ranges.begin_N
    longest = int(span_N.max(initial=0))
    if longest <= STEP:
        return _Splits((span_N > 0).astype(np.int64), np.full_like(span_N, STEP))
    num_lengths = int(np.searchsorted(_SPLIT_LENGTHS_K, longest)) + 1
    pieces_KN = np.ceil((span_N - 0.5) * _INVERSE_LENGTHS_K1[:num_lengths])
    items_K, length_K = pieces_KN.sum(1) * heads, np.minimum(_SPLIT_LENGTHS_K[:num_lengths], longest)
    queued_K = (int(span_N.sum()) * heads + items_K * _ITEM_COST) / slots + length_K / 2
    cost_K = np.where(items_K <= slots, length_K + _ITEM_COST, queued_K)
    cost_K[pieces_KN @ ranges.rows_N.astype(np.float64) > max_partials] = np.inf
    pieces_N = np.maximum(pieces_KN[int(cost_K.argmin())].astype(np.int64), 1)
    length_N = np.maximum(_round_up(-(-span_N // pieces_N), _GRAIN), _GRAIN)
    return _Splits(-(-span_N // length_N), length_N)


def _write_items(items_I: NDArray[np.int32], cut: _Splits, ranges: _TokenRanges) -> Ints:
    """Write the items, longest pieces first, so that programs taking turns read the same amount.

    Returns the last item of each range, -1 if it has none.
    """
    order = (-cut.length_N).argsort(kind="stable")
    pieces_N = cut.pieces_N[order]
    last_N = np.empty_like(order)
    last_N[order] = np.where(pieces_N > 0, pieces_N.cumsum() - 1, -1)
    at_I, range_I = count_each(pieces_N), order.repeat(pieces_N)
    length_I = cut.length_N[range_I]
    begin_I = ranges.begin_N[range_I] + at_I * length_I
    items_I[:, 0] = ranges.first_N[range_I]
    items_I[:, 1] = ranges.rows_N[range_I]
    items_I[:, 2] = ranges.above_N[range_I] + at_I
    items_I[:, 3] = begin_I
    items_I[:, 4] = np.minimum(begin_I + length_I, ranges.end_N[range_I])
    return last_N


def _list_rows(first_N: Ints, rows_N: Ints) -> Ints:
    """All rows of these runs of adjacent rows."""
    return first_N.repeat(rows_N) + count_each(rows_N)


def count_each(counts_N: Ints) -> Ints:
    """0, 1, ... up to each count in turn."""
    ends_N = counts_N.cumsum()
    return np.arange(int(ends_N[-1]) if len(ends_N) else 0) - (ends_N - counts_N).repeat(counts_N)


def _round_up(value: _IntOrInts, step: int) -> _IntOrInts:
    return -(-value // step) * step
