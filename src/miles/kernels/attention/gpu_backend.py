"""GPU attention backend of one engine step: writes new keys and values into their pages, then runs paged attention.

Shapes: T new tokens, B sequences of a step, those with one new token first, M pages of the longest, H query heads, G
key-value heads, d channels of a key, e of a value, N = (H + 2 G) * d.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from miles.kernels.attention import decode_bs1
from miles.kernels.attention.dense_prefill import DensePrefill, can_attend_dense, dense_prefill_attention
from miles.kernels.attention.mla import count_head_tiles, mla_decode_attention, mla_prefill_attention
from miles.kernels.attention.paged_decode import decode_attention
from miles.kernels.attention.paged_prefill import prefill_attention
from miles.kernels.attention.params import AttentionInputs, AttentionParams, PagedAttentionParams
from miles.kernels.attention.split_kv import SplitKVPlan
from miles.kernels.fused.qk_norm_rope import QKNormRopeParams, qk_norm_rope_write_kv
from miles.kernels.numerics import FAST, Numerics
from miles.kernels.runtime.kv_cache import Ints, LayerKVCache, PagedKVCache, PooledRecurrentState, StepStates

# Partial results allocated beyond two per row: enough to split a single row over all SMs of a GPU.
_SPARE_ITEMS = 512


class DecodeShape(NamedTuple):
    """What a split-KV plan depends on: key-value heads, query heads of each, window and chunk.

    For MLA: tiles of heads, and all query heads.
    """

    kv_heads: int
    queries_per_kv: int
    window: int | None = None
    chunk: int | None = None


class SplitKVPlans:
    """The split-KV plans of one step's decode rows, one per ``DecodeShape`` of the model's layers.

    ``shapes`` maps each shape to the queries that share a prefix tile. ``used`` is set when a layer reads a plan.
    """

    used: bool = False

    def __init__(self, shapes: Mapping[DecodeShape, int], *, max_rows: int, device: torch.device, sms: int) -> None:
        self._sms, self._device = sms, device
        self._scratch: dict[tuple[int, int, int], decode_bs1.DecodeScratch] = {}
        max_items = 2 * max_rows + _SPARE_ITEMS
        self._plans = {
            shape: SplitKVPlan(max_rows, max_items, device, prefix_queries=queries) for shape, queries in shapes.items()
        }

    def fill(self, lengths_B: Ints, group_B: Ints, shared_B: Ints) -> bool:
        """Plan a step and copy the plans to the device; returns whether any rows share a prefix."""
        has_prefixes = False
        for shape, plan in self._plans.items():
            plan.fill(
                lengths_B,
                group_B,
                shared_B,
                kv_heads=shape.kv_heads,
                queries_per_kv=shape.queries_per_kv,
                sms=self._sms,
                window=shape.window,
                chunk=shape.chunk,
            )
            plan.copy_to_device()
            has_prefixes = has_prefixes or plan.has_prefixes
        return has_prefixes

    def __getitem__(self, shape: DecodeShape) -> SplitKVPlan:
        self.used = True
        return self._plans[shape]

    def get_bs1_scratch(self, kv_heads: int, queries_per_kv: int, head_dim: int) -> decode_bs1.DecodeScratch:
        """Scratch of the batch-size-1 decode kernel for layers of this shape, allocated on first use."""
        shape = (kv_heads, queries_per_kv, head_dim)
        if shape not in self._scratch:
            self._scratch[shape] = decode_bs1.allocate_scratch(*shape, sms=self._sms, device=self._device)
        return self._scratch[shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata:
    """Attention metadata of one step on the device.

    ``slots_T`` are the KV-cache slots of the new tokens, ``req_slots_B`` the rows of the block table; the first
    ``num_decodes`` sequences have one new token each, ``prefill_tiles`` cover the tokens of the others. ``starts_B``
    tokens are before those of each of the former; None if their rope positions are these numbers. Tokens of prefill
    tiles attend to positions before ``visible_ends_T``; None: up to their own. Layers with plain attention compute the
    chunks of ``dense`` with cuDNN. The attention of tokens that are in no
    tile and no plan is zero if the step ``has_padding``; otherwise there are none. ``states`` are the
    recurrent states of a model that has recurrent layers.
    """

    slots_T: Tensor
    block_table_BM: Tensor
    req_slots_B: Tensor
    num_decodes: int
    plans: SplitKVPlans
    has_prefixes: bool
    prefill_tiles: Tensor | None
    page_size: int
    dense: DensePrefill | None = None
    starts_B: Tensor | None = None
    visible_ends_T: Tensor | None = None
    states: StepStates | None = None
    has_padding: bool = False

    def allocate_output(self, q_THd: Tensor, value_dim: int) -> Tensor:
        """Return the tensor that the attention of the step's tokens is written to [T, H, e]."""
        shape = (*q_THd.shape[:2], value_dim)
        return q_THd.new_zeros(shape) if self.has_padding else q_THd.new_empty(shape)


class TritonAttentionBackend:
    """Attention backend of one engine step in Triton kernels."""

    latent = True
    numerics: ClassVar[Numerics] = FAST

    def __init__(self, cache: PagedKVCache, step: StepMetadata) -> None:
        self._cache = cache
        self._step = step

    def recurrent_state(self, layer: int) -> PooledRecurrentState:
        """Return the state of a recurrent layer, and where to store the new one."""
        assert self._step.states is not None, "the model has recurrent layers, but no recurrent states were given"
        return self._step.states.recurrent_state(layer)

    def forward_qkv(
        self,
        layer: int,
        qkv_TN: Tensor,
        heads: QKNormRopeParams,
        params: AttentionParams,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attention from a layer's fused QKV projection, with QK-norm, RoPE and the KV write, [T, H * d]."""
        cache, step = self._cache.layers[layer], self._step
        assert cache.values is not None
        keys, values = cache.keys.slots, cache.values.slots
        if self._is_bs1(heads) and values.shape == keys.shape:
            kv_heads = heads.kv_heads
            return decode_bs1.decode_bs1_attention(
                qkv_TN,
                heads,
                keys,
                values,
                step.block_table_BM,
                step.req_slots_B,
                step.slots_T,
                self._paged_params(params, cache, sinks_H),
                step.plans.get_bs1_scratch(kv_heads, heads.heads // kv_heads, heads.head_dim),
                step.starts_B,
            )
        q_THd = qk_norm_rope_write_kv(
            qkv_TN,
            heads,
            key_slots=keys,
            value_slots=values,
            slots_T=step.slots_T,
            numerics=self.numerics,
            scales=cache.scales,
        )
        return self._attend(q_THd, cache, params, sinks_H).flatten(1)

    def _is_bs1(self, heads: QKNormRopeParams) -> bool:
        """Whether the step is one decode row that the batch-size-1 kernel supports."""
        step = self._step
        small = (
            heads.heads // heads.kv_heads <= decode_bs1.MAX_QUERIES_PER_KV and heads.head_dim <= decode_bs1.MAX_HEAD_DIM
        )
        return small and step.num_decodes == len(step.slots_T) == 1 and heads.positions_T is not None

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        q_THd, k_TGd, v_TGe, params, sinks_H, index = inputs
        assert index is None, "sparse attention layers are not supported by the GPU attention backend"
        cache = self._cache.layers[layer]
        cache.keys.write(self._step.slots_T, k_TGd)
        if cache.values is None:
            return self._attend_mla(q_THd, cache, params, v_TGe.shape[-1])
        cache.values.write(self._step.slots_T, v_TGe)
        return self._attend(q_THd, cache, params, sinks_H)

    def _paged_params(
        self, params: AttentionParams, cache: LayerKVCache, sinks_H: Tensor | None
    ) -> PagedAttentionParams:
        return PagedAttentionParams(
            self._step.page_size, params.scale, params.window, params.chunk, params.softcap, sinks_H, cache.scales
        )

    def _attend(self, q_THd: Tensor, cache: LayerKVCache, params: AttentionParams, sinks_H: Tensor | None) -> Tensor:
        assert cache.values is not None
        step = self._step
        keys = cache.keys.slots
        values = cache.values.slots
        kv_heads = keys.shape[1]
        out_THe = step.allocate_output(q_THd, values.shape[-1])
        paged = self._paged_params(params, cache, sinks_H)
        if step.num_decodes:
            decode_attention(
                q_THd[: step.num_decodes],
                keys,
                values,
                step.block_table_BM,
                step.req_slots_B[: step.num_decodes],
                step.plans[DecodeShape(kv_heads, q_THd.shape[1] // kv_heads, params.window, params.chunk)],
                paged,
                has_prefixes=step.has_prefixes,
                out=out_THe[: step.num_decodes],
            )
        if step.prefill_tiles is not None:
            tiles: Tensor | None = step.prefill_tiles
            ends_T = None if params.ignores_spans else step.visible_ends_T
            if step.dense is not None and can_attend_dense(q_THd, keys, values, paged):
                tiles = step.dense.tiles
                for chunk in step.dense.chunks:
                    dense_prefill_attention(q_THd, keys, values, chunk, paged.scale, out_THe)
            if tiles is not None:
                prefill_attention(
                    q_THd, keys, values, step.block_table_BM, tiles, paged, visible_ends_T=ends_T, out=out_THe
                )
        return out_THe

    def _attend_mla(self, q_THd: Tensor, cache: LayerKVCache, params: AttentionParams, value_dim: int) -> Tensor:
        step = self._step
        keys = cache.keys.slots
        heads = q_THd.shape[1]
        out_THe = step.allocate_output(q_THd, value_dim)
        paged = PagedAttentionParams(step.page_size, params.scale, kv_scales=cache.scales)
        if step.num_decodes:
            mla_decode_attention(
                q_THd[: step.num_decodes],
                keys,
                step.block_table_BM,
                step.req_slots_B[: step.num_decodes],
                step.plans[DecodeShape(count_head_tiles(heads), heads)],
                paged,
                value_dim=value_dim,
                has_prefixes=step.has_prefixes,
                out=out_THe[: step.num_decodes],
            )
        if step.prefill_tiles is not None:
            table, tiles = step.block_table_BM, step.prefill_tiles
            mla_prefill_attention(q_THd, keys, table, tiles, paged, value_dim=value_dim, out=out_THe)
        return out_THe
