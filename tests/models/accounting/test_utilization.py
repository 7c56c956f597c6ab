"""Utilisation is what torch counts, divided by time and peak."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles.cluster.platform import Platform
from miles.kernels.numerics import FAST
from miles.models.accounting.utilization import UtilizationMeter
from miles.models.families import spec_from_config

CONFIG = Qwen3Config(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=False,
    architectures=["Qwen3ForCausalLM"],
)
LENGTH, SAMPLES = 16, 4


def meter(**changes) -> UtilizationMeter:
    settings = {"rollout_dtype": "bfloat16", "numerics": FAST, "train_devices": 2, "rollout_devices": 2}
    return UtilizationMeter(spec=spec_from_config(CONFIG.to_dict()), **{**settings, **changes})


def test_training_counts_the_flops_of_forward_and_backward():
    model = Qwen3ForCausalLM(CONFIG)
    tokens = torch.randint(0, 256, (SAMPLES, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    metrics = {"train_tokens": float(SAMPLES * LENGTH), "samples": float(SAMPLES)}
    found = meter(peak_flops=1e9).measure(metrics, {"train": 0.5, "rollout": 1.0}, {})
    # torch counts the attention of masked tokens too, 2% here
    assert found["perf/train_tflops"] * 1e12 == pytest.approx(counter.get_total_flops() / 0.5 / 2, rel=0.04)
    assert found["perf/train_mfu"] == pytest.approx(found["perf/train_tflops"] * 1e12 / 1e9)
    assert not any(name.startswith("perf/rollout") for name in found)
    frozen = meter(backward=1.0).measure(metrics, {"train": 0.5}, {})
    assert frozen["perf/train_tflops"] == pytest.approx(found["perf/train_tflops"] * 2 / 3)
    assert set(frozen) == {"perf/train_tflops"}  # no peak, no utilisation


def test_decoding_reads_the_weights_at_each_step_and_the_cache_of_each_token():
    model = Qwen3ForCausalLM(CONFIG)
    num_bytes = 2 * sum(p.numel() for p in model.parameters())
    cache = model(torch.zeros(1, 8, dtype=torch.int64), use_cache=True).past_key_values
    per_token = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) / 8 * 2
    metrics = {"rollout_tokens": 40.0, "tokens": 80.0, "samples": 4.0}  # prompts of 10 tokens, and responses
    engine = {"steps": 10.0, "generated_tokens": 40.0, "prefilled_tokens": 10.0}
    found = meter(peak_bandwidth=1e9).measure(metrics, {"rollout": 2.0}, engine)
    moved = 10 * num_bytes + 40 * 15 * per_token
    assert found["perf/rollout_gb_per_second"] * 1e9 == pytest.approx(moved / 2.0 / 2, rel=0.01)
    assert found["perf/rollout_mbu"] == pytest.approx(found["perf/rollout_gb_per_second"])
    overlapped = meter(overlaps=True).measure(metrics, {"rollout": 2.0, "train": 6.0}, engine)
    assert overlapped["perf/rollout_tflops"] == pytest.approx(found["perf/rollout_tflops"] / 4)
    assert "perf/rollout_gb_per_second" not in meter().measure(metrics, {"rollout": 2.0}, {})


def test_the_peak_is_that_of_the_data_sheet():
    def peak(kind: str, name: str):
        return Platform(kind=kind, device=torch.device("cpu"), name=name, memory_bytes=0).peak

    h200 = peak("cuda", "NVIDIA H200")
    assert h200 is not None and (h200.flops, h200.bandwidth) == (989e12, 4.8e12)
    mi300 = peak("rocm", "AMD Instinct MI300X")
    assert mi300 is not None and mi300.flops == 1307e12
    assert peak("cpu", "CPU, 2 threads") is None and peak("cuda", "NVIDIA Nothing 1") is None
