"""Runner factory: a single-device model runner, or the leader of tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.memory_budget import compute_kv_tokens
from miles.backends.native.runner.model_runner import ModelRunner
from miles.cluster.platform import Platform
from miles.core.errors import UsageError
from miles.kernels.numerics import Numerics
from miles.models.base import CausalLM
from miles.models.spec import DecoderSpec


def build_runner(
    spec: DecoderSpec,
    config: NativeConfig,
    platform: Platform,
    *,
    dtype: torch.dtype,
    numerics: Numerics,
    model: CausalLM | None,
    devices: Sequence[torch.device],
    name: str,
    draft_spec: DecoderSpec | None = None,
) -> tuple[ModelRunner, int]:
    """Return the runner of the engine ``name`` and its number of pages; with several ``devices``, tensor-parallel.

    A draft model of ``draft_spec`` gets as many pages beside them.
    """
    page_size = config.engine_page_size

    def compute_num_pages(rank_spec: DecoderSpec, rank_platform: Platform) -> int:
        return compute_kv_tokens(rank_spec, config, rank_platform, dtype, numerics, draft_spec) // page_size

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
    )
    return runner, num_pages


def build_draft_runner(
    draft: CausalLM,
    config: NativeConfig,
    devices: Sequence[torch.device],
    *,
    num_pages: int,
    device: torch.device,
    dtype: torch.dtype,
) -> ModelRunner:
    """Return the runner of a draft model, which has the pages and slots of the policy's runner."""
    if len(devices) > 1:
        raise UsageError(
            "--speculative-algorithm draft-model needs an engine of one GPU; use ngram, or "
            "--rollout-num-gpus-per-engine 1."
        )
    if draft.spec.recurrent:
        raise UsageError("the model of --speculative-draft-model-path has recurrent layers, which cannot go back.")
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
