"""Runner factory: a single-device model runner, or the leader of tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.head_draft import DraftHead
from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.engine.memory_budget import compute_kv_tokens, count_cached_states
from miles.backends.native.runner.draft_head import DraftHeadRunner, HeadLayersRunner
from miles.backends.native.runner.lora import count_slot_bytes
from miles.backends.native.runner.model_runner import ModelRunner
from miles.cluster.platform import Platform
from miles.core.errors import UsageError
from miles.kernels.numerics import Numerics
from miles.models.base import CausalLM
from miles.models.draft.base import Draft
from miles.models.indexer_layout import build_indexer_layout
from miles.models.spec import DecoderSpec

_DRAFT_RANKS = (
    "--speculative-algorithm draft-model needs an engine of one GPU; use ngram, mtp or eagle3, or "
    "--rollout-num-gpus-per-engine 1."
)


class EngineRunner(NamedTuple):
    """The runner of an engine, its number of pages, and its draft head.

    ``head_layers`` is the head's own runner; None where it is part of the runner of each tensor-parallel rank.
    """

    runner: ModelRunner
    num_pages: int
    head: DraftHead | None = None
    head_layers: ModelRunner | None = None


def build_runner(
    spec: DecoderSpec,
    config: NativeConfig,
    platform: Platform,
    draft: CausalLM | Draft | None = None,
    *,
    dtype: torch.dtype,
    numerics: Numerics,
    model: CausalLM | None,
    devices: Sequence[torch.device],
    name: str,
    lora: LoraShape | None = None,
    return_indexer_topk: bool = False,
) -> EngineRunner:
    """Return the runner of the engine ``name``; with several ``devices``, tensor-parallel.

    A ``draft`` gets as many pages beside them; a draft head gets its weights with the policy's.
    """
    draft_spec = None if draft is None else get_draft_spec(draft)

    def compute_num_pages(rank_spec: DecoderSpec, rank_platform: Platform) -> int:
        taken = 0 if lora is None else count_slot_bytes(rank_spec, lora, dtype.itemsize)
        tokens = compute_kv_tokens(rank_spec, config, rank_platform, dtype, numerics, draft_spec, taken)
        return tokens // config.engine_page_size

    head = draft if isinstance(draft, Draft) else None
    if len(devices) > 1 and draft is not None and head is None:
        raise UsageError(_DRAFT_RANKS)
    if len(devices) > 1:
        return _build_tp_runner(
            spec,
            config,
            head,
            dtype=dtype,
            numerics=numerics,
            devices=devices,
            name=name,
            lora=lora,
            return_indexer_topk=return_indexer_topk,
            compute_num_pages=compute_num_pages,
        )
    runner = ModelRunner(
        spec,
        num_pages=(num_pages := compute_num_pages(spec, platform)),
        page_size=config.engine_page_size,
        num_slots=config.max_running,
        return_routed_experts=config.engine_return_routed_experts,
        device=platform.device,
        dtype=dtype,
        numerics=numerics,
        model=model,
        use_cuda_graphs=config.engine_cuda_graph,
        vision_cache_bytes=config.engine_vision_cache_mib << 20,
        draft=head,
        lora=lora,
        num_draft_states=config.count_draft_states(spec.recurrent),
        num_cached_states=count_cached_states(spec, config, dtype),
        return_indexer_topk=return_indexer_topk,
    )
    return _add_head(runner, num_pages, head, config)


def _add_head(runner: ModelRunner, num_pages: int, head: Draft | None, config: NativeConfig) -> EngineRunner:
    """Return a runner with its draft head, which reads what the runner's last step computed."""
    if head is None:
        return EngineRunner(runner, num_pages)
    layers = _build_head_layers(head, config, num_pages=num_pages, device=runner.device, dtype=runner.dtype)
    runner.on_weights_moved = layers.invalidate_graphs
    return EngineRunner(runner, num_pages, DraftHeadRunner(layers, runner.get_features), layers)


def _build_tp_runner(
    spec: DecoderSpec,
    config: NativeConfig,
    head: Draft | None,
    *,
    dtype: torch.dtype,
    numerics: Numerics,
    devices: Sequence[torch.device],
    name: str,
    lora: LoraShape | None,
    return_indexer_topk: bool,
    compute_num_pages: Callable[[DecoderSpec, Platform], int],
) -> EngineRunner:
    from miles.backends.native.tp.runner import RunnerSpec, launch_tp_runner

    indexers = build_indexer_layout(spec) if return_indexer_topk else None
    if indexers is not None and indexers.groups > 1:
        raise UsageError(
            "the blocks that each key-value head selects are not recorded by an engine of several ranks; set "
            "--rollout-num-gpus-per-engine to 1, or remove --use-rollout-indexer-replay."
        )
    offsets_v = None if head is None else head.token_offsets_v
    runner_spec = RunnerSpec(
        spec=spec,
        page_size=config.engine_page_size,
        num_slots=config.max_running,
        return_routed_experts=config.engine_return_routed_experts,
        vision_cache_bytes=config.engine_vision_cache_mib << 20,
        dtype=dtype,
        numerics=numerics,
        lora=lora,
        draft=None if head is None else head.spec,
        num_draft_states=config.count_draft_states(spec.recurrent),
        num_cached_states=count_cached_states(spec, config, dtype),
        draft_offsets_v=None if offsets_v is None else tuple(offsets_v.tolist()),
        return_indexer_topk=return_indexer_topk,
    )
    runner = launch_tp_runner(name, runner_spec, devices, compute_num_pages=compute_num_pages, draft=head)
    return EngineRunner(runner, runner.num_pages, None if head is None else runner.build_draft_head())


def get_draft_spec(draft: CausalLM | Draft) -> DecoderSpec:
    """Return the spec of the layers of a draft model, or of a head."""
    return draft.spec.decoder if isinstance(draft, Draft) else draft.spec


def build_draft_runner(
    draft: CausalLM, config: NativeConfig, *, num_pages: int, device: torch.device, dtype: torch.dtype
) -> ModelRunner:
    """Return the runner of a draft model, which has the pages and slots of the policy's runner."""
    if draft.spec.recurrent:
        raise UsageError("the draft model has recurrent layers, whose state cannot go back; use another one.")
    runner = ModelRunner(
        draft.spec,
        num_pages=num_pages,
        page_size=config.engine_page_size,
        num_slots=config.max_running,
        return_routed_experts=False,
        device=device,
        dtype=dtype,
        numerics=draft.numerics,
        use_cuda_graphs=config.engine_cuda_graph,
    )
    runner.set_weights(dict(draft.named_parameters()))
    return runner


def _build_head_layers(
    draft: Draft, config: NativeConfig, *, num_pages: int, device: torch.device, dtype: torch.dtype
) -> HeadLayersRunner:
    """Return the runner of a draft head's layers, which has the pages and slots of the policy's runner."""
    return HeadLayersRunner(
        draft,
        num_pages=num_pages,
        page_size=config.engine_page_size,
        num_slots=config.max_running,
        device=device,
        dtype=dtype,
        use_cuda_graphs=config.engine_cuda_graph,
    )
