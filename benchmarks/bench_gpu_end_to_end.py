"""End-to-end check on one GPU against the CPU reference: tokens, log-probs, parity, resume, learning, speed.

    python benchmarks/bench_gpu_end_to_end.py [--out FOLDER] [--skip-demo]

Prints a table last. Correctness rows compare with the CPU in float32; parity rows are what a run itself reports; speed
rows name their limit. Works from a plain checkout with ``src`` on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.local_model import LocalModel
from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.cluster.platform import Platform, detect_platform
from miles.core.protocols import SamplingParams
from miles.core.types import Batch, Sample, Version
from miles.launch.commands import demo_task
from miles.models.accounting.params import forward_flops_per_token
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from miles.sync.publish import Publication
from miles.train.config import TrainConfig
from miles.train.policy_trainer import PolicyTrainer

ATTENTION = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, rope=RopeSpec(theta=1e6), qk_norm="head")
QWEN3_0_6B = DecoderSpec(
    family="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    norm_eps=1e-6,
    layers=28 * (LayerSpec(mixer=ATTENTION, ffn=MlpSpec(size=3072)),),
    tie_embeddings=True,
    max_positions=40960,
    eos_token_ids=(151645,),
)
ROWS: list[tuple[str, str]] = []


def row(name: str, value: str) -> None:
    ROWS.append((name, value))
    print(f"{name:58s} {value}", flush=True)


def serve(decoder: Decoder, platform: Platform, **knobs: Any) -> NativeEngine:
    config = NativeConfig(**knobs)
    dtype = decoder.head().dtype
    engine = NativeEngine(
        decoder.spec, device=platform.device, dtype=dtype, config=config, run=InlineExecutor(), decode=None
    )
    weights = {name: p.detach() for name, p in decoder.named_parameters()}
    job = Publication(weights=lambda: weights, engines=[engine], transport="shared", run=InlineExecutor())
    asyncio.run(job.publish(Version()))
    return engine


def answers(
    engine: NativeEngine, prompts: list[np.ndarray], **how: float | int | bool
) -> list[tuple[list[int], np.ndarray]]:
    async def everyone() -> list[tuple[list[int], np.ndarray]]:
        jobs = (engine.generate(p, SamplingParams(**(how | {"seed": i}))) for i, p in enumerate(prompts))  # type: ignore[arg-type]
        done = await asyncio.gather(*jobs)
        return [
            (
                [int(t) for s in d.spans for t in s.tokens],
                np.concatenate([s.logprobs for s in d.spans if s.logprobs is not None]),
            )
            for d in done
        ]

    return asyncio.run(everyone())


def same_as_cpu(platform: Platform) -> None:
    """The same weights, seeds and prompts on the card and on the CPU, in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rng = np.random.default_rng(0)
    for moe in (False, True):
        spec = demo_task.spec(moe=moe)
        decoder = hf.init_random(spec, seed=0, device="cpu", dtype=torch.float32)
        prompts = [rng.integers(0, 26, int(n)).astype(np.int32) for n in rng.integers(2, 30, 64)]
        here = answers(serve(decoder, detect_platform("cpu")), prompts, max_new_tokens=24, ignore_eos=True)
        twin = Decoder(spec, device=platform.device, dtype=torch.float32)
        twin.load_state_dict({k: v.to(platform.device) for k, v in decoder.state_dict().items()})
        there = answers(serve(twin, platform), prompts, max_new_tokens=24, ignore_eos=True)
        equal = sum(a[0] == b[0] for a, b in zip(here, there, strict=True))
        gap = max(float(np.abs(a[1] - b[1]).max()) for a, b in zip(here, there, strict=True) if a[0] == b[0])
        row(
            f"{'MoE' if moe else 'dense'}: sampled replies equal to the CPU's",
            f"{equal} of 64, max |Δ log-prob| {gap:.1e}",
        )


def miles(*argv: str) -> tuple[float, str]:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "miles.launch.main", *argv], capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:])
        raise SystemExit(f"miles {argv[0]} failed")
    return time.perf_counter() - started, done.stdout


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def runs(folder: Path) -> None:
    """Short runs through the front door: what the parity light says, and whether two runs are one."""
    for moe in (False, True):
        world = folder / ("moe" if moe else "dense")
        world.mkdir()
        demo_task.write_task(world, demo_task.Task(train_words=256, heldout_words=16), seed=0)
        demo_task.write_checkpoint(world, moe=moe, seed=0)
        flags = [
            *("--hf-checkpoint", str(world), "--prompt-data", str(world / "train.jsonl"), "--label-key", "label"),
            *("--apply-chat-template", "--rm-type", "exact", "--rollout-batch-size", "32", "--lr", "1e-3"),
            *("--n-samples-per-prompt", "8", "--rollout-max-response-len", "8", "--num-rollout", "6"),
            *("--device", "cuda", "--view", "plain", *(["--use-rollout-routing-replay"] if moe else [])),
        ]
        for dtype in ("float32", "bfloat16"):
            run = folder / f"{world.name}-{dtype}"
            miles("train", *flags, "--dtype", dtype, "--save", str(run))
            seen = [m for m in metrics(run) if m["kind"] == "train"]
            mean, most = (max(m[f"parity_{k}_abs"] for m in seen) for k in ("mean", "max"))
            row(f"{world.name} {dtype}: worst parity of 6 steps", f"mean {mean:.1e}, max {most:.1e}")
        again = folder / f"{world.name}-again"
        miles("train", *flags, "--dtype", "bfloat16", "--save", str(again))
        equal = (again / "events.jsonl").read_bytes() == (
            folder / f"{world.name}-bfloat16" / "events.jsonl"
        ).read_bytes()
        row(f"{world.name} bfloat16: two runs give one event log", str(equal))
        stale = folder / f"{world.name}-stale"
        miles("train", *flags, "--max-weight-staleness", "2", "--save", str(stale))
        row(
            f"{world.name}: staleness budget 2, largest seen",
            f"{max(m['staleness'] for m in metrics(stale) if m['kind'] == 'train'):.0f}",
        )


def speed(platform: Platform) -> None:
    """Qwen3-0.6B's shape with random weights, bf16: the embedded engine and trainer as they are today."""
    decoder = hf.init_random(QWEN3_0_6B, seed=0, device=platform.device, dtype=torch.bfloat16)
    engine = serve(decoder, platform, engine_max_running=256, engine_kv_tokens=400_000)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 150000, 512).astype(np.int32) for _ in range(32)]
    asked = [p for p in prompts for _ in range(8)]
    answers(engine, asked[:64], max_new_tokens=8, ignore_eos=True)
    before = engine.stats()
    started = time.perf_counter()
    answers(engine, asked, max_new_tokens=128, ignore_eos=True)
    platform.synchronize()
    spent = time.perf_counter() - started
    prefilled = engine.stats()["prefilled_tokens"] - before["prefilled_tokens"]
    row(
        "engine, 0.6B bf16, 32 x 8 requests of 512 + 128 tokens",
        f"{256 * 128 / spent:,.0f} tok/s ({prefilled:,.0f} of {512 * 256:,} prompt tokens computed)",
    )
    asyncio.run(engine.close())
    del engine
    platform.empty_cache()
    trainer = PolicyTrainer(
        LocalModel(decoder),
        algo=AlgoConfig(),
        train=TrainConfig(),
        steps=1,
        updates=10,
        temperature=1.0,
        run=InlineExecutor(),
    )
    samples = tuple(_sample(rng, i) for i in range(64))
    times = []
    for step in range(4):
        platform.synchronize()
        started = time.perf_counter()
        asyncio.run(trainer.step(Batch(step=step, samples=samples, num_groups=8)))
        platform.synchronize()
        times.append(time.perf_counter() - started)
    tokens, best = sum(map(len, samples)), min(times[1:])
    rate = 3 * forward_flops_per_token(QWEN3_0_6B, 512.0) * tokens / best / 1e12
    row(
        "trainer, 0.6B bf16, 64 samples of 1,024 tokens, half trained",
        f"{tokens / best:,.0f} tok/s, {rate:.0f} TFLOP/s of {_matmul_rate(platform):.0f} measured in 8192^3 matmul",
    )
    row("peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def _sample(rng: np.random.Generator, index: int) -> Sample:
    n = 1024
    mask = np.arange(n) >= n // 2
    return Sample(
        prompt_id=index // 8,
        trajectory=index % 8,
        tokens=rng.integers(0, 150000, n).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, np.float32(-11.9), np.float32(0)),
        advantages=np.where(mask, np.float32(rng.normal()), np.float32(0)),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


def _matmul_rate(platform: Platform) -> float:
    a = torch.randn(8192, 8192, device=platform.device, dtype=torch.bfloat16)
    for _ in range(3):
        _ = a @ a
    platform.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        _ = a @ a
    platform.synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - started) / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="keep the runs in this folder")
    parser.add_argument("--skip-demo", action="store_true", help="leave out the demo, the longest part")
    args = parser.parse_args()
    platform = detect_platform("cuda")
    folder = args.out or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{platform.name}, torch {torch.__version__}, Python {sys.version.split()[0]}\n")
    same_as_cpu(platform)
    runs(folder)
    speed(platform)
    if not args.skip_demo:
        spent, said = miles("demo", "--device", "cuda", "--plain", "--save", str(folder / "demo"))
        ends = next(line for line in said.splitlines() if line.startswith("held-out reward"))
        row("miles demo --device cuda", f"{' '.join(ends.split()[2:5])} in {spent:.0f} s")
    print("\n" + "\n".join(f"| {name} | {value} |" for name, value in ROWS))


if __name__ == "__main__":
    main()
