"""ModelRunner: execute a ForwardBatch on a device, eagerly or as a CUDA graph, and sample from its logits.

Shapes: as in ``forward_batch``; S request slots, D also hidden channels, R rows of which logits are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from miles.backends.native.engine.forward_batch import (
    ForwardBatch,
    InflightStep,
    LogprobResults,
    PromptScoring,
    SamplingBatch,
    StepOutput,
    compute_positions,
    compute_rope_positions,
)
from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.engine.request import Ints
from miles.backends.native.runner.cuda_graph import CudaGraphRunner
from miles.backends.native.runner.gpu_runner import GpuRunner, supports_gpu_kernels, supports_torch_decode_graphs
from miles.backends.native.runner.lora import LoraRunner
from miles.backends.native.runner.sampler import (
    apply_logit_edits,
    batch_invariant_logprobs,
    gather_logprobs,
    sample,
)
from miles.backends.native.runner.vision import FeatureCache, ImageEncoder
from miles.backends.native.runner.weight_update import CommitWeights, StagedWeightUpdate
from miles.cluster.cuda_vmm import create_vmm_allocator
from miles.core.errors import UsageError
from miles.core.media import ImageInput
from miles.core.routed_experts import expert_dtype, unrecorded_id
from miles.core.token_fields import INDEXER_TOPK, ROUTED_EXPERTS
from miles.core.types import Array
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.kernels.attention.paged import (
    KvShape,
    PagedAttentionBackend,
    PagedKVCache,
    RecurrentStatePool,
    StepStates,
    build_attention_metadata,
)
from miles.kernels.batch_invariant.logprob import compute_target_logprobs
from miles.kernels.batch_invariant.paged_attention import BatchInvariantPagedBackend
from miles.kernels.fused.lm_head import LogitAdapter, compute_logits
from miles.kernels.numerics import Numerics
from miles.models.accounting.image_features import MAX_ENCODED_PATCHES, feature_bytes
from miles.models.accounting.kv_cache import PerSequenceState, PerTokenCache, cache_layout, list_states
from miles.models.base import CausalLM
from miles.models.capabilities import check_batch_invariance
from miles.models.decoder import AttentionBackend, Decoder, Routing
from miles.models.draft.base import Draft, PolicyWeights
from miles.models.draft.spec import DRAFT_PREFIX
from miles.models.hf_adapter.decoder import HfDecoder
from miles.models.indexer_layout import build_indexer_layout
from miles.models.lora.factors import LoraFactors
from miles.models.spec import DecoderSpec

# The most logits of prompt tokens that are materialized at once.
_MAX_PROMPT_LOGITS = 1 << 25


class HostToDevice:
    """Copies arrays to a device through pinned memory, several arrays per copy, without waiting.

    The caller may overwrite the returned tensors on the device, but not from the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, *arrays: Array) -> list[Tensor]:
        """Return device tensors of these arrays, which share one dtype."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        flat = np.concatenate([array.ravel() for array in arrays])
        pinned = torch.empty(len(flat), dtype=torch.from_numpy(flat[:0]).dtype, pin_memory=True)
        pinned.numpy()[:] = flat
        parts = pinned.to(self._device, non_blocking=True).split([array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class EagerStep:
    """A launched eager step (an ``InflightStep``); its output is copied to the host from construction on."""

    def __init__(
        self,
        tokens_D: Tensor,
        logprobs_D: Tensor,
        *,
        finite_logits_D: Tensor | None = None,
        routed_experts_TLx: Tensor | None = None,
        indexer_topk_TLk: Tensor | None = None,
        logprob_results: tuple[Tensor, Tensor, Tensor] | None = None,
        prompt_logprobs_N: Tensor | None = None,
        prompt_logprob_results: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        self._tokens_D = _start_fetch(tokens_D)
        self._logprobs_D = _start_fetch(logprobs_D)
        self._finite_D = None if finite_logits_D is None else _start_fetch(finite_logits_D)
        self._experts_TLx = None if routed_experts_TLx is None else _start_fetch(routed_experts_TLx)
        self._indexer_TLk = None if indexer_topk_TLk is None else _start_fetch(indexer_topk_TLk)
        self._results = None if logprob_results is None else tuple(map(_start_fetch, logprob_results))
        self._prompt_logprobs_N = None if prompt_logprobs_N is None else _start_fetch(prompt_logprobs_N)
        self._prompt_results = (
            None if prompt_logprob_results is None else tuple(map(_start_fetch, prompt_logprob_results))
        )
        self._event: torch.cuda.Event | None = None
        if tokens_D.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> StepOutput:
        """Wait for the device and return its output."""
        if self._event is not None:
            self._event.synchronize()
        return StepOutput(
            tokens_D=self._tokens_D.numpy(),
            logprobs_D=self._logprobs_D.numpy(),
            finite_logits_D=None if self._finite_D is None else self._finite_D.numpy(),
            routed_experts_TLx=None if self._experts_TLx is None else self._experts_TLx.numpy(),
            indexer_topk_TLk=None if self._indexer_TLk is None else self._indexer_TLk.numpy(),
            logprob_results=_to_logprob_results(self._results),
            prompt_logprobs_N=None if self._prompt_logprobs_N is None else self._prompt_logprobs_N.numpy(),
            prompt_logprob_results=_to_logprob_results(self._prompt_results),
        )


def _start_fetch(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _to_logprob_results(parts: tuple[Tensor, ...] | None) -> LogprobResults | None:
    if parts is None:
        return None
    tokens_Rk, logprobs_Rk, logprobs_W = (part.numpy() for part in parts)
    return LogprobResults(tokens_Rk=tokens_Rk, logprobs_Rk=logprobs_Rk, logprobs_W=logprobs_W)


class ModelRunner:
    """The decoder, its paged KV cache, and its recurrent states by request slot.

    ``last_tokens_S`` is the token last sampled for each slot. The decoder is created without storage and uses tensors
    given to ``set_weights``, which calls ``on_weights_moved`` if their addresses change; ``model`` is one that was
    created so elsewhere, with the same ``numerics``. A draft head gets its weights with the decoder's; ``features_TF``
    are what it reads of the step launched last. ``images`` encodes the images of a vision-language model, whose
    features take up to ``vision_cache_bytes``. ``lora`` are the unmerged adapters of requests. Behind the recurrent
    states of the request slots are those of ``num_draft_states`` drafted tokens, and then ``num_cached_states`` of
    prefixes. Steps return the routed experts of every token, and the selections of its indexers, if asked for.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        return_routed_experts: bool,
        device: torch.device,
        dtype: torch.dtype,
        numerics: Numerics,
        model: CausalLM | None = None,
        use_cuda_graphs: bool = True,
        vision_cache_bytes: int = 0,
        draft: Draft | None = None,
        lora: LoraShape | None = None,
        num_draft_states: int = 0,
        num_cached_states: int = 0,
        return_indexer_topk: bool = False,
    ) -> None:
        if numerics.batch_invariant and (problem := check_batch_invariance(spec)) is not None:
            raise UsageError(f"--parity exact does not support this model: {problem}; remove --parity exact.")
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.numerics = numerics
        self.decoder: CausalLM = model or Decoder(spec, device="meta", dtype=dtype, numerics=numerics)
        assert self.decoder.numerics == numerics, "the engine's model has other numerics than the engine"
        self.draft = draft
        self.features_TF: Tensor | None = None
        self.no_expert = _make_unrecorded_experts(spec) if return_routed_experts else None
        self._indexers = build_indexer_layout(spec) if return_indexer_topk else None
        self.images = _build_image_encoder(self.decoder, vision_cache_bytes, dtype, device)
        self.send = HostToDevice(device)
        # One slot and one page more than requests use: padding rows of a CUDA graph write there.
        self.last_tokens_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._use_cuda_graphs = use_cuda_graphs
        self._graphs: CudaGraphRunner | None = None
        self._num_pages = num_pages
        self._page_size = page_size
        self._num_slots = num_slots
        self._num_states = num_slots + num_draft_states + num_cached_states
        self._gpu = self._build_gpu_runner()
        self.lora = None if lora is None else self._build_lora(lora)
        # CUDA graphs stay valid across sleep if the cache returns to the same virtual addresses.
        self._vmm = create_vmm_allocator(device) if self._gpu is not None and use_cuda_graphs else None
        self._owned: set[str] = set()
        self.on_weights_moved: Callable[[], None] = lambda: None
        self._cache: PagedKVCache | None = None
        self._kept_cache: PagedKVCache | None = None
        self._kept_states: RecurrentStatePool | None = None
        self._states: RecurrentStatePool | None = None
        self._param_locations = _locate_params(self.decoder)
        if draft is not None:
            self._add_draft(draft)
        self.allocate()

    def _build_gpu_runner(self) -> GpuRunner | None:
        """Return the Triton kernels; None where neither they nor CUDA graphs of torch attention serve the model."""
        has_kernels = supports_gpu_kernels(self.spec, self.decoder, self.device)
        can_capture = supports_torch_decode_graphs(self.decoder, self.device, self.numerics)
        # A captured step records no selections of indexers.
        if not has_kernels and not (can_capture and self._use_cuda_graphs and self._indexers is None):
            return None
        return GpuRunner(
            self.spec,
            num_slots=self._num_slots,
            max_pages=min(self._num_pages, -(-self.spec.max_positions // self._page_size)),
            page_size=self._page_size,
            send=self.send,
            device=self.device,
            dtype=self.dtype,
            numerics=self.numerics,
            has_attention_kernels=has_kernels,
        )

    def _add_draft(self, draft: Draft) -> None:
        """Share the decoder's embedding and head with a draft head, whose weights come with the decoder's."""
        assert isinstance(self.decoder, Decoder), "a draft head needs the hidden states of our own decoder"
        draft.share(PolicyWeights(embed=self.decoder.embedding, head=self.decoder.head))
        self._param_locations += _locate_params(draft, DRAFT_PREFIX)

    @property
    def empty_records(self) -> Mapping[str, Array]:
        """What steps record of every token, by name: the record of a token that was never computed."""
        found = {} if self.no_expert is None else {ROUTED_EXPERTS: self.no_expert}
        return found if self._indexers is None else found | {INDEXER_TOPK: self._indexers.unrecorded_row()}

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether decode-only steps run as CUDA graphs."""
        return self._graphs is not None and self._graphs.supported

    @property
    def captures_prefill(self) -> bool:
        """Whether steps with prefill run as CUDA graphs, if they are not too large."""
        return self._graphs is not None and self._graphs.captures_prefill

    def allocate(self) -> None:
        """Allocate the KV cache and recurrent states, at the same addresses as before if CUDA graphs need that."""
        if self._vmm is not None and self._kept_cache is not None:
            self._vmm.restore()
            self._cache, self._states = self._kept_cache, self._kept_states
            return
        layouts = [cache_layout(layer.mixer, self.numerics) for layer in self.spec.layers]
        self._cache = PagedKVCache(
            [_kv_shape(layout) if isinstance(layout, PerTokenCache) else None for layout in layouts],
            pages=self._num_pages + (self._gpu is not None),
            page_size=self._page_size,
            device=self.device,
            dtype=self.dtype,
            kv_dtype=self.numerics.kv_cache_dtype,
            zeros=None if self._vmm is None else self._vmm.zeros,
        )
        self._states = self._build_states()
        if self._gpu is not None and self._use_cuda_graphs:
            self._kept_cache, self._kept_states = self._cache, self._states
            self._build_graphs()

    def _build_states(self) -> RecurrentStatePool | None:
        """Allocate the recurrent states; None for a model without. The last is that of padding rows of CUDA graphs."""
        shapes = {
            key: _state_shapes(layout, self.dtype) for key, layout in list_states(self.spec, self.numerics).items()
        }
        if not shapes:
            return None
        return RecurrentStatePool(
            shapes,
            slots=self._num_states + (self._gpu is not None),
            device=self.device,
            zeros=None if self._vmm is None else self._vmm.zeros,
        )

    def _build_graphs(self) -> None:
        """Create the CUDA graphs over a new cache."""
        if isinstance(self.decoder, Decoder):
            self._graphs = self.build_graphs()

    def build_graphs(self) -> CudaGraphRunner:
        """Return the CUDA graphs over the cache, before any is captured; of a model that the GPU kernels serve."""
        assert self._gpu is not None and self._cache is not None and isinstance(self.decoder, Decoder)
        return self._gpu.build_graph_runner(
            self.decoder,
            self._cache,
            self.last_tokens_S,
            self._num_pages,
            self.no_expert,
            self.draft,
            self.lora,
            self._states,
        )

    def free(self) -> None:
        """Release the memory of the KV cache, recurrent states and features of images; their content is lost."""
        if self.images is not None:
            self.images.cache.clear()
        self._cache = self._states = None
        if self._vmm is None:
            self._graphs = self._kept_cache = self._kept_states = None
        else:
            self._vmm.release()

    def clear(self) -> None:
        """Reset the KV cache and recurrent states to zeros."""
        if self._cache is not None:
            self.free()
            self.allocate()

    @property
    def graph_counters(self) -> Mapping[str, float]:
        """The CUDA graphs captured so far, and the seconds that took."""
        if self._graphs is None:
            return {}
        return {"graphs_captured": float(self._graphs.captures), "graph_seconds": self._graphs.capture_seconds}

    @property
    def num_encoded_images(self) -> int:
        """Images that the vision tower has encoded so far."""
        return 0 if self.images is None else self.images.num_encoded

    def check_image(self, image: ImageInput) -> None:
        """Raise a ValueError if the vision tower cannot encode an image."""
        if self.images is not None:
            self.images.check(image)

    def clear_features(self) -> None:
        """Drop the features of all images, because the vision tower changes."""
        if self.images is not None:
            self.images.cache.clear()

    def get_features(self) -> Tensor:
        """Return what a draft head reads of the step launched last [T, F]."""
        assert self.features_TF is not None, "no step was launched"
        return self.features_TF

    def expected_weights(self) -> dict[str, Tensor]:
        """Return the tensors a weight update must bring, by name."""
        return dict(self.weights())

    def weights(self) -> Mapping[str, Tensor]:
        """Return the current weights by name; those of a draft head have a prefix."""
        weights = dict(self.decoder.named_parameters())
        if self.draft is not None:
            weights |= {DRAFT_PREFIX + name: parameter for name, parameter in self.draft.named_parameters()}
        return weights

    def _build_lora(self, shape: LoraShape) -> LoraRunner:
        return LoraRunner(
            self.decoder, shape, self.spec, max_rows=self._num_slots, device=self.device, dtype=self.dtype
        )

    def register_lora(self, uid: int, factors: LoraFactors) -> None:
        """Keep the factors of an adapter's version in host memory; steps name it by ``uid``."""
        assert self.lora is not None
        self.lora.register(uid, factors)

    def unregister_lora(self, uid: int) -> None:
        """Drop the host copy of an adapter's version."""
        assert self.lora is not None
        self.lora.unregister(uid)

    def build_weight_update(self, name: str, commit_weights: CommitWeights) -> StagedWeightUpdate:
        """Return the receiver of weight updates to the engine ``name``."""
        return StagedWeightUpdate(name, self.expected_weights(), self.device, commit_weights)

    def check(self) -> None:
        """Raise an error if this runner can never run another step."""

    def close(self) -> None:
        """End processes started for this runner."""

    def set_weights(self, tensors: Mapping[str, Tensor], own: Collection[str] = ()) -> None:
        """Use these tensors, without a copy, from now on; the engine owns the memory of ``own``.

        If owned tensors replace owned tensors under captured CUDA graphs, they are copied instead: the graphs stay
        valid.
        """
        current = {name: getattr(module, attribute) for module, attribute, name in self._param_locations}
        moved = {name for name, tensor in current.items() if tensors[name].data_ptr() != tensor.data_ptr()}
        if moved and self._graphs is not None and self._graphs.has_graphs and moved <= self._owned & set(own):
            with torch.no_grad():
                for name in moved:
                    current[name].copy_(tensors[name])
            return
        self._owned = moved & set(own) | self._owned - moved
        if moved and self._graphs is not None:
            self._graphs.invalidate()
        if moved:
            self.on_weights_moved()
        for module, attribute, name in self._param_locations:
            setattr(module, attribute, nn.Parameter(tensors[name].detach(), requires_grad=False))

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Capture all CUDA graphs; ``on_progress`` gets the number done and the total."""
        for done, total in () if self._graphs is None or self._cache is None else self._graphs.capture_all():
            on_progress(done, total)

    def launch(self, batch: ForwardBatch) -> InflightStep:
        """Start a step: forward, sample, score. Nothing here waits for the device."""
        assert self._cache is not None, "a sleeping engine runs no steps"
        self.copy_pages(*batch.page_copies)
        if len(batch.state_copies[0]) and self._states is not None:
            self._states.copy(*batch.state_copies)
        if batch.lora is not None and self.lora is not None:
            self.lora.load_slots(batch.lora)
        if self._graphs is not None and self._graphs.can_run(batch):
            self.features_TF = self._graphs.features_RF
            return self._graphs.launch(batch)
        return self._run_eager(batch)

    @torch.inference_mode()
    def _run_eager(self, batch: ForwardBatch) -> InflightStep:
        positions_T = compute_positions(batch)
        rows_R, logit_index_D = np.unique(batch.rows_D, return_inverse=True)
        n = batch.num_decodes
        queries, scoring = batch.logprob_queries, batch.prompt_scoring
        tokens_T, rope_positions_T, decode_slots_B, device_rows_R, device_index_D, req_slots_D = self.send(
            batch.tokens_T,
            compute_rope_positions(batch, positions_T),
            batch.req_slots_B[:n],
            rows_R,
            logit_index_D,
            batch.req_slots_D,
        )
        decode_B = tokens_T[:n]
        decode_B = torch.where(decode_B < 0, self.last_tokens_S.index_select(0, decode_slots_B), decode_B)
        tokens_T = torch.cat((decode_B, tokens_T[n:]))
        routing = None if self.no_expert is None else Routing(record=True)
        selections = None if self._indexers is None else IndexerSelections(layers=self._indexers.layers)
        vision = None
        if batch.vision is not None:
            assert self.images is not None, "a model without a vision tower gets no images"
            vision = self.images.build_inputs(batch.vision, self.send)
        attention = self._build_attention(batch, positions_T, selections)
        if self.lora is not None:
            self.lora.use_plan(None if batch.lora is None else self.lora.build_plan(batch.lora, batch.counts_B))
        capture = None if self.draft is None else self.draft.new_capture()
        if self.draft is None:
            hidden_TD = self.decoder(tokens_T, rope_positions_T, attention, routing, vision)
        else:
            assert isinstance(self.decoder, Decoder)
            hidden_TD = self.decoder(tokens_T, rope_positions_T, attention, routing, vision, capture=capture)
            self.features_TF = self.draft.features(hidden_TD, capture)
        hidden_RD = hidden_TD if len(rows_R) == len(tokens_T) else hidden_TD[device_rows_R]
        logits_DV = self._compute_logits(hidden_RD, rows_R)
        if len(rows_R) != len(batch.rows_D):
            logits_DV = logits_DV.index_select(0, device_index_D)
        finite_D: Tensor | None = None
        if batch.logit_edits is not None:
            finite_D = logits_DV.isfinite().all(-1)
            logits_DV = apply_logit_edits(logits_DV, batch.logit_edits, self.send)
        if self._gpu is not None and queries is None:
            tokens_D, logprobs_D = self._gpu.sample(logits_DV, batch.sampling)
            logprobs_DV = logits_DV
        else:
            tokens_D, logprobs_D, logprobs_DV = sample(logits_DV, batch.sampling, self.send, numerics=self.numerics)
        self.last_tokens_S.index_copy_(0, req_slots_D, tokens_D)
        prompt_logprobs_N, prompt_results = (None, None) if scoring is None else self._score_prompt(hidden_TD, scoring)
        return EagerStep(
            tokens_D,
            logprobs_D,
            finite_logits_D=finite_D,
            routed_experts_TLx=None if routing is None else self._stack_experts(routing),
            indexer_topk_TLk=None if selections is None else selections.stack_recorded(),
            logprob_results=None if queries is None else gather_logprobs(logprobs_DV, queries, self.send),
            prompt_logprobs_N=prompt_logprobs_N,
            prompt_logprob_results=prompt_results,
        )

    def copy_pages(self, sources: Ints, targets: Ints) -> None:
        """Copy whole pages of the KV cache."""
        assert self._cache is not None, "a sleeping engine has no KV cache"
        if len(sources):
            self._cache.copy(sources, targets)

    def build_attention(self, batch: ForwardBatch, positions_T: Ints) -> AttentionBackend:
        """Copy the pages that a batch copies, and return the attention over the KV cache for its rows."""
        self.copy_pages(*batch.page_copies)
        return self._build_attention(batch, positions_T)

    def sample(self, logits_DV: Tensor, sampling: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Return one token per row and its log-prob."""
        if self._gpu is not None:
            return self._gpu.sample(logits_DV, sampling)
        tokens_D, logprobs_D, _ = sample(logits_DV, sampling, self.send, numerics=self.numerics)
        return tokens_D, logprobs_D

    def _build_attention(
        self, batch: ForwardBatch, positions_T: Ints, selections: IndexerSelections | None = None
    ) -> AttentionBackend:
        assert self._cache is not None
        states: StepStates | None = None
        if self._states is not None:
            each = batch.draft_states
            drafts = None if each is None else (each.reads_B, each.writes_B, each.depths_B)
            states = self._states.select(batch.req_slots_B, batch.starts_B, batch.counts_B, drafts)
        if self._gpu is not None and self._gpu.has_attention_kernels:
            return self._gpu.build_attention(batch, positions_T, self._cache, states)
        if self.numerics.batch_invariant:
            return BatchInvariantPagedBackend(
                self._cache,
                batch.starts_B,
                batch.counts_B,
                batch.block_table_BM,
                self._page_size,
                visible_ends_T=batch.visible_ends_T,
                states=states,
                recorder=selections,
            )
        _, metadata = build_attention_metadata(
            batch.starts_B,
            batch.counts_B,
            batch.block_table_BM,
            self._page_size,
            device=self.device,
            dtype=self.dtype,
            visible_ends_T=batch.visible_ends_T,
        )
        return PagedAttentionBackend(self._cache, metadata, states, selections)

    def _compute_logits(self, hidden_RD: Tensor, rows_R: Ints) -> Tensor:
        """Return the logits of these rows of the step."""
        adapter: LogitAdapter | None = self.decoder.head_lora() if isinstance(self.decoder, Decoder) else None
        if self.lora is not None:
            adapter = self.lora.build_logit_adapter(rows_R)
        head, softcap = self.decoder.head(), self.spec.logit_softcap
        return compute_logits(hidden_RD, head, softcap, numerics=self.numerics, adapter=adapter)

    def _score_prompt(
        self, hidden_TD: Tensor, scoring: PromptScoring
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """Return log-probs of prompt tokens, and the queried ones, a limited number of rows at a time."""
        rows_N, tokens_N = self.send(scoring.rows_N, scoring.tokens_N)
        rows_per_pass = max(1, _MAX_PROMPT_LOGITS // self.spec.vocab_size)
        logprobs: list[Tensor] = []
        results: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, len(scoring.rows_N), rows_per_pass):
            end = start + rows_per_pass
            logits_RV = self._compute_logits(hidden_TD[rows_N[start:end]], scoring.rows_N[start:end]).float()
            tokens_R = tokens_N[start:end]
            if self.numerics.batch_invariant:
                logprobs_RV, lse_R = batch_invariant_logprobs(logits_RV, logits_RV.new_ones(len(logits_RV)))
                logprobs.append(compute_target_logprobs(logits_RV, tokens_R, 1.0, lse_R))
            else:
                logprobs_RV = logits_RV.log_softmax(-1)
                logprobs.append(logprobs_RV.gather(1, tokens_R[:, None]).squeeze(1))
            if scoring.logprob_queries is not None:
                results.append(gather_logprobs(logprobs_RV, scoring.logprob_queries.slice_rows(start, end), self.send))
        parts = [torch.cat(part) for part in zip(*results, strict=True)]
        return torch.cat(logprobs), (parts[0], parts[1], parts[2]) if parts else None

    def _stack_experts(self, routing: Routing) -> Tensor:
        assert self.no_expert is not None
        return torch.stack(routing.recorded, 1).to(torch.uint8 if self.no_expert.itemsize == 1 else torch.int32)


def _locate_params(model: CausalLM | nn.Module, prefix: str = "") -> list[tuple[nn.Module, str, str]]:
    """Return the module, attribute and name of every parameter."""
    return [
        (model.get_submodule(path), attribute, prefix + (f"{path}.{attribute}" if path else attribute))
        for path, attribute in (name.rpartition(".")[::2] for name, _ in model.named_parameters())
    ]


def _make_unrecorded_experts(spec: DecoderSpec) -> Array | None:
    """Return the experts [L, x] of a token that was never computed; None for a model without experts."""
    if spec.moe is None:
        return None
    expert_type = expert_dtype(spec.moe.num_experts)
    shape = (len(spec.moe_layers), spec.moe.experts_per_token)
    return np.full(shape, unrecorded_id(expert_type), expert_type)


def _build_image_encoder(
    model: CausalLM, cache_bytes: int, dtype: torch.dtype, device: torch.device
) -> ImageEncoder | None:
    vision = model.spec.vision
    if vision is None:
        return None
    assert isinstance(model, Decoder | HfDecoder) and model.vision is not None
    return ImageEncoder(
        model.vision,
        FeatureCache(cache_bytes),
        max_features=MAX_ENCODED_PATCHES // vision.merge_size**2,
        max_image_features=cache_bytes // feature_bytes(model.spec, str(dtype).removeprefix("torch.")),
        device=device,
    )


def _kv_shape(layout: PerTokenCache) -> KvShape:
    return KvShape(layout.heads, layout.key_dim, layout.value_dim, layout.index_dim, layout.rope_dim)


def _state_shapes(layout: PerSequenceState, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    wide = torch.promote_types(dtype, torch.float32)
    return [(shape, wide if is_wide else dtype) for shape, is_wide in zip(layout.shapes, layout.wide, strict=True)]
