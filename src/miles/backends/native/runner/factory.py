"""Runner factory: a single-device model runner, or the leader of tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.engine.memory_budget import compute_kv_tokens
from miles.backends.native.runner.draft_head import HeadLayersRunner
from miles.backends.native.runner.lora import count_slot_bytes
from miles.backends.native.runner.model_runner import ModelRunner
from miles.cluster.platform import Platform
from miles.core.errors import UsageError
from miles.kernels.numerics import Numerics
from miles.models.base import CausalLM
from miles.models.draft.base import Draft
from miles.models.spec import DecoderSpec

_DRAFT_RANKS = (
    "--speculative-algorithm with a draft model or head needs an engine of one GPU; use ngram, or "
    "--rollout-num-gpus-per-engine 1."
)


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
) -> tuple[ModelRunner, int]:
    """Return the runner of the engine ``name`` and its number of pages; with several ``devices``, tensor-parallel.

    A ``draft`` gets as many pages beside them; a draft head gets its weights with the policy's.
    """
    draft_spec = None if draft is None else get_draft_spec(draft)
    page_size = config.engine_page_size

    def compute_num_pages(rank_spec: DecoderSpec, rank_platform: Platform) -> int:
        taken = 0 if lora is None else count_slot_bytes(rank_spec, lora, dtype.itemsize)
        return compute_kv_tokens(rank_spec, config, rank_platform, dtype, numerics, draft_spec, taken) // page_size

    if len(devices) > 1 and draft_spec is not None:
        raise UsageError(_DRAFT_RANKS)
    if len(devices) > 1:
        from miles.backends.native.tp.runner import RunnerSpec, launch_tp_runner

        runner_spec = RunnerSpec(
            spec=spec,
            page_size=page_size,
            num_slots=config.engine_max_running,
            return_routed_experts=config.engine_return_routed_experts,
            vision_cache_bytes=config.engine_vision_cache_mib << 20,
            dtype=dtype,
            numerics=numerics,
            lora=lora,
        )
        tp_runner = launch_tp_runner(name, runner_spec, devices, compute_num_pages=compute_num_pages)
        return tp_runner, tp_runner.num_pages
    num_pages = compute_num_pages(spec, platform)
    runner = ModelRunner(
        spec,
        num_pages=num_pages,
        page_size=page_size,
        num_slots=config.engine_max_running,
        return_routed_experts=config.engine_return_routed_experts,
        device=platform.device,
        dtype=dtype,
        numerics=numerics,
        model=model,
        use_cuda_graphs=config.engine_cuda_graph,
        vision_cache_bytes=config.engine_vision_cache_mib << 20,
        draft=draft if isinstance(draft, Draft) else None,
        lora=lora,
    )
    return runner, num_pages


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
        num_slots=config.engine_max_running,
        return_routed_experts=False,
        device=device,
        dtype=dtype,
        numerics=draft.numerics,
        use_cuda_graphs=config.engine_cuda_graph,
    )
    runner.set_weights(dict(draft.named_parameters()))
    return runner


def build_head_layers(
    draft: Draft, config: NativeConfig, *, num_pages: int, device: torch.device, dtype: torch.dtype
) -> HeadLayersRunner:
    """Return the runner of a draft head's layers, which has the pages and slots of the policy's runner."""
    return HeadLayersRunner(
        draft,
        num_pages=num_pages,
        page_size=config.engine_page_size,
        num_slots=config.engine_max_running,
        device=device,
        dtype=dtype,
        use_cuda_graphs=config.engine_cuda_graph,
    )
