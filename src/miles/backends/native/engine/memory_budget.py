"""Resolved limits of the engine: KV cache size in tokens, prefill chunk size and prefill delay."""

from __future__ import annotations

import torch

from miles.backends.native.config import NativeConfig
from miles.cluster.platform import Platform
from miles.core.errors import UsageError
from miles.kernels.attention.dense_prefill import dense_prefill_unit
from miles.kernels.numerics import Numerics
from miles.models.accounting.image_features import vision_bytes
from miles.models.accounting.params import forward_flops_per_token, kv_bytes_per_token, state_bytes_per_sequence
from miles.models.spec import DecoderSpec

# Prompt tokens that keep the device busy for one step; more would only delay the decoding requests.
_CPU_CHUNK = 2048
_GPU_CHUNK = 8192
# Below this many FLOPs per token the chunk is doubled: otherwise a step ends before the next is launched.
_SMALL_MODEL_FLOPS = 2e9
# Steps that prompts wait where a step with prefill is no CUDA graph.
_EAGER_PREFILL_DELAY = 8


def resolve_prefill_chunk(spec: DecoderSpec, config: NativeConfig, platform: Platform) -> int:
    """Return the maximum prompt tokens per step: as configured, or a default for the device and model."""
    if config.engine_prefill_chunk is not None:
        return config.engine_prefill_chunk
    if platform.kind == "cpu":
        return _CPU_CHUNK
    return _GPU_CHUNK * (2 if forward_flops_per_token(spec) < _SMALL_MODEL_FLOPS else 1)


def resolve_chunk_unit(platform: Platform, numerics: Numerics) -> int:
    """Return the multiple of tokens at which chunks of long prompts end: where dense attention computes them."""
    return 1 if numerics.batch_invariant else dense_prefill_unit(platform.device)


def resolve_prefill_delay(config: NativeConfig, uses_cuda_graphs: bool, captures_prefill: bool) -> int:
    """Return the maximum steps a prefill is delayed: 0 without CUDA graphs, since then all steps cost the same.

    By default it is 0 too where steps with prefill are CUDA graphs, which cost the host as little as others.
    """
    delay = config.engine_prefill_delay_steps
    if delay is not None and delay < 0:
        raise UsageError(f"--engine-prefill-delay-steps is {delay}, must be at least 0")
    if delay is None:
        delay = 0 if captures_prefill else _EAGER_PREFILL_DELAY
    return delay if uses_cuda_graphs else 0


def count_cached_states(spec: DecoderSpec, config: NativeConfig, dtype: torch.dtype) -> int:
    """Return how many recurrent states of prefixes an engine keeps; 0 for a model without recurrent layers."""
    return config.count_cached_states(state_bytes_per_sequence(spec, str(dtype).removeprefix("torch.")))


def compute_kv_tokens(
    spec: DecoderSpec,
    config: NativeConfig,
    platform: Platform,
    dtype: torch.dtype,
    numerics: Numerics,
    draft_spec: DecoderSpec | None = None,
    lora_bytes: int = 0,
) -> int:
    """Return the KV cache size: as configured, or what all running requests need within the memory fraction.

    The keys of a draft model of ``draft_spec`` take memory beside the policy's, and so do ``lora_bytes`` of adapters.
    """
    size, fraction, chunk = config.engine_page_size, config.engine_memory_fraction, config.engine_prefill_chunk
    if min(size, config.max_running, 1 if chunk is None else chunk) < 1:
        raise UsageError("--engine-page-size, --engine-max-running and --engine-prefill-chunk must be at least 1")
    if not 0 < fraction <= 1:
        raise UsageError(f"--engine-memory-fraction is {fraction}, must be above 0 and at most 1")
    if config.engine_kv_tokens is not None:
        if config.engine_kv_tokens < size:
            raise UsageError(f"--engine-kv-tokens {config.engine_kv_tokens} is less than one page of {size} tokens")
        return config.engine_kv_tokens
    dtype_name = str(dtype).removeprefix("torch.")
    budget = int(platform.free_bytes() * fraction)
    image_bytes = vision_bytes(spec, dtype_name, config.engine_vision_cache_mib << 20)
    if image_bytes > budget:
        raise UsageError(
            f"the vision tower's activations and --engine-vision-cache-mib {config.engine_vision_cache_mib} take "
            f"{image_bytes / 2**30:.1f} GiB, but {fraction:.0%} of the free memory is {budget / 2**30:.1f} GiB; "
            "lower --engine-vision-cache-mib, or raise --engine-memory-fraction"
        )
    budget -= image_bytes
    if lora_bytes > budget:
        raise UsageError(
            f"the slots of LoRA adapters take {lora_bytes / 2**30:.1f} GiB, but {fraction:.0%} of the free memory "
            f"leaves {budget / 2**30:.1f} GiB; lower --max-loras-per-batch or --max-lora-rank"
        )
    budget -= lora_bytes
    num_states = config.max_running + config.count_draft_states(spec.recurrent)
    num_states += count_cached_states(spec, config, dtype)
    state_bytes = num_states * state_bytes_per_sequence(spec, dtype_name)
    if state_bytes > budget:
        raise UsageError(
            f"the recurrent states of --engine-max-running {config.max_running} requests, their drafts and "
            f"prefixes take {state_bytes / 2**30:.1f} GiB, but {fraction:.0%} of the free memory is "
            f"{budget / 2**30:.1f} GiB; lower --engine-max-running or --engine-state-cache-mib"
        )
    each = kv_bytes_per_token(spec, dtype_name, numerics)
    if draft_spec is not None:
        each += kv_bytes_per_token(draft_spec, dtype_name, numerics)
    tokens = (budget - state_bytes) // max(1, each)
    return max(size, min(tokens, config.max_running * (-(-spec.max_positions // size) * size)))
