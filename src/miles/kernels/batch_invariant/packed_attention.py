"""Batch-invariant attention backends of a trainer: packed sequences, and trees of segments.

Shapes: T tokens, M keys where there are more, H query heads, G key-value heads, d channels of a key, e of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from miles.kernels.attention.gather_rows import RowGather, gather_rows
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.kernels.attention.params import AttentionInputs, BlockIndexerInputs, IndexerInputs
from miles.kernels.attention.tree import Segment
from miles.kernels.attention.varlen import FreshRecurrentState
from miles.kernels.batch_invariant.attention import span_attention
from miles.kernels.batch_invariant.attention_metadata import AttentionSpans, SpanBatch, build_packed_spans
from miles.kernels.batch_invariant.dsa_indexer import replay_tokens, select_tokens
from miles.kernels.runtime.kv_cache import Ints


class _SpanBackend:
    """Attention over spans of queries, and the gather of their keys, if any."""

    latent = False

    def __init__(
        self, spans: AttentionSpans, gather: RowGather | None, selections: IndexerSelections | None = None
    ) -> None:
        self._replay = selections
        self._batch = self._causal = SpanBatch(spans)
        if spans.ends_T is not None:
            self._causal = SpanBatch(replace(spans, ends_T=None))
        self._gather = gather
        self._selections: dict[int, Tensor | None] = {}

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        q_THd, k_MGd, v_MGe, params, sinks_H, index = inputs
        total = self._batch.spans.queries
        assert len(q_THd) == total, f"got {len(q_THd)} queries for spans of {total} in all"
        if not total:
            return q_THd[..., :1].expand(-1, -1, v_MGe.shape[-1])
        if self._gather is not None:
            k_MGd, v_MGe = gather_rows(k_MGd, self._gather), gather_rows(v_MGe, self._gather)
        batch = self._causal if params.ignores_spans else self._batch
        assert not isinstance(index, BlockIndexerInputs), "block-sparse attention is not batch-invariant"
        selected_TP = None if index is None else self._select_tokens(layer, index)
        return span_attention(q_THd, k_MGd, v_MGe, batch, params, sinks_H, selected_TP)

    def _select_tokens(self, layer: int, index: IndexerInputs | int) -> Tensor | None:
        """What an indexer selects of each query's positions; a layer that is recomputed selects the same."""
        if isinstance(index, IndexerInputs):
            keys_Md = index.k_Td
            if self._gather is not None:
                keys_Md = gather_rows(keys_Md.unsqueeze(1), self._gather).squeeze(1)
            selected_TP = select_tokens(index, keys_Md, self._batch.spans)
            if self._replay is not None:
                selected_TP = replay_tokens(self._replay, layer, selected_TP, self._batch.spans, index)
            self._selections[layer] = selected_TP
            return self._selections[layer]
        return self._selections[index]

    def recurrent_state(self, layer: int) -> FreshRecurrentState:
        raise AssertionError(f"layer {layer} is recurrent, which tree attention does not support")


class BatchInvariantVarlenBackend(_SpanBackend):
    """Attention backend over a packed batch of ``lengths``; built once per forward, used by every layer.

    Tokens attend to positions before ``visible_ends_T`` of their sequence, by default up to their own. ``selections``
    replace what indexers select.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str,
        visible_ends_T: Ints | None = None,
        selections: IndexerSelections | None = None,
    ) -> None:
        self._lengths = [int(n) for n in lengths]
        super().__init__(build_packed_spans(self._lengths, visible_ends_T), None, selections)

    def recurrent_state(self, layer: int) -> FreshRecurrentState:
        """The state of a recurrent layer: every sequence starts here."""
        return FreshRecurrentState(self._lengths)


class BatchInvariantTreeBackend(_SpanBackend):
    """Attention backend over ``segments``, whose queries are concatenated; built once per forward, used by every layer.

    There may be more keys and values than queries: ``keys`` of them. Queries attend to positions before
    ``visible_ends_T`` of their sequence, by default up to their own. ``selections`` replace what indexers select.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device | str,
        *,
        keys: int | None = None,
        visible_ends_T: Ints | None = None,
        selections: IndexerSelections | None = None,
    ) -> None:
        segments = [s for s in segments if s.length]
        assert all(s.length <= s.keys for s in segments), "a segment needs at least as many keys as queries"
        count_N = np.array([s.length for s in segments], np.int64)
        keys_N = np.array([s.keys for s in segments], np.int64)
        runs = [np.arange(first, first + n) for s in segments for first, n in s.runs]
        row_K = np.concatenate(runs) if runs else np.empty(0, np.int64)
        rows = int(count_N.sum()) if keys is None else keys
        first_N, start_N = count_N.cumsum() - count_N, keys_N.cumsum() - keys_N
        spans = AttentionSpans(first_N, count_N, start_N, keys_N, ends_T=visible_ends_T)
        super().__init__(spans, RowGather(row_K, rows, device), selections)
