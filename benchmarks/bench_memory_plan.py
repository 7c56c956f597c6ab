"""Memory of a training step as estimated by ``miles plan``, against the GPU's measured peak.

Each case trains a published model, cut to a few layers where it is large, on random tokens and reads the allocator's
peak. The limit is what the plan counts: nothing is padded to look good, and both numbers are printed.

    PYTHONPATH=src python benchmarks/bench_memory_plan.py            # all cases; needs a CUDA device
    PYTHONPATH=src python benchmarks/bench_memory_plan.py --only Qwen3-0.6B
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.executor import InlineExecutor
from miles.cluster.platform import detect_platform
from miles.core.types import Batch, Sample
from miles.models.accounting.activations import activation_bytes
from miles.models.accounting.known_models import load_known_models
from miles.models.accounting.params import (
    forward_flops_per_token,
    gradient_bytes,
    optimizer_bytes,
    parameter_count,
    weight_bytes,
)
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.spec import DecoderSpec, MoeSpec
from miles.train.config import TrainConfig
from miles.train.policy_trainer import PolicyTrainer

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """A published model, its first ``layers`` layers (0: all), at most ``experts`` experts, and the micro-batch."""

    name: str
    tokens: int
    checkpointing: bool = False
    layers: int = 0
    experts: int = 0

    def spec(self) -> DecoderSpec:
        spec = spec_from_config(load_known_models()[self.name])
        layers = spec.layers[-self.layers :] if self.layers else spec.layers
        return replace(spec, layers=tuple(_fewer(layer, self.experts) for layer in layers))

    def label(self) -> str:
        cut = f", {self.layers} layers" if self.layers else ""
        cut += f", {self.experts} experts" if self.experts else ""
        return f"{self.name}{cut}, {self.tokens:,} tokens{', checkpointing' if self.checkpointing else ''}"


def _fewer(layer, experts: int):
    if not experts or not isinstance(layer.ffn, MoeSpec):
        return layer
    return replace(layer, ffn=replace(layer.ffn, num_experts=min(experts, layer.ffn.num_experts)))


CASES = (
    Case("Qwen3-0.6B", 16384),
    Case("Qwen3-0.6B", 16384, checkpointing=True),
    Case("Qwen3-0.6B", 4096),
    Case("Qwen3-1.7B", 16384),
    Case("Qwen3-4B", 8192, checkpointing=True),
    Case("Llama-3.2-1B", 16384),
    Case("Gemma-2-2B", 4096),
    Case("Qwen3-30B-A3B", 16384, layers=6),
    Case("GLM-4.5-Air", 8192, layers=4, experts=32),
    Case("DeepSeek-V3", 8192, layers=3, experts=16),
    Case("gpt-oss-20b", 4096, layers=4),
    Case("Qwen3-Next-80B-A3B", 8192, layers=4, experts=64),
)


def sample(rng: np.random.Generator, index: int, length: int, vocab: int) -> Sample:
    mask = np.arange(length) >= 1
    return Sample(
        prompt_id=index,
        trajectory=0,
        tokens=rng.integers(0, vocab, length).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, np.float32(-np.log(vocab)), np.float32(0)),
        advantages=np.where(mask, np.float32(rng.normal()), np.float32(0)),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


def measure(case: Case) -> tuple[int, int, float]:
    """Bytes said, bytes at the peak, and operations a second of the second step."""
    platform = detect_platform("cuda")
    spec = case.spec()
    torch.cuda.reset_peak_memory_stats()
    decoder = Decoder(spec, device=platform.device, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in decoder.parameters():  # any numbers will do, so they are drawn where they are needed
            parameter.normal_(0.0, 0.02)
    model = LocalModel(decoder, gradient_checkpointing=case.checkpointing)
    train = TrainConfig(max_tokens_per_gpu=case.tokens)
    worker = PolicyTrainer(
        model, algo=AlgoConfig(), train=train, steps=1, updates=4, temperature=1.0, run=InlineExecutor()
    )
    rng = np.random.default_rng(0)
    length = 1025  # a sample is read up to its last token but one
    # Two micro-batches a step: in the second all gradients are there while activations are at their widest.
    samples = tuple(sample(rng, i, length, spec.vocab_size) for i in range(2 * case.tokens // (length - 1)))
    spent = 0.0
    for step in range(2):
        platform.synchronize()
        started = time.perf_counter()
        asyncio.run(worker.step(Batch(step=step, samples=samples, num_groups=len(samples))))
        platform.synchronize()
        spent = time.perf_counter() - started
    said = weight_bytes(spec, "bfloat16") + gradient_bytes(spec, "bfloat16") + optimizer_bytes(spec, "bfloat16")
    said += activation_bytes(spec, case.tokens, size=2, fused=True, checkpointing=case.checkpointing)
    passes = 4 if case.checkpointing else 3
    rate = passes * forward_flops_per_token(spec, length / 2) * 2 * case.tokens / spent
    return said, torch.cuda.max_memory_allocated(), rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    print(f"{detect_platform('cuda').name}, torch {torch.__version__}\n")
    print("| case | parameters | planned | measured | planned / measured | step |\n|---|--:|--:|--:|--:|--:|")
    for case in CASES:
        if args.only not in case.name:
            continue
        try:
            said, found, rate = measure(case)
        except torch.OutOfMemoryError:
            print(f"| {case.label()} | does not fit |", flush=True)
        else:
            size = f"{parameter_count(case.spec()) / 1e9:.2f}B"
            held = f"{said / GIB:.1f} GiB | {found / GIB:.1f} GiB | {said / found:.2f}"
            print(f"| {case.label()} | {size} | {held} | {rate / 1e12:.0f} TFLOP/s |", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
