"""CUDA graphs for decode-only steps, captured per padded batch size, and for steps with prefill, per padded tokens.

A graph reads what changes from step to step at fixed device addresses (``step_inputs``). Decode-only steps are captured
before the first of them, or on first use. Steps with prefill are captured with them, or when a size comes again: the
first step of a size runs the same padded computation eagerly, and so compiles its kernels.

Shapes: R rows of the largest graph, n of one, N tokens of a step with prefill, L MoE layers, k experts per token.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.engine.forward_batch import ForwardBatch, StepOutput
from miles.backends.native.runner.lora import LoraRunner
from miles.backends.native.runner.step_inputs import PrefillInputs, PrefillShape, StepInputs
from miles.core.types import Array
from miles.kernels.attention.gpu_backend import SplitKVPlans, TritonAttentionBackend
from miles.kernels.attention.paged import PagedAttentionBackend
from miles.kernels.batch_invariant import sampling as batch_invariant_sampling
from miles.kernels.batch_invariant.paged_attention import BatchInvariantTritonBackend
from miles.kernels.fused.lm_head import compute_logits
from miles.kernels.runtime.kv_cache import PagedKVCache, RecurrentStatePool
from miles.kernels.sampling.sample import sample_tokens
from miles.models.accounting.cuda_graphs import MAX_GRAPH_CONTEXT_TOKENS
from miles.models.decoder import Decoder, DecoderLayer
from miles.models.draft.base import Draft
from miles.models.layers.moe import Routing

# How often a size of steps with prefill runs eagerly before it is captured, and the most graphs of such steps.
_EAGER_PREFILLS = 1
_MAX_PREFILL_GRAPHS = 96
# The shortest context of torch attention in a graph.
_MIN_CONTEXT = 256
# The most graphs of longer contexts: each row count may come with every context, and a graph takes memory.
_MAX_CONTEXT_GRAPHS = 128


def capture_batch_sizes(max_batch_size: int) -> list[int]:
    """Return the batch sizes to capture: close together where one more padding row costs most."""
    sizes = [1, 2, 4, 8, 12, *range(16, 64, 8), *range(64, 256, 16), *range(256, 1025, 32)]
    return [*(size for size in sizes if size < max_batch_size), max_batch_size]


def choose_context(longest: int, page_size: int, max_pages: int) -> int:
    """Return the context to pad to where torch computes attention: at most half as long again, so that graphs are few.

    >>> [choose_context(longest, 16, 1000) for longest in (1, 300, 1025, 20_000)]
    [256, 384, 1536, 16000]
    """
    context = _MIN_CONTEXT
    while context < longest:
        context = context * 3 // 2 if (context & (context - 1)) == 0 else context // 3 * 4
    return min(-(-context // page_size), max_pages) * page_size


class GraphKey(NamedTuple):
    """What a graph is captured for: rows, whether some share a prefix, have a top-k/top-p/min-p, have an adapter.

    With prefill, ``num_tokens`` more than 0 are computed, and the rows are those that decode or are sampled from; the
    kernel of shared prefixes, which costs little then, is part of each such graph. Where torch computes attention,
    ``context`` is what rows are padded to; else it is 0.
    """

    batch_size: int
    has_prefixes: bool
    has_filter: bool
    has_lora: bool = False
    num_tokens: int = 0
    context: int = 0

    @property
    def prefill_shape(self) -> PrefillShape:
        """The padded size of a step with prefill."""
        return PrefillShape(self.num_tokens, self.batch_size)


class CapturedGraph(NamedTuple):
    """A captured step, and whether its kernels read the split-KV plans: the batch-size-1 kernels do not."""

    graph: torch.cuda.CUDAGraph
    reads_plans: bool


class _HostOutput:
    """Pinned host memory of one step's output, and the event after which it is there."""

    def __init__(self, samples: Tensor, experts_NLk: Tensor | None) -> None:
        self.event = torch.cuda.Event()
        self.samples = torch.zeros_like(samples, device="cpu").pin_memory()
        self.experts_NLk = None if experts_NLk is None else torch.zeros_like(experts_NLk, device="cpu").pin_memory()


class _OutputBuffers:
    """The outputs of all graphs: one buffer on the device, and one in pinned host memory for each step in flight."""

    def __init__(self, rows: int, max_tokens: int, no_expert: Array | None, device: torch.device) -> None:
        # Tokens and log-probs share one buffer, so that one copy brings both.
        self._rows = rows
        self._samples = torch.zeros(rows * 3, dtype=torch.int32, device=device)
        self.tokens_R, self.logprobs_R = _split_samples(self._samples, rows)
        self.experts_NLk: Tensor | None = None
        if no_expert is not None:
            dtype = torch.uint8 if no_expert.dtype == np.uint8 else torch.int16
            self.experts_NLk = torch.zeros(max_tokens, *no_expert.shape, dtype=dtype, device=device)
        self._free: list[_HostOutput] = []

    def fetch(self, count: int, num_tokens: int) -> GraphReplay:
        """Start copying the first ``count`` samples, and the experts of the first tokens, to the host."""
        host = self._free.pop() if self._free else _HostOutput(self._samples, self.experts_NLk)
        host.samples.copy_(self._samples, non_blocking=True)
        if self.experts_NLk is not None and host.experts_NLk is not None:
            host.experts_NLk[:num_tokens].copy_(self.experts_NLk[:num_tokens], non_blocking=True)
        host.event.record()
        return GraphReplay(self, host, count, num_tokens)

    def take(self, host: _HostOutput, count: int, num_tokens: int) -> StepOutput:
        """Wait for the device, return a copy of what ``fetch`` began to copy, and use the buffer again."""
        host.event.synchronize()
        tokens_R, logprobs_R = (part.numpy() for part in _split_samples(host.samples, self._rows))
        experts = None if host.experts_NLk is None else _as_unsigned(host.experts_NLk[:num_tokens].numpy()).copy()
        output = StepOutput(
            tokens_D=tokens_R[:count].copy(), logprobs_D=logprobs_R[:count].copy(), routed_experts_TLx=experts
        )
        self._free.append(host)
        return output


class GraphReplay:
    """A launched graph (an ``InflightStep``)."""

    def __init__(self, outputs: _OutputBuffers, host: _HostOutput, count: int, num_tokens: int) -> None:
        self._outputs = outputs
        self._host = host
        self._count = count
        self._num_tokens = num_tokens

    def result(self) -> StepOutput:
        """Wait for the device and return its output. Call once."""
        return self._outputs.take(self._host, self._count, self._num_tokens)


def capture_graph(
    forward: Callable[[], None], inputs: StepInputs, batch_size: int, pool: Any, *, warm_up: bool
) -> CapturedGraph:
    """Capture ``forward`` over padding rows; with ``warm_up`` run it once before."""
    inputs.send_padding(batch_size)
    return _record_graph(forward, inputs.plans, pool, warm_up=warm_up)


def _record_graph(forward: Callable[[], None], plans: SplitKVPlans, pool: Any, *, warm_up: bool) -> CapturedGraph:
    if warm_up:
        # Compilers and libraries allocate on the first run, which a capture could not contain.
        forward()
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    plans.used = False
    with _gc_disabled(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        forward()
    return CapturedGraph(graph, plans.used)


class CudaGraphRunner:
    """The CUDA graphs of one engine. ``last_tokens_S``, which has one padding slot, is shared with eager steps.

    ``states`` are those of recurrent layers, the last row that of padding rows.
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
        max_prefill_tokens: int,
        no_expert: Array | None,
        warmed_up: set[GraphKey],
        draft: Draft | None = None,
        lora: LoraRunner | None = None,
        states: RecurrentStatePool | None = None,
        torch_attention: bool = False,
    ) -> None:
        self.cache = cache
        self._torch_attention = torch_attention
        self._states = states
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
        self.prefill_inputs = PrefillInputs(
            inputs, max_tokens=max_prefill_tokens, max_rows=max_batch_size, device=device
        )
        max_tokens = max(max_batch_size, self.prefill_inputs.max_tokens)
        self._outputs = _OutputBuffers(max_batch_size, max_tokens, no_expert, device)
        self._draft = draft
        self._lora = lora
        if lora is not None:
            lora.reserve_prefill_plans(self.prefill_inputs.max_tokens)
        self.features_RF: Tensor | None = None
        if draft is not None:
            dtype = decoder.embedding.weight.dtype
            self.features_RF = torch.zeros(max_batch_size, draft.spec.feature_size, dtype=dtype, device=device)
        self._graphs: dict[GraphKey, CapturedGraph] = {}
        self._eager_prefills = Counter[GraphKey]()
        self.captures, self.capture_seconds = 0, 0.0
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def has_graphs(self) -> bool:
        return bool(self._graphs)

    def can_run(self, batch: ForwardBatch) -> bool:
        """Return whether a step can run as a graph: computed by this rank alone, and decode-only or plain prefill.

        Drafted tokens of a model with recurrent layers are scanned one behind the other, as many as there are.
        """
        if not self.supported or batch.draft_states is not None:
            return False
        if batch.decode_only:
            return not self._torch_attention or self._fits_torch_attention(batch)
        return self._choose_prefill_shape(batch) is not None

    @property
    def captures_prefill(self) -> bool:
        """Whether steps with prefill run as graphs: not those of recurrent layers, torch attention or draft heads."""
        return self.supported and self._states is None and not self._torch_attention and self._draft is None

    def _fits_torch_attention(self, batch: ForwardBatch) -> bool:
        """Whether the padded contexts of all rows are few enough tokens for torch attention in a graph that there is or
        may be.
        """
        context = self._choose_context(batch)
        if self._round_batch_size(batch) * context > MAX_GRAPH_CONTEXT_TOKENS:
            return False
        if context == self._shortest_context or self._choose_key(batch) in self._graphs:
            return True
        return sum(key.context > self._shortest_context for key in self._graphs) < _MAX_CONTEXT_GRAPHS

    def _round_batch_size(self, batch: ForwardBatch) -> int:
        return self._batch_sizes[bisect_left(self._batch_sizes, len(batch.req_slots_B))]

    def _choose_context(self, batch: ForwardBatch) -> int:
        """Return the context that rows are padded to where torch computes attention, else 0."""
        if not self._torch_attention:
            return 0
        return choose_context(int(batch.starts_B.max()) + 1, self._inputs.page_size, self._inputs.max_pages)

    @property
    def _shortest_context(self) -> int:
        """What rows are padded to at least where torch computes attention, else 0."""
        return choose_context(1, self._inputs.page_size, self._inputs.max_pages) if self._torch_attention else 0

    def _choose_prefill_shape(self, batch: ForwardBatch) -> PrefillShape | None:
        """Return the padded size of a step with prefill; None if it is too large, or computes what no graph does.

        These are edited logits, log-probs other than the sampled ones, and images.
        """
        extras = (batch.logit_edits, batch.logprob_queries, batch.prompt_scoring, batch.vision)
        is_plain = all(each is None for each in extras) and self.captures_prefill
        if not is_plain or batch.rope_positions_3T is not None or batch.visible_ends_T is not None:
            return None
        return self.prefill_inputs.choose_shape(batch)

    def _choose_key(self, batch: ForwardBatch) -> GraphKey:
        has_filter, has_lora = bool(batch.sampling.has_filter_D.any()), batch.lora is not None
        if batch.decode_only:
            has_prefixes = bool(batch.shared_B.any()) and not self._torch_attention
            context = self._choose_context(batch)
            return GraphKey(self._round_batch_size(batch), has_prefixes, has_filter, has_lora, context=context)
        shape = self._choose_prefill_shape(batch)
        assert shape is not None, "the step cannot run as a graph"
        return GraphKey(shape.num_rows, True, has_filter, has_lora, shape.num_tokens)

    def launch(self, batch: ForwardBatch) -> GraphReplay:
        """Launch a step, as a graph, which is captured on first use or, with prefill, when a size comes again.

        Nothing waits for the device, unless a graph is captured.
        """
        key = self._choose_key(batch)
        captured = self._graphs.get(key)
        if captured is None and self._may_capture(key):
            captured = self._capture(key)
        self._send(batch, key, reads_plans=captured is None or captured.reads_plans)
        if captured is None:
            self._run_eager(key)
        else:
            captured.graph.replay()
        return self._outputs.fetch(len(batch.rows_D), len(batch.tokens_T))

    def _send(self, batch: ForwardBatch, key: GraphKey, *, reads_plans: bool) -> None:
        """Copy a step to where its graph reads it."""
        lora, adapters = self._lora, batch.lora
        if key.num_tokens:
            self.prefill_inputs.send(batch, key.prefill_shape)
        else:
            self._inputs.send(batch, key.batch_size, reads_plans=reads_plans)
        if lora is None or adapters is None:
            return
        if key.num_tokens:
            lora.send_prefill_plan(adapters, batch.counts_B, batch.rows_D, **key.prefill_shape._asdict())
        else:
            lora.send_static_plan(adapters, key.batch_size)

    def _may_capture(self, key: GraphKey) -> bool:
        """Return whether a step that has no graph is captured now."""
        if not key.num_tokens:
            return True
        num_graphs = sum(each.num_tokens > 0 for each in self._graphs)
        return self._eager_prefills[key] >= _EAGER_PREFILLS and num_graphs < _MAX_PREFILL_GRAPHS

    @torch.inference_mode()
    def _run_eager(self, key: GraphKey) -> None:
        """Run a padded step with prefill kernel by kernel."""
        self._forward(key)
        self._warmed_up.add(key)
        self._eager_prefills[key] += 1

    def capture_all(self) -> Iterator[tuple[int, int]]:
        """Capture every batch size and number of tokens, the largest first; yield the number done and the total."""
        keys = self.list_keys() if self.supported else []
        for done, key in enumerate(keys):
            if key not in self._graphs:
                self._capture(key)
            yield done + 1, len(keys)

    def list_keys(self) -> list[GraphKey]:
        """Return what graphs of requests without filters are captured for, the largest first.

        Where torch computes attention only those of the shortest context: others are captured when they occur.
        """
        shapes = self.prefill_inputs.common_shapes if self.captures_prefill else []
        with_lora = (False,) if self._lora is None else (False, True)
        keys = [
            GraphKey(shape.num_rows, True, False, has_lora, shape.num_tokens)
            for shape in reversed(shapes)
            for has_lora in with_lora
        ]
        keys += [
            GraphKey(size, prefixes, False, has_lora, context=self._shortest_context)
            for size in reversed(self._batch_sizes)
            for prefixes in ((False,) if self._torch_attention else (False, True))
            for has_lora in with_lora
        ]
        return keys

    @torch.inference_mode()
    def run_padding(self, key: GraphKey) -> None:
        """Compute what a graph contains once, eagerly, on padding rows."""
        if key.num_tokens:
            self.prefill_inputs.send_padding(key.prefill_shape)
        else:
            self._inputs.send_padding(key.batch_size)
        self._forward(key)

    def invalidate(self) -> None:
        """Drop all graphs, because the weights move to other addresses."""
        self._graphs.clear()
        self._eager_prefills.clear()
        # A library that keeps memory of the old pool would keep it from being reused.
        self._pool = torch.cuda.graph_pool_handle()

    # -- capture ------------------------------------------------------------------------------

    @torch.inference_mode()
    def _capture(self, key: GraphKey) -> CapturedGraph:
        def forward() -> None:
            self._forward(key)

        started, warm_up = time.perf_counter(), key not in self._warmed_up
        if self._lora is not None:
            self._lora.clear_static_plan()
        if key.num_tokens:
            self.prefill_inputs.send_padding(key.prefill_shape)
            captured = _record_graph(forward, self._inputs.plans, self._pool, warm_up=warm_up)
        else:
            captured = capture_graph(forward, self._inputs, key.batch_size, self._pool, warm_up=warm_up)
        self._warmed_up.add(key)
        self._graphs[key] = captured
        self.captures += 1
        self.capture_seconds += time.perf_counter() - started
        return captured

    def _forward(self, key: GraphKey) -> None:
        """The computation of one graph: unpack inputs, run the decoder, sample, store outputs."""
        n, last_tokens_S = key.batch_size, self._last_tokens_S
        if key.num_tokens:
            columns = self.prefill_inputs.get_columns(key.prefill_shape)
            inputs, step = self.prefill_inputs.unpack(key.prefill_shape, last_tokens_S, has_prefixes=key.has_prefixes)
        else:
            columns = self._inputs.columns
            inputs, step = self._inputs.unpack(n, last_tokens_S, has_prefixes=key.has_prefixes, states=self._states)
        routing = Routing(record=True) if self._record_experts else None
        decoder, outputs = self._decoder, self._outputs
        invariant = decoder.numerics.batch_invariant
        if key.context:
            metadata = self._inputs.build_torch_metadata(step, key.context, decoder.embedding.weight.dtype)
            attention = PagedAttentionBackend(self.cache, metadata, step.states)
        else:
            attention = (BatchInvariantTritonBackend if invariant else TritonAttentionBackend)(self.cache, step)
        capture = None if self._draft is None else self._draft.new_capture()
        if self._lora is not None and key.has_lora and key.num_tokens:
            self._lora.use_prefill_plan(key.num_tokens)
        elif self._lora is not None:
            self._lora.use_static_plan(n if key.has_lora else 0)
        hidden_TD = decoder(inputs.tokens_n, inputs.positions_n, attention, routing, capture=capture)
        if self._draft is not None and self.features_RF is not None:
            self.features_RF[:n] = self._draft.features(hidden_TD, capture)
        hidden_nD = hidden_TD.index_select(0, columns["sampled_rows"]) if key.num_tokens else hidden_TD
        adapter = decoder.head_lora()
        if self._lora is not None:
            adapter = self._lora.build_logit_adapter(num_sampled=n if key.num_tokens else 0)
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
        req_slots_n = columns["sampled_slots"].long() if key.num_tokens else inputs.req_slots_n
        last_tokens_S.index_copy_(0, req_slots_n, outputs.tokens_R[:n])
        if routing is not None and outputs.experts_NLk is not None:
            outputs.experts_NLk[: len(hidden_TD)] = torch.stack(routing.recorded, 1)


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
