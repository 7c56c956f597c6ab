"""Memory of a training step as estimated by ``miles plan``, against the GPU's measured peak.

Each case trains a published model, cut to a few layers where it is large, on random tokens and reads the allocator's
peak: two micro-batches of a step, so that gradients are held while activations are at their widest, or one. Planned is
what ``miles plan`` counts for the training plane: weights, gradients, optimizer, adapters and activations.

    PYTHONPATH=src python benchmarks/bench_memory_plan.py            # all cases; needs a CUDA device
    PYTHONPATH=src python benchmarks/bench_memory_plan.py --only Qwen3-0.6B long [--profile]
    PYTHONPATH=src python benchmarks/bench_memory_plan.py --plan     # what is planned alone, on any machine

``--only`` selects the cases whose label has one of some words: ``long`` those of long sequences, ``one micro-batch``,
a model. ``--profile`` also prints what is allocated at the peak, by the line that allocated it, or by size where layers
are recomputed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.local_model import LocalModel
from miles.backends.fsdp.lora_model import LoraModel, UnmergedLoraModel
from miles.cluster.executor import InlineExecutor
from miles.cluster.parallel_dims import ParallelDims
from miles.cluster.platform import detect_platform
from miles.core.types import Batch, Sample
from miles.launch.plan.layout_memory import (
    estimate_rank_activations,
    estimate_rank_lora_memory,
    estimate_rank_memory,
    estimate_single_peak,
)
from miles.models.accounting.known_models import load_known_models
from miles.models.accounting.params import forward_flops_per_token, parameter_count
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.layers import rope
from miles.models.lora.targets import LoraSpec, select_targets
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec
from miles.train.config import TrainConfig
from miles.train.policy_trainer import PolicyTrainer

GIB = 2**30
RANK = 16
"""The rank of adapters."""
LONG = 8192
"""Tokens from which on a sample is called long."""


@dataclass(frozen=True, slots=True)
class Case:
    """A published model without its vision tower, ``layers`` of its layers (0: all), at most ``experts`` experts, and
    the micro-batch.

    The layers are those from ``start`` on, or the last ones. ``adapters`` are the targets that are trained instead of
    the weights, merged or ``unmerged``. Samples are of ``length`` tokens, and a step has ``batches`` micro-batches.
    """

    name: str
    tokens: int
    checkpointing: bool = False
    layers: int = 0
    start: int | None = None
    experts: int = 0
    adapters: str = ""
    unmerged: bool = False
    length: int = 1024
    batches: int = 2

    def spec(self) -> DecoderSpec:
        spec = spec_from_config(load_known_models()[self.name])
        start = (spec.num_layers - self.layers if self.layers else 0) if self.start is None else self.start
        stop = start + self.layers if self.layers else spec.num_layers
        layers = tuple(_move_source(_cut_experts(layer, self.experts), start) for layer in spec.layers[start:stop])
        return replace(spec, layers=layers, max_positions=max(spec.max_positions, self.length), vision=None)

    def train_config(self) -> TrainConfig:
        return TrainConfig(max_tokens_per_gpu=self.tokens, gradient_checkpointing=self.checkpointing)

    def lora(self) -> LoraSpec | None:
        if not self.adapters:
            return None
        targets = select_targets(self.spec(), self.adapters, None)
        return LoraSpec(rank=RANK, alpha=2.0 * RANK, targets=targets, unmerged=self.unmerged)

    def label(self) -> str:
        cut = f", {self.layers} layers" if self.layers else ""
        cut += "" if self.start is None else f" from {self.start}"
        cut += f", {self.experts} experts" if self.experts else ""
        form = f", {'unmerged ' * self.unmerged}adapters on {self.adapters}" if self.adapters else ""
        form = f"{', checkpointing' if self.checkpointing else ''}{form}"
        form += f", long samples of {self.length:,}" if self.length >= LONG else ""
        return f"{self.name}{cut}, {self.tokens:,} tokens{form}{', one micro-batch' if self.batches == 1 else ''}"


def _cut_experts(layer: LayerSpec, experts: int) -> LayerSpec:
    if not experts or not isinstance(layer.ffn, MoeSpec):
        return layer
    return replace(layer, ffn=replace(layer.ffn, num_experts=min(experts, layer.ffn.num_experts)))


def _move_source(layer: LayerSpec, start: int) -> LayerSpec:
    """Number the layer whose keys and values this one reads from the first layer that is kept."""
    mixer = layer.mixer
    if not isinstance(mixer, AttentionSpec) or mixer.kv_source is None:
        return layer
    return replace(layer, mixer=replace(mixer, kv_source=mixer.kv_source - start))


CASES = (
    Case("Qwen3-0.6B", 16384),
    Case("Qwen3-0.6B", 16384, checkpointing=True),
    Case("Qwen3-0.6B", 4096),
    Case("Qwen3-1.7B", 16384),
    Case("Qwen3-4B", 8192),
    Case("Qwen3-4B", 8192, checkpointing=True),
    Case("Llama-3.2-1B", 16384),
    Case("Gemma-2-2B", 4096),
    Case("Qwen3-30B-A3B", 16384, layers=6),
    Case("Qwen3-30B-A3B", 8192, layers=6, checkpointing=True),
    Case("GLM-4.5-Air", 8192, layers=4, experts=32),
    Case("DeepSeek-V3", 8192, layers=3, experts=16),
    Case("gpt-oss-20b", 4096, layers=4),
    Case("Qwen3-Next-80B-A3B", 8192, layers=4, experts=64),
    Case("Qwen3-4B", 65536, checkpointing=True, layers=6, length=65536),
    Case("Qwen3-4B", 65536, checkpointing=True, layers=6, length=65536, batches=1),
    Case("Qwen3-30B-A3B", 65536, checkpointing=True, layers=3, length=65536),
    Case("Qwen3-30B-A3B", 65536, checkpointing=True, layers=3, length=65536, batches=1),
    Case("Gemma-2-2B", 32768, checkpointing=True, layers=6, length=8192),
    Case("GLM-4.5-Air", 65536, checkpointing=True, layers=3, experts=32, length=65536),
    Case("DeepSeek-V3", 65536, checkpointing=True, layers=2, experts=16, length=16384),
    Case("gpt-oss-20b", 65536, checkpointing=True, layers=4, length=16384),
    Case("Qwen3-Next-80B-A3B", 32768, checkpointing=True, layers=4, experts=64, length=16384),
    Case("Qwen3-4B", 8192, batches=1),
    Case("Qwen3-30B-A3B", 8192, layers=6, batches=1),
    Case("Nemotron-Nano-9B-v2", 8192, layers=4, start=12),
    Case("Nemotron-Nano-9B-v2", 8192, layers=4, start=12, checkpointing=True, length=8192),
    Case("Nemotron-3-Nano-30B-A3B", 8192, layers=4, start=4, experts=32),
    Case("Nemotron-3-Nano-30B-A3B", 16384, layers=4, start=4, experts=32, checkpointing=True),
    Case("Nemotron-3-Super-120B-A12B", 4096, layers=4, start=6, experts=32),
    Case("Inkling-Small", 4096, layers=2, start=4, experts=8),
    Case("Inkling-Small", 8192, layers=2, start=4, experts=8, checkpointing=True),
    Case("MiniMax-M3", 4096, layers=1, experts=8),
    Case("MiniMax-M3", 8192, layers=1, experts=4, checkpointing=True),
    Case("Gemma-3n-E4B", 8192, layers=5, start=0),
    Case("Gemma-3n-E4B", 8192, layers=7, start=18, checkpointing=True),
    Case("DeepSeek-V4-Flash", 8192, layers=2, start=2, experts=8),
    Case("DeepSeek-V4-Flash", 8192, layers=2, start=2, experts=8, checkpointing=True, length=8192),
    Case("Gemma-4-31B", 8192, layers=2),
    Case("Gemma-4-31B", 4096, layers=2, checkpointing=True, length=2048),
    Case("Gemma-4-26B-A4B", 8192, layers=2, experts=32),
    Case("Kimi-Linear-48B-A3B-Instruct", 8192, layers=2, experts=32),
    Case("Kimi-Linear-48B-A3B-Instruct", 8192, layers=2, experts=32, checkpointing=True, length=8192),
    Case("GLM-5", 4096, layers=1, experts=8),
    Case("GLM-5.3-Flash", 4096, layers=2, experts=8),
    Case("Qwen3.8-Flash-Next", 4096, layers=2, experts=32),
    Case("LFM2-1.2B", 16384),
    Case("Qwen3-4B", 16384, adapters="attn,mlp"),
    Case("Qwen3-4B", 16384, checkpointing=True, adapters="attn,mlp"),
    Case("Qwen3-30B-A3B", 16384, layers=12, checkpointing=True, adapters="attn", unmerged=True),
    Case("Qwen3-30B-A3B", 16384, layers=12, checkpointing=True, adapters="attn,experts", unmerged=True),
)


def make_sample(rng: np.random.Generator, index: int, length: int, vocab: int) -> Sample:
    """A sample is read up to its last token but one."""
    mask = np.arange(length + 1) >= 1
    return Sample(
        prompt_id=index,
        trajectory=0,
        tokens=rng.integers(0, vocab, length + 1).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, np.float32(-np.log(vocab)), np.float32(0)),
        advantages=np.where(mask, np.float32(rng.normal()), np.float32(0)),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


def plan_bytes(case: Case) -> int:
    """What ``miles plan`` counts."""
    spec, lora, layout, train = case.spec(), case.lora(), ParallelDims(), case.train_config()
    held = estimate_rank_memory(spec, layout, "bfloat16")
    if lora is None and case.batches == 1:
        peak = estimate_single_peak(
            spec, held.gradients, "bfloat16", case.tokens, train, fused=True, longest=case.length
        )
        return held.weights + held.optimizer + peak.gradients + peak.activations
    kept = estimate_rank_activations(
        spec, layout, "bfloat16", case.tokens, train, fused=True, longest=case.length, lora=lora
    )
    if lora is None:
        return held.weights + held.gradients + held.optimizer + kept
    adapted = estimate_rank_lora_memory(spec, layout, "bfloat16", lora)
    factors = 2 * lora.num_parameters if lora.unmerged else 0  # rounded for a forward, which an engine reads
    return adapted.weights + adapted.base + adapted.adapters + adapted.gradients + adapted.optimizer + kept + factors


def build_trainer(case: Case, device: torch.device) -> PolicyTrainer:
    spec, lora = case.spec(), case.lora()
    decoder = Decoder(spec, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        for module in decoder.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_floating_point():  # any numbers will do, so they are drawn where they are needed
                    parameter.normal_(0.0, 0.02)
                else:  # tables of experts, and what hashes are computed with
                    parameter.copy_(hf._init_param(name, module, parameter.shape, torch.Generator()))
    model: Any = LocalModel(decoder, gradient_checkpointing=case.checkpointing, frozen=lora is not None)
    if lora is not None:
        kind = UnmergedLoraModel if lora.unmerged else LoraModel
        model = kind(model, lora, base=Path("random"), seed=0)
    return PolicyTrainer(
        model,
        algo=AlgoConfig(),
        train=case.train_config(),
        steps=1,
        updates=4,
        temperature=1.0,
        run=InlineExecutor(),
    )


def measure(case: Case, profile: bool) -> tuple[int, float]:
    """Bytes at the peak, and operations a second of the second step."""
    platform = detect_platform("cuda")
    spec = case.spec()
    rope._cos_sin_cache.cache_clear()  # the tables of a case before
    torch.cuda.reset_peak_memory_stats()
    worker = build_trainer(case, platform.device)
    rng = np.random.default_rng(0)
    count = case.batches * case.tokens // case.length
    samples = tuple(make_sample(rng, i, case.length, spec.vocab_size) for i in range(count))
    spent = 0.0
    for step in range(2):
        if profile and step:
            # Recomputation ends by an exception, in which recording stacks fails (torch 2.11).
            context = None if case.checkpointing else "all"
            torch.cuda.memory._record_memory_history(context=context, stacks="python", max_entries=2_000_000)
        platform.synchronize()
        started = time.perf_counter()
        asyncio.run(worker.step(Batch(step=step, samples=samples, num_groups=len(samples))))
        platform.synchronize()
        spent = time.perf_counter() - started
    if profile:
        show_peak(torch.cuda.memory._snapshot().get("device_traces", [[]])[0])
        torch.cuda.memory._record_memory_history(enabled=None)
    passes = 4 if case.checkpointing else 3
    rate = passes * forward_flops_per_token(spec, case.length / 2) * case.batches * case.tokens / spent
    return torch.cuda.max_memory_allocated(), rate


def show_peak(trace: list[dict[str, Any]]) -> None:
    """Print what the step had allocated at its peak, by the line of ours that allocated it."""
    sizes: dict[int, tuple[int, str]] = {}
    alive = peak = peak_at = 0
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            alive += event["size"]
        elif event["action"] == "free_completed":
            alive -= event["size"]
        if alive > peak:
            peak, peak_at = alive, index
    for event in trace[: peak_at + 1]:
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"], name_site(event)
        elif event["action"] == "free_completed":
            sizes.pop(event["addr"], None)
    total: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for size, site in sizes.values():
        total[site] += size
        number[site] += 1
    print(f"  the step's own at the peak: {peak / GIB:.2f} GiB over what it began with, by line:")
    for site, size in total.most_common(14):
        print(f"    {size / GIB:6.2f} GiB  {number[site]:5d} x  {site}")


def name_site(event: dict[str, Any]) -> str:
    """The innermost two lines of this project, or the innermost line of all; its size where no lines were recorded."""
    frames = event.get("frames", [])
    if not frames:
        return f"of {event['size'] / 2**20:,.1f} MiB"
    own = [f for f in frames if "/miles/" in f["filename"]] or frames[:1]
    return " < ".join(f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in own[:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose label contains one of these")
    parser.add_argument("--profile", action="store_true", help="print what is allocated at the peak")
    parser.add_argument("--plan", action="store_true", help="print what is planned, and measure nothing")
    args = parser.parse_args()
    cases = [case for case in CASES if any(word in case.label() for word in args.only)]
    if args.plan:
        print("\n".join(f"{plan_bytes(case) / GIB:8.2f} GiB  {case.label()}" for case in cases))
        return
    print(f"{detect_platform('cuda').name}, torch {torch.__version__}\n")
    print("| case | parameters | planned | measured | planned / measured | step |\n|---|--:|--:|--:|--:|--:|")
    ratios: list[float] = []
    for case in cases:
        planned = plan_bytes(case)
        try:
            found, rate = measure(case, args.profile)
        except torch.OutOfMemoryError:
            print(f"| {case.label()} | does not fit |", flush=True)
        else:
            size = f"{parameter_count(case.spec()) / 1e9:.2f}B"
            held = f"{planned / GIB:.1f} GiB | {found / GIB:.1f} GiB | {planned / found:.3f}"
            print(f"| {case.label()} | {size} | {held} | {rate / 1e12:.0f} TFLOP/s |", flush=True)
            ratios.append(planned / found)
        gc.collect()
        torch.cuda.empty_cache()
    if ratios:
        print(f"\nplanned / measured of {len(ratios)} cases: {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
