"""Which keys the queries of a call see: runs of queries, each the end of a sequence whose keys are told in order.

Shapes: N spans, T queries, K keys of all spans one after the other, I tiles of queries, m queries of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from miles.kernels.cache import Ints
from miles.kernels.terms import Terms


@dataclass(frozen=True, slots=True)
class Spans:
    """Span n: ``count_N[n]`` queries from row ``first_N[n]`` on, the last of a sequence of ``keys_N[n]`` tokens.

    Its keys are ``row_K[start_N[n] :]``, rows of whatever holds keys and values; ``row_K`` None: each is its own row.
    """

    first_N: Ints
    count_N: Ints
    start_N: Ints
    keys_N: Ints
    row_K: Ints | None = None

    @property
    def queries(self) -> int:
        """How many in all."""
        return int(self.count_N.sum())


def packed_spans(lengths: Sequence[int]) -> Spans:
    """Sequences one after the other, of which all tokens ask and all are seen."""
    count_N = np.asarray([n for n in lengths if n], np.int64)
    first_N = count_N.cumsum() - count_N
    return Spans(first_N, count_N, first_N, count_N)


def paged_spans(starts_B: Ints, counts_B: Ints, pages_BM: Ints, page_size: int) -> Spans:
    """Sequence b has ``starts_B[b]`` tokens in its pages and brings ``counts_B[b]`` more."""
    keys_B = starts_B + counts_B
    start_B = keys_B.cumsum() - keys_B
    owner_K = np.arange(len(keys_B)).repeat(keys_B)
    place_K = np.arange(int(keys_B.sum())) - start_B[owner_K]
    row_K = pages_BM[owner_K, place_K // page_size] * page_size + place_K % page_size
    return Spans(counts_B.cumsum() - counts_B, counts_B, start_B, keys_B, row_K)


class Tiles(NamedTuple):
    """Tiles of ``m`` queries of one key-value head each, those that end alike as neighbours.

    ``token_Im`` and ``head_Im`` name the queries, ``real_Im`` those that are not filling; each sees the positions from
    ``low_Im`` to ``high_Im``. ``begin_I`` and ``end_I`` hold what any of a tile sees; its keys start at ``start_I``.
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

    def at(self, rows: Ints) -> Tiles:
        """Some of the tiles, in this order."""
        return Tiles(
            self.token_Im[rows],
            self.head_Im[rows],
            self.real_Im[rows],
            self.low_Im[rows],
            self.high_Im[rows],
            self.begin_I[rows],
            self.end_I[rows],
            self.start_I[rows],
            self.group_I[rows],
        )


def lowest(positions: Ints, terms: Terms) -> Ints:
    """The first position that each of these sees."""
    low = np.zeros_like(positions)
    if terms.window is not None:
        low = np.maximum(low, positions + 1 - terms.window)
    if terms.chunk is not None:
        low = np.maximum(low, positions // terms.chunk * terms.chunk)
    return low


def tiles_of(spans: Spans, groups: int, share: int, terms: Terms, size: int) -> Tiles:
    """Queries of one span and one key-value head (``share`` query heads each), ``size`` at a time, token by token."""
    parts_N = -(-spans.count_N * share // size)
    span_I = np.arange(len(parts_N)).repeat(parts_N)
    part_I = np.arange(len(span_I)) - (parts_N.cumsum() - parts_N)[span_I]
    span_I, part_I = span_I.repeat(groups), part_I.repeat(groups)
    group_I = np.tile(np.arange(groups), len(span_I) // groups)
    place_Im = part_I[:, None] * size + np.arange(size)
    last_I = spans.count_N[span_I] * share - 1
    real_Im = place_Im <= last_I[:, None]
    # Filling repeats the last query.
    place_Im = np.minimum(place_Im, last_I[:, None])
    offset_Im = place_Im // share
    high_Im = (spans.keys_N - spans.count_N)[span_I][:, None] + offset_Im
    low_Im = lowest(high_Im, terms)
    made = Tiles(
        token_Im=spans.first_N[span_I][:, None] + offset_Im,
        head_Im=group_I[:, None] * share + place_Im % share,
        real_Im=real_Im,
        low_Im=low_Im,
        high_Im=high_Im,
        begin_I=low_Im.min(1),
        end_I=high_Im.max(1) + 1,
        start_I=spans.start_N[span_I],
        group_I=group_I,
    )
    return made.at(np.lexsort((made.begin_I, made.end_I)))
