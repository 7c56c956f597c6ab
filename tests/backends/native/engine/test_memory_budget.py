"""KV cache size, prefill chunk and prefill delay by options and free memory."""

from dataclasses import replace

import pytest
import torch
from tests.backends.native.image_requests import pair

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.memory_budget import (
    compute_kv_tokens,
    resolve_prefill_chunk,
    resolve_prefill_delay,
)
from miles.core.errors import UsageError
from miles.kernels.numerics import FAST
from miles.models.accounting.image_features import tower_activation_bytes, vision_bytes
from miles.models.accounting.known_models import find_known_config
from miles.models.accounting.params import kv_bytes_per_token
from miles.models.families.registry import spec_from_config


class Box:
    """A device with so much free memory."""

    def __init__(self, free: int = 0, kind: str = "cuda") -> None:
        self.free, self.kind = free, kind

    def free_bytes(self) -> int:
        return self.free


def held(tiny, box, **knobs):
    config = NativeConfig(**{f"engine_{name}": value for name, value in knobs.items()})
    return compute_kv_tokens(tiny.spec, config, box, torch.float32, FAST)


def test_the_cache_takes_its_part_of_the_free_memory_but_no_more_than_can_run(tiny):
    token = kv_bytes_per_token(tiny.spec, "float32", FAST)
    assert held(tiny, Box(1000 * token)) == 500
    assert held(tiny, Box(1000 * token), memory_fraction=0.85) == 850
    assert held(tiny, Box(1000 * token), memory_fraction=1.0) == 1000
    assert held(tiny, Box(10**15), max_running=3) == 3 * 256
    assert held(tiny, Box(0)) == 16
    assert held(tiny, Box(0), kv_tokens=123) == 123


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"memory_fraction": 0.0}, "--engine-memory-fraction is 0.0"),
        ({"memory_fraction": 1.2}, "--engine-memory-fraction is 1.2"),
        ({"kv_tokens": 15}, "less than one page of 16"),
        ({"prefill_chunk": 0}, "--engine-prefill-chunk must be at least 1"),
        ({"max_running": 0}, "--engine-max-running"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny, knobs, message):
    with pytest.raises(UsageError, match=message):
        held(tiny, Box(10**9), **knobs)


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        ("Qwen3-0.6B", 16_384),
        ("SmolLM2-135M", 16_384),
        ("Qwen3-1.7B", 8192),
        ("Qwen3-4B", 8192),
        ("Qwen3-30B-A3B", 8192),
    ],
)
def test_a_step_takes_more_prompt_tokens_on_an_accelerator_and_of_a_little_model(model, tokens):
    config = find_known_config(model)
    assert config is not None
    spec = spec_from_config(config)
    assert resolve_prefill_chunk(spec, NativeConfig(), Box(kind="cpu")) == 2048
    assert {resolve_prefill_chunk(spec, NativeConfig(), Box(kind=kind)) for kind in ("cuda", "rocm")} == {tokens}
    assert resolve_prefill_chunk(spec, NativeConfig(engine_prefill_chunk=77), Box(kind="cuda")) == 77


def test_prompts_wait_only_where_decode_steps_are_recorded_and_prefills_are_not():
    def resolve(config, uses_cuda_graphs, captures_prefill):
        return resolve_prefill_delay(config, uses_cuda_graphs, captures_prefill)

    assert resolve(NativeConfig(), False, False) == 0 == resolve(NativeConfig(), True, True)
    assert resolve(NativeConfig(), True, False) > 0
    for delay in (0, 5):
        config = NativeConfig(engine_prefill_delay_steps=delay)
        assert {resolve(config, True, captures) for captures in (False, True)} == {delay}
        assert resolve(config, False, False) == 0
    with pytest.raises(UsageError, match="--engine-prefill-delay-steps is -1, must be at least 0"):
        resolve(NativeConfig(engine_prefill_delay_steps=-1), False, False)


def vision_spec():
    return pair("qwen3_vl")[1].spec


def test_the_cache_leaves_room_for_features_and_the_tower():
    spec = vision_spec()
    token = kv_bytes_per_token(spec, "float32", FAST)
    images = (7 << 20) + tower_activation_bytes(spec, "float32")
    config = NativeConfig(engine_vision_cache_mib=7)
    box = Box(2 * images + 1000 * token)
    assert compute_kv_tokens(spec, config, box, torch.float32, FAST) == 500
    assert vision_bytes(replace(spec, vision=None), "float32", 7 << 20) == 0
    with pytest.raises(UsageError, match=r"--engine-vision-cache-mib 7 take 0\.\d GiB, but 50% of the free memory"):
        compute_kv_tokens(spec, config, Box(images), torch.float32, FAST)
