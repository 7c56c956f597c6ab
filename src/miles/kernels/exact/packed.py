"""Attention of a trainer in exact arithmetic: packed sequences, and trees of stretches.

Shapes: T tokens, M keys where they are more, H query heads, G key-value heads, d channels of a key, e of a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miles.kernels.exact.attention import Asked, span_attention
from miles.kernels.exact.attention_spans import Spans, packed_spans
from miles.kernels.segments import Segment
from miles.kernels.segments_rows import Copies, take
from miles.kernels.terms import Index, Terms
from miles.kernels.varlen import PackedCarry


def packed_attention(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGe: Tensor,
    lengths: Sequence[int],
    terms: Terms,
    *,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention within each of the sequences of ``lengths``, which lie one after the other; [T, H, e]."""
    return ExactPackedAttend(lengths, q_THd.device)(0, q_THd, k_TGd, v_TGe, terms, sinks_H=sinks_H)


class _Asking:
    """What both kinds share: spans of queries, and where their keys are taken from."""

    latent = False

    def __init__(self, spans: Spans, copies: Copies | None) -> None:
        self._asked = Asked(spans)
        self._copies = copies

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_MGd: Tensor,
        v_MGe: Tensor,
        terms: Terms,
        *,
        sinks_H: Tensor | None = None,
        index: Index | int | None = None,
    ) -> Tensor:
        assert index is None, "who may be seen is not chosen in exact arithmetic"
        total = self._asked.spans.queries
        assert len(q_THd) == total, f"{len(q_THd)} queries for spans of {total} in all"
        if not total:
            return q_THd[..., :1].expand(-1, -1, v_MGe.shape[-1])
        if self._copies is not None:
            k_MGd, v_MGe = take(k_MGd, self._copies), take(v_MGe, self._copies)
        return span_attention(q_THd, k_MGd, v_MGe, self._asked, terms, sinks_H)

    def carry(self, layer: int) -> PackedCarry:
        """What a recurrent layer left behind cannot be told here."""
        raise AssertionError(f"layer {layer} remembers by a state, for which there is no exact arithmetic")


class ExactPackedAttend(_Asking):
    """An ``Attend`` over a packed batch of ``lengths``; made once per forward, used by every layer."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        super().__init__(packed_spans([int(n) for n in lengths]), None)


class ExactSegmentAttend(_Asking):
    """An ``Attend`` over ``segments``, whose queries lie one after the other; made once per forward, for every layer.

    Keys and values may be more tokens than the queries: ``keys`` of them, where they are not as many.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device | str, *, keys: int | None = None) -> None:
        asking = [s for s in segments if s.length]
        assert all(s.length <= s.keys for s in asking), "a query sees itself"
        count_N, keys_N = (np.array(each, np.int64) for each in ([s.length for s in asking], [s.keys for s in asking]))
        runs = [np.arange(first, first + n) for s in asking for first, n in s.runs]
        row_K = np.concatenate(runs) if runs else np.empty(0, np.int64)
        rows = int(count_N.sum()) if keys is None else keys
        spans = Spans(count_N.cumsum() - count_N, count_N, keys_N.cumsum() - keys_N, keys_N)
        super().__init__(spans, Copies(row_K, rows, device))
