"""Batch-invariant split-KV plans: decode rows are split at fixed chunk boundaries, independent of the batch.

Shapes: B rows (sequences with one new token each), I items, N prefixes.

As in ``attention.split_kv``: tokens that adjacent rows share are a *prefix*, the rest of each row is its *suffix*, and
every piece of either has a partial result. Here the pieces are the fixed chunks that batch-invariant attention is
defined by. A prefix ends with a whole block, not with a chunk: a suffix that begins within a chunk resumes from the
state the prefix left, and stores its own in the same place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles.kernels.attention.split_kv import SplitKVPlan, count_each, divide_groups, find_first_visible, group_rows
from miles.kernels.batch_invariant.attention_reference import BLOCK, CHUNK
from miles.kernels.runtime.kv_cache import Ints

_NONE: Ints = np.zeros(0, np.int64)


class ChunkPartials(NamedTuple):
    """Partial results, one per chunk: weighted values, and the maximal exponents with their sums of exponentials."""

    out_IHe: Tensor
    top_sum_IH2: Tensor


class _Prefixes(NamedTuple):
    """Tokens [begin, end) of rows [first, first + rows)."""

    first_N: Ints
    rows_N: Ints
    begin_N: Ints
    end_N: Ints


class _ReusableChunkPlan(NamedTuple):
    """A step whose items can be reused while no row begins another chunk, and the item with each row's last token."""

    chunks_B: Ints
    group_B: Ints
    shared_B: Ints
    plan_key: tuple[int, ...]
    last_B: Ints


class BatchInvariantSplitKVPlan(SplitKVPlan):
    """``SplitKVPlan`` whose items are chunks. If there is no room for one item per chunk, a row's first chunks are one
    item.

    The sum is the same: a row's chunks are merged from the first on.
    """

    def __init__(self, max_rows: int, max_items: int, device: torch.device, *, prefix_queries: int = 64) -> None:
        super().__init__(max_rows, max_items, device, prefix_queries=prefix_queries)
        self._reusable_chunks: _ReusableChunkPlan | None = None
        self._partials: dict[tuple[int, int], ChunkPartials] = {}

    def get_partials(self, heads: int, width: int) -> ChunkPartials:
        """Scratch for the partial results of layers of one shape, allocated on first use."""
        if (heads, width) not in self._partials:
            shape = (self.max_items, heads)
            self._partials[heads, width] = ChunkPartials(
                torch.zeros((*shape, width), device=self.device), torch.zeros((*shape, 2), device=self.device)
            )
        return self._partials[heads, width]

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
        """Split a step into items; arguments as of ``SplitKVPlan.fill``."""
        previous = self._next_buffer(len(lengths_B), sms)
        plan_key, chunks_B = (queries_per_kv, window or 0, chunk or 0), -(-lengths_B // CHUNK)
        reusable = self._reusable_chunks
        if reusable is not None and _is_same_step(reusable, chunks_B, group_B, shared_B, plan_key):
            self._extend_items(previous, reusable.last_B, lengths_B)
            return
        lowest_B = find_first_visible(lengths_B, window, chunk)
        prefixes = _find_prefixes(lengths_B, lowest_B, group_B, shared_B, self.prefix_queries // queries_per_kv)
        last_B = self._split_chunks(prefixes, lowest_B // CHUNK * CHUNK, lengths_B)
        self._reusable_chunks = _ReusableChunkPlan(chunks_B, group_B.copy(), shared_B.copy(), plan_key, last_B)

    def _split_chunks(self, prefixes: _Prefixes, begin_B: Ints, lengths_B: Ints) -> Ints:
        """Write the prefix and suffix items; returns each row's last item, -1 for none."""
        rows = len(lengths_B)
        members = prefixes.first_N.repeat(prefixes.rows_N) + count_each(prefixes.rows_N)
        above_B, suffix_B = np.zeros(rows, np.int64), begin_B.copy()
        pieces_N = -(-prefixes.end_N // CHUNK) - prefixes.begin_N // CHUNK
        above_B[members] = pieces_N.repeat(prefixes.rows_N)
        suffix_B[members] = np.maximum(suffix_B[members], prefixes.end_N.repeat(prefixes.rows_N))
        above_B -= suffix_B % CHUNK != 0
        pieces_B = np.where(lengths_B > 0, -(-lengths_B // CHUNK) - suffix_B // CHUNK, 0)
        # A prefix that ends within its rows' first chunk is an item without a partial result of its own.
        items = int(pieces_N.sum() + pieces_B.sum())
        if max(items, int((above_B + pieces_B).sum())) > self.max_items:
            if len(members):
                return self._split_chunks(_Prefixes(_NONE, _NONE, _NONE, _NONE), begin_B, lengths_B)
            return self._write_chunk_items(
                prefixes, pieces_N, above_B, suffix_B, lengths_B, _merge_first_chunks(pieces_B, self.max_items)
            )
        return self._write_chunk_items(prefixes, pieces_N, above_B, suffix_B, lengths_B, np.minimum(pieces_B, 1))

    def _write_chunk_items(
        self, prefixes: _Prefixes, pieces_N: Ints, above_B: Ints, suffix_B: Ints, lengths_B: Ints, head_B: Ints
    ) -> Ints:
        """Write the items; the first item of each suffix has ``head_B`` chunks."""
        arrays, rows = self._host_arrays[self._current], len(lengths_B)
        num_prefix_items = int(pieces_N.sum())
        at_I, prefix_I = count_each(pieces_N), np.arange(len(pieces_N)).repeat(pieces_N)
        first_I = prefixes.begin_N[prefix_I] + at_I * CHUNK
        ends = np.minimum(first_I + CHUNK, prefixes.end_N[prefix_I])
        columns = (prefixes.first_N[prefix_I], prefixes.rows_N[prefix_I], at_I, first_I, ends)
        for field, column in enumerate(columns if num_prefix_items else ()):
            arrays.items_I[:num_prefix_items, field] = column
        chunks_B = np.where(lengths_B > 0, -(-lengths_B // CHUNK) - suffix_B // CHUNK, 0)
        pieces_B = chunks_B - np.maximum(head_B - 1, 0)
        at_I, row_I = count_each(pieces_B), np.arange(rows).repeat(pieces_B)
        skipped_I = np.where(at_I > 0, at_I + head_B[row_I] - 1, 0)
        chunk_I = suffix_B[row_I] // CHUNK + skipped_I
        begin_I = np.maximum(chunk_I * CHUNK, suffix_B[row_I])
        end_I = np.minimum((chunk_I + np.where(at_I > 0, 1, head_B[row_I])) * CHUNK, lengths_B[row_I])
        # Longest first, so that programs taking turns read the same amount.
        order = (begin_I - end_I).argsort(kind="stable")
        end = num_prefix_items + len(order)
        arrays.items_I[num_prefix_items:end, 1] = 1
        for field, column in ((0, row_I), (2, above_B[row_I] + at_I), (3, begin_I), (4, end_I)):
            arrays.items_I[num_prefix_items:end, field] = column[order]
        place_I = np.empty_like(order)
        place_I[order] = num_prefix_items + np.arange(len(order))
        last_B = np.full(rows, -1)
        has_items = pieces_B > 0
        last_B[has_items] = place_I[pieces_B.cumsum()[has_items] - 1]
        arrays.counts[:] = num_prefix_items, end - num_prefix_items
        arrays.length_B[:rows], arrays.length_B[rows:] = lengths_B, 0
        (above_B + pieces_B).cumsum(out=arrays.base_B[1 : rows + 1])
        arrays.base_B[rows + 1 :] = arrays.base_B[rows]
        self.has_prefixes, self._used = num_prefix_items > 0, self._offsets[2] + end * arrays.items_I.shape[1]
        return last_B


def _is_same_step(
    reusable: _ReusableChunkPlan, chunks_B: Ints, group_B: Ints, shared_B: Ints, plan_key: tuple[int, ...]
) -> bool:
    """Whether these rows have the same numbers of chunks and share as much."""
    return (
        plan_key == reusable.plan_key
        and np.array_equal(chunks_B, reusable.chunks_B)
        and np.array_equal(group_B, reusable.group_B)
        and np.array_equal(shared_B, reusable.shared_B)
    )


def _find_prefixes(lengths_B: Ints, lowest_B: Ints, group_B: Ints, shared_B: Ints, max_rows_per_item: int) -> _Prefixes:
    """Prefixes that adjacent rows share, in whole blocks, for up to ``max_rows_per_item`` rows at a time."""
    if len(lengths_B) < 2 or max_rows_per_item < 2 or not shared_B.any():
        return _Prefixes(_NONE, _NONE, _NONE, _NONE)
    first_N, rows_N, common_N = group_rows(lengths_B, group_B, shared_B)
    end_N = np.maximum(common_N, 0) // BLOCK * BLOCK
    begin_N = np.minimum.reduceat(lowest_B, first_N) // CHUNK * CHUNK
    is_prefix = (rows_N > 1) & (end_N > begin_N)
    first_N, rows_N, begin_N, end_N = first_N[is_prefix], rows_N[is_prefix], begin_N[is_prefix], end_N[is_prefix]
    first_N, rows_N, groups_N = divide_groups(first_N, rows_N, max_rows_per_item)
    return _Prefixes(first_N, rows_N, begin_N.repeat(groups_N), end_N.repeat(groups_N))


def _merge_first_chunks(pieces_B: Ints, max_items: int) -> Ints:
    """Chunks of each row's first item so that all items fit: the fewest, the same for all rows."""
    low, high = 1, int(pieces_B.max())
    while low < high:
        num_prefix_items = (low + high) // 2
        fits = int((pieces_B - np.maximum(np.minimum(pieces_B, num_prefix_items) - 1, 0)).sum()) <= max_items
        low, high = (low, num_prefix_items) if fits else (num_prefix_items + 1, high)
    return np.minimum(pieces_B, low)
