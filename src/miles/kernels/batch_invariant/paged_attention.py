"""Batch-invariant attention backends of an engine step, in torch and in Triton.

Shapes: T new tokens, B sequences of a step, M pages of the longest, H query heads, G key-value heads, d channels of a
key, e of a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from miles.kernels.attention.compressed import CompressorInputs, list_windows
from miles.kernels.attention.gpu_backend import DecodeShape, SplitKVPlans, TritonAttentionBackend
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.kernels.attention.params import AttentionInputs, AttentionParams, IndexerInputs, RelativeBias
from miles.kernels.batch_invariant.attention import span_attention
from miles.kernels.batch_invariant.attention_metadata import Selection, SpanBatch, build_paged_spans
from miles.kernels.batch_invariant.attention_paged import decode_attention, prefill_attention
from miles.kernels.batch_invariant.attention_reference import reference_attention
from miles.kernels.batch_invariant.attention_split_kv import BatchInvariantSplitKVPlan
from miles.kernels.batch_invariant.attention_tile_config import pack_heads
from miles.kernels.batch_invariant.compressed_attention import (
    WindowSpans,
    attend_compressed,
    build_window_spans,
    select_windows,
)
from miles.kernels.batch_invariant.dsa_indexer import SparseIndexer, record_tokens, select_tokens
from miles.kernels.batch_invariant.relative_attention import relative_span_attention
from miles.kernels.fused.qk_norm_rope import QKNormRopeParams
from miles.kernels.numerics import BATCH_INVARIANT, MAX_HEAD_DIM
from miles.kernels.runtime.kv_cache import Ints, LayerKVCache, PagedKVCache, PooledRecurrentState, StepStates
from miles.kernels.runtime.triton_compat import use_triton

# Partial results allocated beyond two per row: a chunk of 512 tokens each.
_SPARE_ITEMS = 2048
# Queries of a prefix tile: the states of more exceed the registers, which pays off only with many heads per row.
_PREFIX_QUERIES = 32
_MANY_HEADS = 8


class BatchInvariantPagedBackend:
    """Attention backend of one step in torch.

    Sequence b has ``starts_B[b]`` cached tokens and ``counts_B[b]`` new ones, in any order and number. New tokens
    attend to positions before ``visible_ends_T``, by default up to their own. MLA layers store expanded keys and
    values. ``states`` are the recurrent states of a model that has recurrent layers. ``recorder`` gets what indexers
    select.
    """

    latent = False

    def __init__(
        self,
        cache: PagedKVCache,
        starts_B: Ints,
        counts_B: Ints,
        block_table_BM: Ints,
        page_size: int,
        *,
        visible_ends_T: Ints | None = None,
        states: StepStates | None = None,
        recorder: IndexerSelections | None = None,
    ) -> None:
        self._cache = cache
        self._states = states
        self._recorder = recorder
        self._selections: dict[int, Selection | None] = {}
        self._windows: dict[int, tuple[WindowSpans, Tensor]] = {}
        self._spans = spans = build_paged_spans(starts_B, counts_B, block_table_BM, page_size, visible_ends_T)
        assert spans.row_K is not None
        index_T = np.arange(spans.queries) - spans.first_N.repeat(counts_B)
        self._rows_K = torch.from_numpy(spans.row_K)
        self._gathered = SpanBatch(replace(spans, row_K=None))
        self._gathered_causal = SpanBatch(replace(spans, row_K=None, ends_T=None))
        self._slots_T = torch.from_numpy(spans.row_K[(spans.start_N + starts_B).repeat(counts_B) + index_T])

    def recurrent_state(self, layer: int) -> PooledRecurrentState:
        """The state of a recurrent layer before this step, and where to store the new one."""
        assert self._states is not None, "the model has recurrent layers, but no recurrent states were given"
        return self._states.recurrent_state(layer)

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        q_THd, k_TGd, v_TGe, params, sinks_H, index = inputs
        cache, slots_T = self._cache.layers[layer], self._slots_T.to(q_THd.device)
        cache.keys.write(slots_T, k_TGd)
        values = cache.keys if cache.values is None else cache.values  # keys that are values too
        if cache.values is not None:
            cache.values.write(slots_T, v_TGe)
        spans, gathered = self._spans, self._gathered
        if params.ignores_spans:
            spans, gathered = replace(spans, ends_T=None), self._gathered_causal
        selection = None if index is None else self._select_tokens(layer, cache, index)
        is_reference = selection is not None or not use_triton(q_THd) or q_THd.shape[-1] > MAX_HEAD_DIM
        if cache.keys.scales is None and is_reference:
            keys_SGd, values_SGe = cache.keys.slots, values.slots
            return reference_attention(q_THd, keys_SGd, values_SGe, spans, params, sinks_H, selection)[0]
        row_K = self._rows_K.to(q_THd.device)
        keys_KGd = cache.keys.read_slots(row_K)
        values_KGe = values.read_slots(row_K)
        # On a GPU the trainer's attention: models that this backend serves there have no paged Triton kernels.
        return span_attention(q_THd, keys_KGd, values_KGe, gathered, params, sinks_H, selection)

    def attend_relative(self, layer: int, inputs: AttentionInputs, bias: RelativeBias) -> Tensor:
        """Attend with a relative position bias."""
        cache, slots_T = self._cache.layers[layer], self._slots_T.to(inputs.q_THd.device)
        assert cache.values is not None, "a layer with a position bias has keys and values"
        cache.keys.write(slots_T, inputs.k_TGd)
        cache.values.write(slots_T, inputs.v_TGe)
        if cache.keys.scales is None:
            kv, spans = (cache.keys.slots, cache.values.slots), replace(self._spans, ends_T=None)
        else:
            row_K = self._rows_K.to(inputs.q_THd.device)
            kv, spans = (cache.keys.read_slots(row_K), cache.values.read_slots(row_K)), self._gathered_causal.spans
        return relative_span_attention(inputs._replace(k_TGd=kv[0], v_TGe=kv[1]), bias, spans)

    def attend_compressed(self, layer: int, inputs: AttentionInputs, compressor: CompressorInputs) -> Tensor:
        """Attend to a window of tokens and to compressed keys."""
        cache, device = self._cache.layers[layer], inputs.q_THd.device
        assert cache.index is not None, "a layer with a compressor needs states of tokens in the KV cache"
        cache.keys.write(self._slots_T.to(device), inputs.k_TGd)
        cache.index.write(self._slots_T.to(device), compressor.states_Tx)
        states_Sx, width = cache.index.slots.flatten(1), inputs.k_TGd.shape[-1]
        self._complete_windows(states_Sx, compressor, width)
        windows, last_V = self._get_windows(compressor.rate)
        states_Vx = states_Sx.index_select(0, last_V.to(device))
        selection, index = None, compressor.indexer
        if index is not None:
            start = compressor.index_start
            keys_Vi = states_Vx[:, start : start + index.q_Thi.shape[-1]]
            selection = select_windows(index, keys_Vi, windows)
        spans, keys_S1d = replace(self._spans, ends_T=None), cache.keys.slots
        if cache.keys.scales is not None:
            spans, keys_S1d = self._gathered_causal.spans, cache.keys.read_slots(self._rows_K.to(device))
        compressed_V1d = states_Vx[:, None, compressor.key_start : compressor.key_start + width]
        return attend_compressed(inputs._replace(k_TGd=keys_S1d), compressed_V1d, spans, windows, selection)

    def _complete_windows(self, states_Sx: Tensor, compressor: CompressorInputs, width: int) -> None:
        """Write the keys of windows that new tokens complete into the states of their last tokens."""
        spans = self._spans
        starts_B = spans.keys_N - spans.count_N
        owner_M, numbers_M, positions_ML = list_windows(starts_B, spans.keys_N, compressor.rate, compressor.reach)
        if not len(owner_M):
            return
        slots_ML = self._rows_K[torch.from_numpy(positions_ML + spans.start_N[owner_M][:, None])].to(states_Sx.device)
        states_MLx = states_Sx.index_select(0, slots_ML.flatten()).unflatten(0, slots_ML.shape)
        keys = compressor.compress(states_MLx, torch.from_numpy(numbers_M).to(states_Sx.device))
        for start, keys_Mx in zip((compressor.key_start, compressor.index_start), keys, strict=True):
            if keys_Mx is not None:
                columns = states_Sx[:, start : start + keys_Mx.shape[-1]]
                columns.index_copy_(0, slots_ML[:, -1], keys_Mx.to(columns.dtype))

    def _get_windows(self, rate: int) -> tuple[WindowSpans, Tensor]:
        """The windows that queries see, and the slots of the last tokens of all windows."""
        if rate not in self._windows:
            spans = self._spans
            owner_V, _, positions_VL = list_windows(np.zeros_like(spans.keys_N), spans.keys_N, rate, rate)
            last_V = self._rows_K[torch.from_numpy(positions_VL[:, -1] + spans.start_N[owner_V])]
            self._windows[rate] = build_window_spans(spans, rate), last_V
        return self._windows[rate]

    def _select_tokens(self, layer: int, cache: LayerKVCache, index: SparseIndexer | int) -> Selection | None:
        """What an indexer selects of each query's positions, or what the layer with this number selected."""
        if isinstance(index, int):
            return self._selections[index]
        assert cache.index is not None, "a layer with an indexer needs index keys in the KV cache"
        cache.index.write(self._slots_T.to(index.k_Td.device), index.k_Td)
        selection = select_tokens(index, cache.index.slots.flatten(1), self._spans)
        if self._recorder is not None:
            record_tokens(self._recorder, layer, selection, self._spans, index)
        if isinstance(index, IndexerInputs):  # no other layer uses a selection of blocks
            self._selections[layer] = selection
        return selection


class BatchInvariantSplitKVPlans(SplitKVPlans):
    """``SplitKVPlans`` that split at the fixed chunks of batch-invariant attention."""

    def __init__(self, shapes: Mapping[DecodeShape, int], *, max_rows: int, device: torch.device, sms: int) -> None:
        super().__init__({}, max_rows=max_rows, device=device, sms=sms)
        max_items = 2 * max_rows + _SPARE_ITEMS
        self._plans = {
            shape: BatchInvariantSplitKVPlan(
                max_rows,
                max_items,
                device,
                prefix_queries=queries if shape.queries_per_kv > _MANY_HEADS else min(queries, _PREFIX_QUERIES),
            )
            for shape, queries in shapes.items()
        }


class BatchInvariantTritonBackend(TritonAttentionBackend):
    """Attention backend of one step on a GPU. The step's plans are ``BatchInvariantSplitKVPlans``.

    MLA layers store expanded keys and values.
    """

    latent = False
    numerics = BATCH_INVARIANT

    def _is_bs1(self, heads: QKNormRopeParams) -> bool:
        """Never: that kernel splits a row by its length, while batch-invariant sums are split at fixed chunks."""
        return False

    def _attend(self, q_THd: Tensor, cache: LayerKVCache, params: AttentionParams, sinks_H: Tensor | None) -> Tensor:
        assert cache.values is not None, "batch-invariant attention needs a cache with separate values"
        step = self._step
        keys = cache.keys.slots
        values = cache.values.slots
        kv_heads = keys.shape[1]
        q_THd = pack_heads(q_THd)
        out_THe = step.allocate_output(q_THd, values.shape[-1])
        paged = self._paged_params(params, cache, sinks_H)
        if step.num_decodes:
            plan = step.plans[DecodeShape(kv_heads, q_THd.shape[1] // kv_heads, params.window, params.chunk)]
            assert isinstance(plan, BatchInvariantSplitKVPlan), "the step needs batch-invariant split-KV plans"
            decode_attention(
                q_THd[: step.num_decodes],
                keys,
                values,
                step.block_table_BM,
                step.req_slots_B[: step.num_decodes],
                plan,
                paged,
                out=out_THe[: step.num_decodes],
                has_prefixes=step.has_prefixes,
            )
        if step.prefill_tiles is not None:
            tiles, ends_T = step.prefill_tiles, None if params.ignores_spans else step.visible_ends_T
            prefill_attention(
                q_THd, keys, values, step.block_table_BM, tiles, paged, visible_ends_T=ends_T, out=out_THe
            )
        return out_THe
