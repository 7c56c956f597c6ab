"""CUDA graphs for decode-only batches, captured per padded batch size.

A graph reads what changes from step to step out of one input buffer at a fixed device address, and pages out of a
block table there; the host copies the buffer, and only the changed entries of the table. Padding rows, when there are
fewer requests than rows, write to a page, a request slot and a table entry that no request uses.

Shapes: R rows of the largest graph, n of one, M pages of the longest sequence, L MoE layers, k experts per token.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.engine.forward_batch import ForwardBatch, StepOutput, compute_rope_positions
from miles.backends.native.engine.request import Ints
from miles.backends.native.runner.lora import LoraRunner
from miles.core.types import Array
from miles.kernels.attention.gpu_backend import SplitKVPlans, StepMetadata, TritonAttentionBackend
from miles.kernels.batch_invariant import sampling as batch_invariant_sampling
from miles.kernels.batch_invariant.paged_attention import BatchInvariantTritonBackend
from miles.kernels.fused.lm_head import compute_logits
from miles.kernels.runtime.graph_inputs import GraphInputs, unpack_graph_inputs
from miles.kernels.runtime.kv_cache import PagedKVCache
from miles.kernels.sampling.sample import sample_tokens
from miles.models.decoder import Decoder, DecoderLayer
from miles.models.draft.base import Draft
from miles.models.layers.moe import Routing

_INT_COLUMNS = ("tokens", "starts", "positions", "cache_locs", "req_slots", "top_k")
_FLOAT_COLUMNS = ("temperature", "uniform", "top_p", "min_p")
# Changed block table entries that fit into the input buffer; beyond that the table is copied whole.
_MAX_TABLE_UPDATES = 1024
# Host buffers of inputs in rotation: one the device reads, one being filled, one spare.
_NUM_HOST_BUFFERS = 3


def capture_batch_sizes(max_batch_size: int) -> list[int]:
    """Return the batch sizes to capture: close together where one more padding row costs most."""
    sizes = [1, 2, 4, 8, 12, *range(16, 64, 8), *range(64, 256, 16), *range(256, 1025, 32)]
    return [*(size for size in sizes if size < max_batch_size), max_batch_size]


class GraphKey(NamedTuple):
    """What a graph is captured for: rows, whether some share a prefix, have a top-k/top-p/min-p, have an adapter."""

    batch_size: int
    has_prefixes: bool
    has_filter: bool
    has_lora: bool = False


class CapturedGraph(NamedTuple):
    """A captured step, and whether its kernels read the split-KV plans: the batch-size-1 kernels do not."""

    graph: torch.cuda.CUDAGraph
    reads_plans: bool


class _InputBuffers:
    """The inputs of all graphs: one buffer on the device, several in pinned host memory."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows = rows
        size = rows * (len(_INT_COLUMNS) + len(_FLOAT_COLUMNS)) + 2 * _MAX_TABLE_UPDATES
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(size, dtype=torch.int32).pin_memory() for _ in range(_NUM_HOST_BUFFERS)]
        self._host_columns = [
            {name: column.numpy() for name, column in self._split(host).items()} for host in self._hosts
        ]
        self.columns = self._split(self._device)
        self._copied = [torch.cuda.Event() for _ in range(_NUM_HOST_BUFFERS)]
        self._current = 0

    def next(self) -> dict[str, Array]:
        """Return the columns of a host buffer that the device no longer reads.

        It waits if more steps were launched in a row than there are buffers: a draft is several steps.
        """
        self._current = (self._current + 1) % _NUM_HOST_BUFFERS
        self._copied[self._current].synchronize()
        return self._host_columns[self._current]

    def send(self) -> None:
        """Copy the buffer last returned by ``next`` to the device."""
        self._device.copy_(self._hosts[self._current], non_blocking=True)
        self._copied[self._current].record()

    def _split(self, buffer: Tensor) -> dict[str, Tensor]:
        names = (*_INT_COLUMNS, *_FLOAT_COLUMNS)
        columns: dict[str, Tensor] = dict(zip(names, buffer.split(self._rows), strict=False))
        for name in _FLOAT_COLUMNS:
            columns[name] = columns[name].view(torch.float32)
        columns["table_index"], columns["table_pages"] = buffer[-2 * _MAX_TABLE_UPDATES :].split(_MAX_TABLE_UPDATES)
        return columns


class _HostOutput:
    """Pinned host memory of one step's output, and the event after which it is there."""

    def __init__(self, samples: Tensor, experts_RLk: Tensor | None) -> None:
        self.event = torch.cuda.Event()
        self.samples = torch.zeros_like(samples, device="cpu").pin_memory()
        self.experts_RLk = None if experts_RLk is None else torch.zeros_like(experts_RLk, device="cpu").pin_memory()


class _OutputBuffers:
    """The outputs of all graphs: one buffer on the device, and one in pinned host memory for each step in flight."""

    def __init__(self, rows: int, no_expert: Array | None, device: torch.device) -> None:
        # Tokens and log-probs share one buffer, so that one copy brings both.
        self._rows = rows
        self._samples = torch.zeros(rows * 3, dtype=torch.int32, device=device)
        self.tokens_R, self.logprobs_R = _split_samples(self._samples, rows)
        self.experts_RLk: Tensor | None = None
        if no_expert is not None:
            dtype = torch.uint8 if no_expert.dtype == np.uint8 else torch.int16
            self.experts_RLk = torch.zeros(rows, *no_expert.shape, dtype=dtype, device=device)
        self._free: list[_HostOutput] = []

    def fetch(self, count: int) -> GraphReplay:
        """Start copying the first ``count`` rows to the host."""
        host = self._free.pop() if self._free else _HostOutput(self._samples, self.experts_RLk)
        host.samples.copy_(self._samples, non_blocking=True)
        if self.experts_RLk is not None and host.experts_RLk is not None:
            host.experts_RLk[:count].copy_(self.experts_RLk[:count], non_blocking=True)
        host.event.record()
        return GraphReplay(self, host, count)

    def take(self, host: _HostOutput, count: int) -> StepOutput:
        """Wait for the device, return a copy of the first ``count`` rows, and use the buffer again."""
        host.event.synchronize()
        tokens_R, logprobs_R = (part.numpy() for part in _split_samples(host.samples, self._rows))
        experts = None if host.experts_RLk is None else _as_unsigned(host.experts_RLk[:count].numpy()).copy()
        output = StepOutput(
            tokens_D=tokens_R[:count].copy(), logprobs_D=logprobs_R[:count].copy(), routed_experts_TLx=experts
        )
        self._free.append(host)
        return output


class GraphReplay:
    """A launched graph (an ``InflightStep``)."""

    def __init__(self, outputs: _OutputBuffers, host: _HostOutput, count: int) -> None:
        self._outputs = outputs
        self._host = host
        self._count = count

    def result(self) -> StepOutput:
        """Wait for the device and return its output. Call once."""
        return self._outputs.take(self._host, self._count)


class StepInputs:
    """The inputs of decode-only steps at fixed device addresses: the rows' columns, the block table, split-KV plans.

    Padding rows use ``padding_slot``, which no request has, and write to ``padding_cache_loc``, in a page of no
    request.
    """

    def __init__(
        self,
        *,
        rows: int,
        max_pages: int,
        page_size: int,
        padding_cache_loc: int,
        padding_slot: int,
        plans: SplitKVPlans,
        device: torch.device,
    ) -> None:
        self.plans = plans
        self._page_size = page_size
        self._padding_cache_loc = padding_cache_loc
        self._padding_slot = padding_slot
        self._buffers = _InputBuffers(rows, device)
        self._block_table_RM = torch.zeros(rows + 1, max_pages, dtype=torch.int32, device=device)
        self._padding_table_index = self._block_table_RM.numel() - 1
        self._sent_table_RM = np.zeros((rows, max_pages), np.int32)
        self._rows_R = torch.arange(rows, dtype=torch.int32, device=device)

    @property
    def columns(self) -> dict[str, Tensor]:
        """The columns on the device, by name."""
        return self._buffers.columns

    def send(self, batch: ForwardBatch, batch_size: int, *, reads_plans: bool) -> None:
        """Copy the rows of a batch, padded to ``batch_size``, to the device."""
        count, size = len(batch.req_slots_B), self._page_size
        sampling, starts_B = batch.sampling, batch.starts_B
        columns = self._buffers.next()
        last_page_B = batch.block_table_BM[np.arange(count), starts_B // size]
        values: dict[str, tuple[Array, float]] = {
            "tokens": (batch.tokens_T, 0),
            "starts": (starts_B, 0),
            "positions": (compute_rope_positions(batch, starts_B), 0),
            "cache_locs": (last_page_B * size + starts_B % size, self._padding_cache_loc),
            "req_slots": (batch.req_slots_B, self._padding_slot),
            "top_k": (sampling.top_k_D, -1),
            "temperature": (sampling.temperature_D, 1),
            "uniform": (sampling.uniform_D, 0),
            "top_p": (sampling.top_p_D, 1),
            "min_p": (sampling.min_p_D, 0),
        }
        for name, (value, padding) in values.items():
            columns[name][:count] = value
            if count < batch_size:
                columns[name][count:batch_size] = padding
        self._update_block_table(batch.block_table_BM, columns)
        self._buffers.send()
        if reads_plans:
            lengths_R = np.zeros(batch_size, np.int64)
            lengths_R[:count] = starts_B + 1
            pad = (0, batch_size - count)
            self.plans.fill(lengths_R, np.pad(batch.group_B, pad, constant_values=-1), np.pad(batch.shared_B, pad))

    def _update_block_table(self, block_table_BM: Ints, columns: dict[str, Array]) -> None:
        """Send changed entries of the block table: in the input buffer if they fit, else the whole table."""
        count, max_pages = block_table_BM.shape
        sent_BM = self._sent_table_RM[:count, :max_pages]
        rows, pages = (sent_BM != block_table_BM).nonzero()
        columns["table_index"][:] = self._padding_table_index
        if not len(rows):
            return
        if len(rows) <= _MAX_TABLE_UPDATES:
            columns["table_index"][: len(rows)] = rows * self._sent_table_RM.shape[1] + pages
            columns["table_pages"][: len(rows)] = block_table_BM[rows, pages]
        else:
            pinned_BM = torch.from_numpy(block_table_BM.astype(np.int32)).pin_memory()
            self._block_table_RM[:count, :max_pages].copy_(pinned_BM, non_blocking=True)
        sent_BM[rows, pages] = block_table_BM[rows, pages]

    def send_padding(self, batch_size: int) -> None:
        """Send inputs that consist of padding rows only."""
        columns = self._buffers.next()
        for name in (*_INT_COLUMNS, *_FLOAT_COLUMNS):
            columns[name][:] = 0
        columns["temperature"][:] = 1
        columns["top_p"][:] = 1
        columns["cache_locs"][:] = self._padding_cache_loc
        columns["req_slots"][:] = self._padding_slot
        columns["table_index"][:] = self._padding_table_index
        self._buffers.send()
        zeros = np.zeros(batch_size, np.int64)
        self.plans.fill(zeros, zeros - 1, zeros)

    def unpack(self, count: int, last_tokens_S: Tensor, *, has_prefixes: bool) -> tuple[GraphInputs, StepMetadata]:
        """Return the first ``count`` rows and the metadata of their attention; part of what a graph captures."""
        columns = self.columns
        inputs = unpack_graph_inputs(
            columns["tokens"][:count],
            columns["positions"][:count],
            columns["cache_locs"][:count],
            columns["req_slots"][:count],
            last_tokens_S=last_tokens_S,
            table_index_N=columns["table_index"],
            pages_N=columns["table_pages"],
            block_table_RM=self._block_table_RM,
        )
        step = StepMetadata(
            slots_T=inputs.slots_n,
            block_table_BM=self._block_table_RM,
            req_slots_B=self._rows_R[:count],
            num_decodes=count,
            plans=self.plans,
            has_prefixes=has_prefixes,
            prefill_tiles=None,
            page_size=self._page_size,
            starts_B=columns["starts"][:count],
        )
        return inputs, step


def capture_graph(
    forward: Callable[[], None], inputs: StepInputs, batch_size: int, pool: Any, *, warm_up: bool
) -> CapturedGraph:
    """Capture ``forward`` over padding rows; with ``warm_up`` run it once before."""
    inputs.send_padding(batch_size)
    if warm_up:
        # Compilers and libraries allocate on the first run, which a capture could not contain.
        forward()
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    inputs.plans.used = False
    with _gc_disabled(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        forward()
    return CapturedGraph(graph, inputs.plans.used)


class CudaGraphRunner:
    """The CUDA graphs of one engine. ``last_tokens_S``, which has one padding slot, is shared with eager steps.

    ``supported`` is False if this process computes only part of a step (tensor parallelism): then nothing is captured.
    ``warmed_up`` holds the keys that ran eagerly once; it outlives the graphs. ``features_RF`` is what a draft
    head reads of the last replay.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        cache: PagedKVCache,
        inputs: StepInputs,
        last_tokens_S: Tensor,
        max_batch_size: int,
        no_expert: Array | None,
        warmed_up: set[GraphKey],
        draft: Draft | None = None,
        lora: LoraRunner | None = None,
    ) -> None:
        self.cache = cache
        self.supported = all(
            layer.reduce_from_tp is None for layer in decoder.layers if isinstance(layer, DecoderLayer)
        )
        self._decoder = decoder
        self._last_tokens_S = last_tokens_S
        self._record_experts = no_expert is not None
        self._warmed_up = warmed_up
        self._batch_sizes = capture_batch_sizes(max_batch_size)
        device = last_tokens_S.device
        self._inputs = inputs
        self._outputs = _OutputBuffers(max_batch_size, no_expert, device)
        self._draft = draft
        self._lora = lora
        self.features_RF: Tensor | None = None
        if draft is not None:
            dtype = decoder.embedding.weight.dtype
            self.features_RF = torch.zeros(max_batch_size, draft.spec.feature_size, dtype=dtype, device=device)
        self._graphs: dict[GraphKey, CapturedGraph] = {}
        self.captures, self.capture_seconds = 0, 0.0
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def has_graphs(self) -> bool:
        return bool(self._graphs)

    def can_run(self, batch: ForwardBatch) -> bool:
        """Return whether a step can run as a graph: decode-only, and computed by this rank alone."""
        return batch.decode_only and self.supported

    def replay(self, batch: ForwardBatch) -> GraphReplay:
        """Launch a step, capturing its graph on first use; nothing waits for the device."""
        count = len(batch.req_slots_B)
        batch_size = self._batch_sizes[bisect_left(self._batch_sizes, count)]
        has_filter = bool(batch.sampling.has_filter_D.any())
        key = GraphKey(batch_size, bool(batch.shared_B.any()), has_filter, batch.lora is not None)
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._capture(key)
        self._inputs.send(batch, batch_size, reads_plans=captured.reads_plans)
        if self._lora is not None and batch.lora is not None:
            self._lora.send_static_plan(batch.lora, batch_size)
        captured.graph.replay()
        return self._outputs.fetch(count)

    def capture_all(self) -> Iterator[tuple[int, int]]:
        """Capture every batch size, the largest first; yield the number done and the total."""
        keys = self.list_keys() if self.supported else []
        for done, key in enumerate(keys):
            if key not in self._graphs:
                self._capture(key)
            yield done + 1, len(keys)

    def list_keys(self) -> list[GraphKey]:
        """Return what graphs of requests without filters are captured for, the largest batch size first."""
        return [
            GraphKey(size, prefixes, False, has_lora)
            for size in reversed(self._batch_sizes)
            for prefixes in (False, True)
            for has_lora in ((False,) if self._lora is None else (False, True))
        ]

    @torch.inference_mode()
    def run_padding(self, key: GraphKey) -> None:
        """Compute what a graph contains once, eagerly, on padding rows."""
        self._inputs.send_padding(key.batch_size)
        self._forward(key)

    def invalidate(self) -> None:
        """Drop all graphs, because the weights move to other addresses."""
        self._graphs.clear()
        # A library that keeps memory of the old pool would keep it from being reused.
        self._pool = torch.cuda.graph_pool_handle()

    # -- capture ------------------------------------------------------------------------------

    @torch.inference_mode()
    def _capture(self, key: GraphKey) -> CapturedGraph:
        started, warm_up = time.perf_counter(), key not in self._warmed_up
        if self._lora is not None:
            self._lora.clear_static_plan()
        captured = capture_graph(lambda: self._forward(key), self._inputs, key.batch_size, self._pool, warm_up=warm_up)
        self._warmed_up.add(key)
        self._graphs[key] = captured
        self.captures += 1
        self.capture_seconds += time.perf_counter() - started
        return captured

    def _forward(self, key: GraphKey) -> None:
        """The computation of one graph: unpack inputs, decode, sample, store outputs."""
        n, columns = key.batch_size, self._inputs.columns
        inputs, step = self._inputs.unpack(n, self._last_tokens_S, has_prefixes=key.has_prefixes)
        routing = Routing(record=True) if self._record_experts else None
        decoder, outputs = self._decoder, self._outputs
        invariant = decoder.numerics.batch_invariant
        attention = (BatchInvariantTritonBackend if invariant else TritonAttentionBackend)(self.cache, step)
        capture = None if self._draft is None else self._draft.new_capture()
        if self._lora is not None:
            self._lora.use_static_plan(n if key.has_lora else 0)
        hidden_nD = decoder(inputs.tokens_n, inputs.positions_n, attention, routing, capture=capture)
        if self._draft is not None and self.features_RF is not None:
            self.features_RF[:n] = self._draft.features(hidden_nD, capture)
        adapter = decoder.head_lora() if self._lora is None else self._lora.build_logit_adapter()
        softcap, numerics = decoder.spec.logit_softcap, decoder.numerics
        sample_fn = batch_invariant_sampling.sample_tokens if invariant else sample_tokens
        sample_fn(
            compute_logits(hidden_nD, decoder.head(), softcap, numerics=numerics, adapter=adapter),
            columns["temperature"][:n],
            columns["uniform"][:n],
            top_k_B=columns["top_k"][:n],
            top_p_B=columns["top_p"][:n],
            min_p_B=columns["min_p"][:n],
            filters=key.has_filter,
            tokens_out_B=outputs.tokens_R[:n],
            logprobs_out_B=outputs.logprobs_R[:n],
        )
        self._last_tokens_S.index_copy_(0, inputs.req_slots_n, outputs.tokens_R[:n])
        if routing is not None and outputs.experts_RLk is not None:
            outputs.experts_RLk[:n] = torch.stack(routing.recorded, 1)


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable garbage collection: freeing graphs of a deleted engine during a capture would invalidate it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _split_samples(buffer: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the tokens, and their log-probs behind them."""
    return buffer[: 2 * rows].view(torch.int64), buffer[2 * rows :].view(torch.float32)


def _as_unsigned(experts_nLk: Array) -> Array:
    return experts_nLk if experts_nLk.dtype == np.uint8 else experts_nLk.view(np.uint16)
