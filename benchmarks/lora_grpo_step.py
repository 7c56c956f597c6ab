"""A whole GRPO step with unmerged LoRA adapters, colocated on one GPU: rollout, training, publication.

Part ``grpo`` of bench_lora_gpu.py. The engine reads the trainer's own base tensors and is sent adapters alone. Weights
are random in the model's published shape; rewards are random too, so that every sample has an advantage.

``attn`` and ``experts`` are the targets of the adapters: attention only, and attention with all routed experts.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.local_model import LocalModel
from miles.backends.fsdp.lora_model import UnmergedLoraModel
from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.cluster.platform import Platform, detect_platform
from miles.config.cli import parse
from miles.core.protocols import SamplingParams
from miles.core.types import Batch, Sample, Version
from miles.launch.config import Config
from miles.launch.plan.memory import estimate_memory
from miles.launch.plan.plan import build_plan
from miles.launch.runtime.gc_tuning import reduce_gc
from miles.models.accounting.known_models import find_known_config
from miles.models.accounting.params import forward_flops_per_token
from miles.models.activation_checkpointing import set_recompute
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.lora.layout import adapter_spec, build_factor_map
from miles.models.lora.targets import LoraSpec, select_targets
from miles.models.spec import DecoderSpec
from miles.schedule.device_lease import ColocatedLease
from miles.sync.publish import Publication
from miles.train.config import TrainConfig
from miles.train.policy_trainer import PolicyTrainer

TARGETS = {"attn": "attn", "experts": "attn,experts"}
GIB = 2**30
# What is in memory while either plane holds the device, by the names of `miles plan`.
_TRAINING = ("weights", "adapters", "gradients", "optimizer", "activations", "engine")
_ROLLOUT = ("weights", "adapters", "optimizer", "engine", "kv cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its adapters, and the sizes of a step."""

    config: dict[str, Any]
    targets: str
    rank: int
    prompts: int
    samples: int
    prompt_len: int
    response_len: int
    max_tokens: int
    device: str
    dtype: torch.dtype
    shared_outer: bool = False

    @property
    def spec(self) -> DecoderSpec:
        return spec_from_config(self.config)

    @property
    def kv_tokens(self) -> int:
        """Keys and values of every response, and of every prompt once, in pages."""
        page = NativeConfig().engine_page_size
        each = -(-self.response_len // page) * page + page
        return self.prompts * (self.prompt_len + page + self.samples * each)

    def build_lora(self) -> LoraSpec:
        targets = select_targets(self.spec, TARGETS[self.targets], None)
        shared = self.shared_outer and self.targets == "experts"
        return LoraSpec(rank=self.rank, alpha=2.0 * self.rank, targets=targets, shared_outer=shared, unmerged=True)


def build_case(model: str, targets: str, *, tiny: bool, rank: int = 16, shared_outer: bool = False) -> Case:
    """The case of a published model on the GPU; if ``tiny``, one of its kind that a CPU can run."""
    config = dict(find_known_config(model) or {})
    assert config, f"{model} is not among the published shapes"
    sizes = {"prompts": 32, "samples": 8, "prompt_len": 1024, "response_len": 1024, "max_tokens": 16384}
    if tiny:
        config |= {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 256, "head_dim": 16, "num_experts": 8}
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32}
        sizes = {"prompts": 2, "samples": 4, "prompt_len": 24, "response_len": 16, "max_tokens": 128}
    return Case(
        config=config,
        targets=targets,
        rank=4 if tiny else rank,
        device="cpu" if tiny else "cuda",
        dtype=torch.float32 if tiny else torch.bfloat16,
        shared_outer=shared_outer,
        **sizes,
    )


def estimate_phases(case: Case) -> dict[str, float]:
    """GiB that `miles plan` counts for training and for rollout."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.config))
        flags = {
            "--hf-checkpoint": folder,
            "--device": case.device,
            "--dtype": str(case.dtype).removeprefix("torch."),
            "--lora-rank": case.rank,
            "--target-modules": TARGETS[case.targets],
            "--rollout-batch-size": case.prompts,
            "--n-samples-per-prompt": case.samples,
            "--rollout-max-prompt-len": case.prompt_len,
            "--rollout-max-response-len": case.response_len,
            "--max-tokens-per-gpu": case.max_tokens,
            "--engine-kv-tokens": case.kv_tokens,
            "--num-rollout": 1,
        }
        words = [str(word) for pair in flags.items() for word in pair]
        words += ["--no-lora-merge", "--gradient-checkpointing"]
        words += ["--experts-shared-outer-loras"] if case.build_lora().shared_outer else []
        found = parse(Config, words, ())
        assert found.config is not None, found.problems
        shares = {s.name: s.bytes for s in estimate_memory(found.config, build_plan(found.config), case.spec)}
    print("plan", {name: round(size / GIB, 2) for name, size in shares.items()}, flush=True)
    return {
        "plan_train_gib": sum(shares.get(name, 0) for name in _TRAINING) / GIB,
        "plan_rollout_gib": sum(shares.get(name, 0) for name in _ROLLOUT) / GIB,
    }


class GrpoStep:
    """A trainer and an engine over one base, and the steps of one run."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._platform: Platform = detect_platform(case.device)
        self._rng = np.random.default_rng(0)
        device, lora = self._platform.device, case.build_lora()
        decoder = Decoder(case.spec, device=device, dtype=case.dtype)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.normal_(0.0, 0.02)
        set_recompute(decoder, "full", None)
        base = LocalModel(decoder, gradient_checkpointing=True, frozen=True)
        actor = UnmergedLoraModel(base, lora, base=Path("random"), seed=0)
        self.trainer = PolicyTrainer(
            actor,
            algo=AlgoConfig(),
            train=TrainConfig(max_tokens_per_gpu=case.max_tokens, lr=1e-5),
            steps=1,
            updates=100,
            temperature=1.0,
            run=InlineExecutor(),
            offload=False,
        )
        spec = replace(case.spec, adapters=adapter_spec(lora))
        self.engine = NativeEngine(
            spec,
            device=device,
            dtype=case.dtype,
            config=NativeConfig(engine_max_running=case.prompts * case.samples, engine_kv_tokens=case.kv_tokens),
            run=InlineExecutor(),
            decode=None,
        )
        self.sync = Publication(
            weights=self.trainer.weights,
            engines=[self.engine],
            transport="made",
            run=InlineExecutor(),
            trained=frozenset(build_factor_map(spec)),
        )
        self._lease = ColocatedLease(engine=self.engine, trainer=self.trainer)
        own = {name: tensor.data_ptr() for name, tensor in actor.engine_weights().items()}
        self._base_pointers = {name: own[name] for name in dict(base.parameters())}

    def check_sharing(self) -> bool:
        """Whether the engine computes with the trainer's own tensors."""
        held = self.engine.weights()
        return all(held[name].data_ptr() == pointer for name, pointer in self._base_pointers.items())

    async def run(self, number: int) -> dict[str, float]:
        """Run one step: sample, train, publish; the engine has the current version before and after."""
        timed: dict[str, float] = {}
        self._reset_peak()
        samples = await self._measure(timed, "rollout_s", lambda: self._rollout(number))
        timed["rollout_peak_gib"] = self._read_peak()
        await self._measure(timed, "switch_s", self._lease.to_train)
        self._reset_peak()
        batch = Batch(step=number, samples=samples, num_groups=self._case.prompts)
        report = await self._measure(timed, "train_s", lambda: self.trainer.step(batch))
        timed["train_peak_gib"] = self._read_peak()
        spent: dict[str, float] = {}
        await self._measure(spent, "switch_s", self._lease.to_rollout)
        timed["switch_s"] += spent["switch_s"]
        await self._measure(timed, "publish_s", lambda: self.sync.publish(Version("actor", number + 1)))
        timed |= {key: value for key, value in report.metrics.items() if key in ("parity_mean_abs", "grad_norm")}
        return timed

    async def _rollout(self, number: int) -> tuple[Sample, ...]:
        case = self._case
        vocab = case.spec.vocab_size
        prompts = self._rng.integers(0, vocab, (case.prompts, case.prompt_len)).astype(np.int32)
        sampling = SamplingParams(max_new_tokens=case.response_len, ignore_eos=True)

        async def sample_one(index: int) -> Sample:
            prompt = prompts[index // case.samples]
            seed = number * case.prompts * case.samples + index
            answer = await self.engine.generate(prompt, replace(sampling, seed=seed))
            return self._build_sample(index, prompt, answer.spans)

        return tuple(await asyncio.gather(*(sample_one(i) for i in range(case.prompts * case.samples))))

    def _build_sample(self, index: int, prompt: Any, spans: Sequence[Any]) -> Sample:
        tokens = np.concatenate([prompt, *(span.tokens for span in spans)]).astype(np.int32)
        logprobs = np.concatenate([np.zeros(len(prompt), np.float32), *(span.logprobs for span in spans)])
        versions = np.concatenate(
            [np.full(len(prompt), -1), *(np.full(len(span.tokens), span.version.number) for span in spans)]
        )
        mask = np.arange(len(tokens)) >= len(prompt)
        return Sample(
            prompt_id=index // self._case.samples,
            trajectory=index % self._case.samples,
            tokens=tokens,
            mask=mask,
            logprobs=logprobs.astype(np.float32),
            advantages=np.where(mask, np.float32(self._rng.normal()), np.float32(0)),
            versions=versions.astype(np.int32),
        )

    async def _measure(self, timed: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
        self._platform.synchronize()
        started = time.perf_counter()
        found = await work()
        self._platform.synchronize()
        timed[name] = time.perf_counter() - started
        return found

    def _reset_peak(self) -> None:
        if self._case.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _read_peak(self) -> float:
        """GiB of the device in use at the peak, with what torch's allocator does not count: CUDA, and the KV cache."""
        if self._case.device != "cuda":
            return 0.0
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        return (outside + torch.cuda.max_memory_allocated()) / GIB


def measure_grpo(case: Case, steps: int = 3) -> dict[str, Any]:
    """Run some steps; return the seconds, rates and peaks of the last one."""

    async def run() -> dict[str, Any]:
        started = time.perf_counter()
        step = GrpoStep(case)
        await step.sync.publish(Version("actor", 0))
        await step.engine.warm_up()
        ready = time.perf_counter() - started
        assert step.check_sharing(), "the engine has copies of base tensors"
        found: dict[str, Any] = {}
        for number in range(steps):
            found = await step.run(number)
            print("step", json.dumps({key: round(value, 4) for key, value in found.items()}), flush=True)
        assert step.check_sharing(), "the engine has copies of base tensors"
        await step.engine.close()
        return {"ready_s": ready, **found}

    with reduce_gc():
        found = asyncio.run(run())
    count = case.prompts * case.samples
    found["step_s"] = sum(found[key] for key in ("rollout_s", "switch_s", "train_s", "publish_s"))
    found["rollout_tokens_s"] = count * case.response_len / found["rollout_s"]
    tokens = count * (case.prompt_len + case.response_len)
    found["train_tokens_s"] = tokens / found["train_s"]
    # Forward, its recomputation, and the gradient of activations; weights have none.
    context = (case.prompt_len + case.response_len) / 2
    found["train_tflop_s"] = 3 * forward_flops_per_token(case.spec, context) * tokens / found["train_s"] / 1e12
    return {"targets": case.targets, "rank": case.rank, **found, **estimate_phases(case)}


def show_grpo(found: dict[str, Any]) -> None:
    """Print a result in words."""
    print(
        f"  {found['targets']:8s} step {found['step_s']:.1f} s: rollout {found['rollout_s']:.1f} s "
        f"({found['rollout_tokens_s']:,.0f} tok/s), train {found['train_s']:.1f} s ({found['train_tokens_s']:,.0f} "
        f"tok/s, {found['train_tflop_s']:.0f} TFLOP/s), publish {found['publish_s']:.2f} s, switches "
        f"{found['switch_s']:.2f} s; peak in training {found['train_peak_gib']:.1f} GiB (plan "
        f"{found['plan_train_gib']:.1f}), in rollout {found['rollout_peak_gib']:.1f} (plan "
        f"{found['plan_rollout_gib']:.1f})",
        flush=True,
    )
