"""Spans of batch-invariant attention: which keys the queries of a call attend to.

Shapes: N spans, T queries, X groups of heads that select U units of keys, K keys of all spans concatenated, I tiles of
queries, m queries of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.attention.params import AttentionParams
from miles.kernels.runtime.kv_cache import Ints


@dataclass(frozen=True, slots=True)
class AttentionSpans:
    """Span n: ``count_N[n]`` queries from row ``first_N[n]`` on, the last of a sequence of ``keys_N[n]`` tokens.

    Its keys are rows ``row_K[start_N[n] :]`` of the keys and values; ``row_K`` None: key k is row k. Query t attends to
    positions before ``ends_T[t]``; None: up to its own.
    """

    first_N: Ints
    count_N: Ints
    start_N: Ints
    keys_N: Ints
    row_K: Ints | None = None
    ends_T: Ints | None = None

    @property
    def queries(self) -> int:
        """Total number of queries."""
        return int(self.count_N.sum())


class SpanBatch:
    """The spans of a training forward, and the tiles that the kernels cache of them from layer to layer."""

    def __init__(self, spans: AttentionSpans) -> None:
        assert spans.row_K is None, "training needs spans with keys of their own"
        self.spans = spans
        self.tiles: dict[Any, Tensor] = {}


def build_packed_spans(lengths: Sequence[int], ends_T: Ints | None = None) -> AttentionSpans:
    """Packed sequences, all of whose tokens are queries and keys."""
    count_N = np.asarray([n for n in lengths if n], np.int64)
    first_N = count_N.cumsum() - count_N
    return AttentionSpans(first_N, count_N, first_N, count_N, ends_T=ends_T)


def build_paged_spans(
    starts_B: Ints, counts_B: Ints, block_table_BM: Ints, page_size: int, ends_T: Ints | None = None
) -> AttentionSpans:
    """Sequence b has ``starts_B[b]`` cached tokens and ``counts_B[b]`` new ones."""
    keys_B = starts_B + counts_B
    start_B = keys_B.cumsum() - keys_B
    owner_K = np.arange(len(keys_B)).repeat(keys_B)
    offset_K = np.arange(int(keys_B.sum())) - start_B[owner_K]
    row_K = block_table_BM[owner_K, offset_K // page_size] * page_size + offset_K % page_size
    return AttentionSpans(counts_B.cumsum() - counts_B, counts_B, start_B, keys_B, row_K, ends_T)


class Selection(NamedTuple):
    """What queries attend to of their spans: units of ``size`` consecutive positions, [T, X, U].

    X is the number of key-value heads, or 1 if all select alike. A query still sees no later position.
    """

    units_TXU: Tensor
    size: int


class QueryTiles(NamedTuple):
    """Tiles of ``m`` queries of one key-value head each, those with equal ends next to each other.

    ``token_Im`` and ``head_Im`` are the queries, ``real_Im`` those that are not padding; each attends to positions
    ``low_Im`` to ``high_Im``. ``begin_I`` and ``end_I`` cover what any query of a tile sees; its keys start at
    ``start_I``.
    """

    token_Im: Ints
    head_Im: Ints
    real_Im: NDArray[np.bool_]
    low_Im: Ints
    high_Im: Ints
    begin_I: Ints
    end_I: Ints
    start_I: Ints
    group_I: Ints

    def select(self, rows: Ints) -> QueryTiles:
        """Some of the tiles, in this order."""
        return QueryTiles._make(column[rows] for column in self)


def first_visible(positions: Ints, params: AttentionParams) -> Ints:
    """The first position that each of these attends to."""
    low = np.zeros_like(positions)
    if params.window is not None:
        low = np.maximum(low, positions + 1 - params.window)
    if params.chunk is not None:
        low = np.maximum(low, positions // params.chunk * params.chunk)
    return low


def build_query_tiles(
    spans: AttentionSpans, groups: int, queries_per_kv: int, params: AttentionParams, size: int
) -> QueryTiles:
    """Queries of a span and key-value head (``queries_per_kv`` heads each), ``size`` at a time, token by token."""
    parts_N = -(-spans.count_N * queries_per_kv // size)
    span_I = np.arange(len(parts_N)).repeat(parts_N)
    part_I = np.arange(len(span_I)) - (parts_N.cumsum() - parts_N)[span_I]
    span_I, part_I = span_I.repeat(groups), part_I.repeat(groups)
    group_I = np.tile(np.arange(groups), len(span_I) // groups)
    index_Im = part_I[:, None] * size + np.arange(size)
    last_I = spans.count_N[span_I] * queries_per_kv - 1
    real_Im = index_Im <= last_I[:, None]
    # Padding repeats the last query.
    index_Im = np.minimum(index_Im, last_I[:, None])
    offset_Im = index_Im // queries_per_kv
    high_Im = (spans.keys_N - spans.count_N)[span_I][:, None] + offset_Im
    low_Im = first_visible(high_Im, params)
    token_Im = spans.first_N[span_I][:, None] + offset_Im
    if spans.ends_T is not None:
        high_Im = spans.ends_T[token_Im] - 1
    tiles = QueryTiles(
        token_Im=token_Im,
        head_Im=group_I[:, None] * queries_per_kv + index_Im % queries_per_kv,
        real_Im=real_Im,
        low_Im=low_Im,
        high_Im=high_Im,
        begin_I=low_Im.min(1),
        end_I=high_Im.max(1) + 1,
        start_I=spans.start_N[span_I],
        group_I=group_I,
    )
    return tiles.select(np.lexsort((tiles.begin_I, tiles.end_I)))
