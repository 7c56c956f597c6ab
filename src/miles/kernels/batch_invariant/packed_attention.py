"""Batch-invariant attention backends of a trainer: packed sequences, and trees of segments.

Shapes: T tokens, M keys where there are more, H query heads, G key-value heads, d channels of a key, e of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from miles.kernels.attention.compressed import CompressorInputs
from miles.kernels.attention.gather_rows import RowGather, gather_rows
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.kernels.attention.params import AttentionInputs, RelativeBias
from miles.kernels.attention.tree import Segment
from miles.kernels.attention.varlen import FreshRecurrentState
from miles.kernels.batch_invariant.attention import span_attention
from miles.kernels.batch_invariant.attention_metadata import (
    AttentionSpans,
    Selection,
    SpanBatch,
    build_packed_spans,
)
from miles.kernels.batch_invariant.compressed_attention import CompressedLayers
from miles.kernels.batch_invariant.dsa_indexer import (
    SparseIndexer,
    list_units,
    read_units,
    replay_tokens,
    select_tokens,
)
from miles.kernels.batch_invariant.relative_attention import relative_span_attention
from miles.kernels.runtime.kv_cache import Ints
from miles.kernels.runtime.triton_compat import use_triton


class _SpanBackend:
    """Attention over spans of queries, and the gather of their keys, if any."""

    latent = False

    def __init__(
        self,
        spans: AttentionSpans,
        gather: RowGather | None,
        device: torch.device | str,
        selections: IndexerSelections | None = None,
    ) -> None:
        self._replay, self._device = selections, torch.device(device)
        self._batch = self._causal = SpanBatch(spans)
        if spans.ends_T is not None:
            self._causal = SpanBatch(replace(spans, ends_T=None))
        self._gather = gather
        self._selections: dict[int, Selection | None] = {}
        self._compressed = CompressedLayers(self._causal.spans)

    def drop_selection(self, layer: int) -> None:
        """Free what the indexer of a layer selected, once its backward is done."""
        self._selections.pop(layer, None)

    def list_selection(self, layer: int, top: int, pool: int) -> Tensor:
        """Return the tokens or pools that the indexer of a layer selected, [T, top + pool - 1], and -1 behind them."""
        return list_units(self._selections[layer], self._causal.spans.queries, top + pool - 1, self._device)

    def set_selection(self, layer: int, listed_Tt: Tensor, top: int, pool: int) -> None:
        """Let a layer that another rank has run have selected what ``list_selection`` returned there."""
        longest = int(self._causal.spans.keys_N.max(initial=0))
        is_sparse = top < longest or use_triton(listed_Tt)
        self._selections[layer] = read_units(listed_Tt, -(-longest // pool), pool) if is_sparse else None

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        q_THd, k_MGd, v_MGe, params, sinks_H, index = inputs
        total = self._batch.spans.queries
        assert len(q_THd) == total, f"got {len(q_THd)} queries for spans of {total} in all"
        if not total:
            return q_THd[..., :1].expand(-1, -1, v_MGe.shape[-1])
        if self._gather is not None:
            k_MGd, v_MGe = gather_rows(k_MGd, self._gather), gather_rows(v_MGe, self._gather)
        batch = self._causal if params.ignores_spans else self._batch
        selection = None if index is None else self._select_tokens(layer, index)
        return span_attention(q_THd, k_MGd, v_MGe, batch, params, sinks_H, selection)

    def attend_relative(self, layer: int, inputs: AttentionInputs, bias: RelativeBias) -> Tensor:
        """Attend with a relative position bias."""
        total = self._batch.spans.queries
        assert len(inputs.q_THd) == total, f"got {len(inputs.q_THd)} queries for spans of {total} in all"
        k_MGd, v_MGe = inputs.k_TGd, inputs.v_TGe
        if self._gather is not None:
            k_MGd, v_MGe = gather_rows(k_MGd, self._gather), gather_rows(v_MGe, self._gather)
        if not total:
            return sum((x.sum() for x in (k_MGd, v_MGe, *bias)), start=inputs.q_THd)
        return relative_span_attention(inputs._replace(k_TGd=k_MGd, v_TGe=v_MGe), bias, self._causal.spans)

    def attend_compressed(self, layer: int, inputs: AttentionInputs, compressor: CompressorInputs) -> Tensor:
        """Attend to a window of tokens and to compressed keys."""
        total = self._batch.spans.queries
        assert len(inputs.q_THd) == total, f"got {len(inputs.q_THd)} queries for spans of {total} in all"
        k_M1d, states_Mx = inputs.k_TGd, compressor.states_Tx
        if self._gather is not None:
            k_M1d, states_Mx = gather_rows(k_M1d, self._gather), gather_rows(states_Mx, self._gather)
        return self._compressed.attend(inputs._replace(k_TGd=k_M1d), states_Mx, compressor)

    def _select_tokens(self, layer: int, index: SparseIndexer | int) -> Selection | None:
        """What an indexer selects of each query's positions; a layer that is recomputed selects the same."""
        if isinstance(index, int):
            return self._selections[index]
        keys_Mx = index.k_Td
        if self._gather is not None:
            keys_Mx = gather_rows(keys_Mx.unsqueeze(1), self._gather).squeeze(1)
        selection = select_tokens(index, keys_Mx, self._batch.spans)
        if self._replay is not None:
            selection = replay_tokens(self._replay, layer, selection, self._batch.spans, index)
        self._selections[layer] = selection
        return selection

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
        super().__init__(build_packed_spans(self._lengths, visible_ends_T), None, device, selections)

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
        super().__init__(spans, RowGather(row_K, rows, device), device, selections)
