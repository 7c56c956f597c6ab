"""How much the engine takes on: tokens in its cache, prompt tokens in a step, and when."""

from __future__ import annotations

import torch

from miles.backends.native.config import NativeConfig
from miles.cluster.platform import Platform
from miles.core.errors import UsageError
from miles.models.footprint import forward_flops_per_token, kv_bytes_per_token, state_bytes_per_sequence
from miles.models.spec import DecoderSpec

# A step of so many prompt tokens keeps an accelerator busy; more would only make the others wait.
_CHUNK = {"cpu": 2048}
_ACCELERATED_CHUNK = 8192
# Where a token takes fewer operations than this, a step of twice as many: else it is over before the next is launched.
_LITTLE = 2e9


def prefill_chunk(spec: DecoderSpec, config: NativeConfig, platform: Platform) -> int:
    """Prompt tokens in one step at most: as asked, or what suits the device and the model."""
    if config.engine_prefill_chunk is not None:
        return config.engine_prefill_chunk
    if platform.kind in _CHUNK:
        return _CHUNK[platform.kind]
    return _ACCELERATED_CHUNK * (2 if forward_flops_per_token(spec) < _LITTLE else 1)


def prefill_patience(config: NativeConfig, records: bool) -> int:
    """Steps that prompts wait for one another at most: none where all steps are alike, since none is recorded."""
    if config.engine_prefill_patience < 0:
        raise UsageError(f"--engine-prefill-patience is {config.engine_prefill_patience}, must be at least 0")
    return config.engine_prefill_patience if records else 0


def kv_tokens(spec: DecoderSpec, config: NativeConfig, platform: Platform, dtype: torch.dtype) -> int:
    """Tokens the cache holds: as asked, or all that can run at once within the given part of the free memory."""
    size, fraction, chunk = config.engine_page_size, config.engine_memory_fraction, config.engine_prefill_chunk
    if min(size, config.engine_max_running, 1 if chunk is None else chunk) < 1:
        raise UsageError("--engine-page-size, --engine-max-running and --engine-prefill-chunk must be at least 1")
    if not 0 < fraction <= 1:
        raise UsageError(f"--engine-memory-fraction is {fraction}, must be above 0 and at most 1")
    if config.engine_kv_tokens is not None:
        if config.engine_kv_tokens < size:
            raise UsageError(f"--engine-kv-tokens {config.engine_kv_tokens} is less than one page of {size} tokens")
        return config.engine_kv_tokens
    kind = str(dtype).removeprefix("torch.")
    room = int(platform.free_bytes() * fraction)
    states = config.engine_max_running * state_bytes_per_sequence(spec, kind)
    if states > room:
        raise UsageError(
            f"the states of --engine-max-running {config.engine_max_running} requests take {states / 2**30:.1f} GiB, "
            f"{fraction:.0%} of the free memory is {room / 2**30:.1f} GiB; lower --engine-max-running"
        )
    fits = (room - states) // max(1, kv_bytes_per_token(spec, kind))
    return max(size, min(fits, config.engine_max_running * (-(-spec.max_positions // size) * size)))
