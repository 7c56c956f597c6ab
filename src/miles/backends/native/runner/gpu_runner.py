"""GPU path of the model runner: Triton attention and sampling kernels, and the CUDA graph runner.

Shapes: as in ``forward_batch``; S request slots.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.backends.native.engine.forward_batch import ForwardBatch, SamplingBatch
from miles.backends.native.engine.request import Ints
from miles.backends.native.runner.cuda_graph import CudaGraphRunner, GraphKey
from miles.backends.native.runner.lora import LoraRunner
from miles.backends.native.runner.sampler import SendArrays
from miles.backends.native.runner.step_inputs import StepInputs
from miles.core.types import Array
from miles.kernels.attention.dense_prefill import (
    DenseChunk,
    DensePrefill,
    drop_dense_tiles,
    find_dense_chunks,
    has_dense_prefill,
)
from miles.kernels.attention.gpu_backend import DecodeShape, SplitKVPlans, StepMetadata, TritonAttentionBackend
from miles.kernels.attention.mla import count_head_tiles
from miles.kernels.attention.paged_prefill import build_prefill_tiles
from miles.kernels.attention.tile_config import MAX_FP32_HEAD_DIM, MAX_HEAD_DIM, max_prefix_queries
from miles.kernels.batch_invariant import sampling as batch_invariant_sampling
from miles.kernels.batch_invariant.paged_attention import BatchInvariantSplitKVPlans, BatchInvariantTritonBackend
from miles.kernels.numerics import Numerics
from miles.kernels.runtime.kv_cache import PagedKVCache, RecurrentStatePool, StepStates
from miles.kernels.runtime.triton_compat import HAVE_TRITON, count_sms
from miles.kernels.sampling.sample import sample_tokens
from miles.models.accounting.cuda_graphs import count_prefill_graph_tokens, has_graph_kernels
from miles.models.base import CausalLM
from miles.models.decoder import Decoder
from miles.models.draft.base import Draft
from miles.models.spec import AttentionSpec, DecoderSpec, MlaSpec

# Queries per tile of a shared prefix; with 4-byte dtypes and MLA latents fewer fit into an SM.
_PREFIX_QUERIES, _WIDE_PREFIX_QUERIES = 64, 16


class GpuRunner:
    """The Triton kernels of one engine. The KV cache has one page, and ``last_tokens_S`` one slot, of padding.

    Without ``has_attention_kernels`` it samples and captures decode steps, and attention is that of torch.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        num_slots: int,
        max_pages: int,
        page_size: int,
        send: SendArrays,
        device: torch.device,
        dtype: torch.dtype,
        numerics: Numerics,
        has_attention_kernels: bool = True,
    ) -> None:
        self.has_attention_kernels = has_attention_kernels
        plans = BatchInvariantSplitKVPlans if numerics.batch_invariant else SplitKVPlans
        shapes = _decode_shapes(spec, dtype, numerics) if has_attention_kernels else {}
        self._plans = plans(shapes, max_rows=num_slots, device=device, sms=count_sms(device))
        self._spec = spec
        self._num_slots = num_slots
        self._max_pages = max_pages
        self._page_size = page_size
        self._send = send
        self._device = device
        self._numerics = numerics
        self._warmed_up: set[GraphKey] = set()
        self._has_dense_prefill = has_dense_prefill(device)

    def build_graph_runner(
        self,
        decoder: Decoder,
        cache: PagedKVCache,
        last_tokens_S: Tensor,
        padding_page: int,
        no_expert: Array | None,
        draft: Draft | None = None,
        lora: LoraRunner | None = None,
        states: RecurrentStatePool | None = None,
    ) -> CudaGraphRunner:
        """Return the CUDA graphs over this cache; ``padding_page`` belongs to no request."""
        return CudaGraphRunner(
            decoder,
            cache=cache,
            inputs=self.build_step_inputs(last_tokens_S, padding_page),
            last_tokens_S=last_tokens_S,
            max_batch_size=self._num_slots,
            max_prefill_tokens=min(count_prefill_graph_tokens(self._spec), padding_page * self._page_size),
            no_expert=no_expert,
            warmed_up=self._warmed_up,
            draft=draft,
            lora=lora,
            states=states,
            torch_attention=not self.has_attention_kernels,
        )

    def build_step_inputs(self, last_tokens_S: Tensor, padding_page: int) -> StepInputs:
        """Return the inputs of CUDA graphs over a cache; ``padding_page`` belongs to no request."""
        return StepInputs(
            rows=self._num_slots,
            max_pages=self._max_pages,
            page_size=self._page_size,
            padding_cache_loc=padding_page * self._page_size,
            padding_slot=len(last_tokens_S) - 1,
            plans=self._plans,
            device=self._device,
        )

    def build_attention(
        self, batch: ForwardBatch, positions_T: Ints, cache: PagedKVCache, states: StepStates | None = None
    ) -> TritonAttentionBackend:
        """Return the attention backend of an eager step: decode rows and prefill chunks."""
        n, size = batch.num_decodes, self._page_size
        rows = np.arange(len(batch.req_slots_B))
        pages_T = batch.block_table_BM[rows.repeat(batch.counts_B), positions_T // size]
        tiles = build_prefill_tiles(batch.starts_B[n:], batch.counts_B[n:], rows[n:], n)
        cache_locs_T, starts_B = self._send(pages_T * size + positions_T % size, batch.starts_B[:n])
        block_table_BM, rows_B, tiles_I4 = self._send(
            batch.block_table_BM.astype(np.int32), rows.astype(np.int32), tiles
        )
        ends_T: Tensor | None = None
        if batch.visible_ends_T is not None:
            (ends_T,) = self._send(batch.visible_ends_T.astype(np.int32))
        has_prefixes = n > 0 and self._plans.fill(batch.starts_B[:n] + 1, batch.group_B[:n], batch.shared_B[:n])
        step = StepMetadata(
            slots_T=cache_locs_T,
            block_table_BM=block_table_BM,
            req_slots_B=rows_B,
            num_decodes=n,
            plans=self._plans,
            has_prefixes=has_prefixes,
            prefill_tiles=tiles_I4 if len(tiles) else None,
            page_size=size,
            dense=self._build_dense_prefill(batch, tiles, block_table_BM),
            starts_B=starts_B,
            visible_ends_T=ends_T,
            states=states,
        )
        backend_class = BatchInvariantTritonBackend if self._numerics.batch_invariant else TritonAttentionBackend
        return backend_class(cache, step)

    def _build_dense_prefill(
        self, batch: ForwardBatch, tiles_I4: NDArray[np.int32], block_table_BM: Tensor
    ) -> DensePrefill | None:
        """Return the long chunks of a step that cuDNN computes; None if there are none."""
        if self._numerics.batch_invariant or batch.visible_ends_T is not None or not self._has_dense_prefill:
            return None
        n, size = batch.num_decodes, self._page_size
        found = find_dense_chunks(batch.starts_B[n:], batch.counts_B[n:], n)
        if not found:
            return None
        offsets_p = torch.arange(size, device=self._device)
        chunks: list[DenseChunk] = []
        for sequence, row, count, start in found:
            pages_m = block_table_BM[n + sequence, : -(-(start + count) // size)].long()
            slots = (pages_m[:, None] * size + offsets_p).flatten()[: start + count]
            chunks.append(DenseChunk(row, count, start, slots))
        (rest,) = self._send(drop_dense_tiles(tiles_I4, found))
        return DensePrefill(chunks, rest if len(rest) else None)

    def sample(self, logits_DV: Tensor, sampling: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Return one token per row and its log-prob."""
        temperature_D, uniform_D, top_p_D, min_p_D = self._send(
            sampling.temperature_D, sampling.uniform_D, sampling.top_p_D, sampling.min_p_D
        )
        (top_k_D,) = self._send(sampling.top_k_D)
        tokens_D = torch.empty(len(logits_DV), dtype=torch.int64, device=self._device)
        logprobs_D = torch.empty(len(logits_DV), dtype=torch.float32, device=self._device)
        sample_fn = batch_invariant_sampling.sample_tokens if self._numerics.batch_invariant else sample_tokens
        sample_fn(
            logits_DV,
            temperature_D,
            uniform_D,
            top_k_B=top_k_D,
            top_p_B=top_p_D,
            min_p_B=min_p_D,
            filters=bool(sampling.has_filter_D.any()),
            tokens_out_B=tokens_D,
            logprobs_out_B=logprobs_D,
        )
        return tokens_D, logprobs_D


def supports_gpu_kernels(spec: DecoderSpec, model: CausalLM, device: torch.device) -> bool:
    """Return whether the Triton kernels serve a model: our own decoder, no relative, compressed or sparse attention.

    Heads have at most ``MAX_HEAD_DIM`` channels, in float32 ``MAX_FP32_HEAD_DIM``.
    """
    if not isinstance(model, Decoder):
        return False
    mixers = [layer.mixer for layer in spec.layers]
    max_head_dim = MAX_HEAD_DIM if model.embedding.weight.dtype.itemsize == 2 else MAX_FP32_HEAD_DIM
    fits = all(not isinstance(mixer, AttentionSpec) or mixer.head_dim <= max_head_dim for mixer in mixers)
    return device.type == "cuda" and HAVE_TRITON and has_graph_kernels(spec) and fits


def supports_torch_decode_graphs(model: CausalLM, device: torch.device, numerics: Numerics) -> bool:
    """Return whether decode steps with torch attention can be captured: our own decoder, not batch-invariant."""
    return isinstance(model, Decoder) and device.type == "cuda" and HAVE_TRITON and not numerics.batch_invariant


def _decode_shapes(spec: DecoderSpec, dtype: torch.dtype, numerics: Numerics) -> Mapping[DecodeShape, int]:
    shapes: dict[DecodeShape, int] = {}
    for mixer in (layer.mixer for layer in spec.layers):
        if isinstance(mixer, AttentionSpec):
            queries_per_kv = mixer.num_heads // mixer.num_kv_heads
            shape = DecodeShape(mixer.num_kv_heads, queries_per_kv, mixer.window, mixer.chunk)
            shapes[shape] = min(shapes.get(shape, _PREFIX_QUERIES), max_prefix_queries(mixer.head_dim))
        elif isinstance(mixer, MlaSpec) and numerics.batch_invariant:  # from keys and values, as in training
            shapes[DecodeShape(mixer.num_heads, 1)] = _PREFIX_QUERIES
        elif isinstance(mixer, MlaSpec):
            shape = DecodeShape(count_head_tiles(mixer.num_heads), mixer.num_heads)
            shapes[shape] = _PREFIX_QUERIES if dtype.itemsize == 2 else _WIDE_PREFIX_QUERIES
    return shapes
