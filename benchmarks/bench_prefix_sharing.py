"""Training steps with prefix sharing (each prompt computed once per group) against computing it with every sample.

Both make the same update of the same weights (float32, Adam, clipping) on the same groups; the two alternate in one
process, so that a busy machine slows both. The limit is the reduction in tokens: what is left is attention, which reads
as many keys as before, the LM head, and the optimizer.

    python benchmarks/bench_prefix_sharing.py [--threads 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.executor import InlineExecutor
from miles.core.types import Batch, Sample
from miles.models.checkpoint import hf
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from miles.train.config import TrainConfig
from miles.train.policy_trainer import PolicyTrainer


@dataclass(frozen=True)
class Case:
    name: str
    groups: int
    attempts: int
    prompt: int
    reply: int


CASES = (
    Case("short prompts", 4, 8, 32, 96),
    Case("prompts as long as replies", 2, 8, 128, 128),
    Case("long prompts", 1, 8, 448, 64),
)
VOCAB = 4096


def build_spec() -> DecoderSpec:
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, rope=RopeSpec(theta=1e4), qk_norm="head")
    layer = LayerSpec(mixer=attention, ffn=MlpSpec(size=672))
    return DecoderSpec(
        family="qwen3",
        eos_token_ids=(0,),
        vocab_size=VOCAB,
        hidden_size=256,
        layers=(layer,) * 4,
        norm_eps=1e-6,
        max_positions=1024,
        tie_embeddings=True,
    )


def build_samples(case: Case) -> tuple[Sample, ...]:
    """Replies of 3/4 to 5/4 of their mean length."""
    rng = np.random.default_rng(0)
    out: list[Sample] = []
    for group in range(case.groups):
        prompt = rng.integers(0, VOCAB, case.prompt)
        for attempt in range(case.attempts):
            reply = rng.integers(0, VOCAB, int(rng.integers(case.reply * 3 // 4, case.reply * 5 // 4 + 1)))
            mask = np.arange(len(prompt) + len(reply)) >= len(prompt)
            out.append(
                Sample(
                    prompt_id=group,
                    trajectory=attempt,
                    tokens=np.concatenate([prompt, reply]).astype(np.int32),
                    mask=mask,
                    logprobs=np.where(mask, np.float32(-8), np.float32(0)),
                    advantages=np.where(mask, np.float32(rng.normal()), np.float32(0)),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                )
            )
    return tuple(out)


def build_step(case: Case, samples: tuple[Sample, ...], *, share: bool) -> Callable[[], dict[str, float]]:
    worker = PolicyTrainer(
        LocalModel(hf.init_random(build_spec(), seed=0, device="cpu", dtype=torch.float32)),
        algo=AlgoConfig(),
        train=TrainConfig(lr=1e-4, share_prefix=share),
        steps=1,
        updates=1000,
        temperature=1.0,
        run=InlineExecutor(),
    )
    batch = Batch(step=0, samples=samples, num_groups=case.groups)
    return lambda: dict(asyncio.run(worker.step(batch)).metrics)


def time_call(work: Callable[[], dict[str, float]]) -> tuple[float, dict[str, float]]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def measure(case: Case, rounds: int) -> None:
    samples = build_samples(case)
    plain, shared = (build_step(case, samples, share=share) for share in (False, True))
    times: tuple[list[float], list[float]] = [], []
    metrics: dict[str, float] = {}
    for number in range(rounds + 1):
        took_plain, wanted = time_call(plain)
        took_shared, metrics = time_call(shared)
        assert abs(metrics["entropy"] - wanted["entropy"]) < 1e-3, "the two steps disagree"
        if number:  # the first round warms up
            times[0].append(took_plain)
            times[1].append(took_shared)
    base, best = (float(np.median(each)) for each in times)
    read, saved = metrics["train_tokens"], metrics["tokens_shared"]
    print(
        f"{case.name:28s} {read:6.0f} tokens, {saved / read:.0%} of them shared  each for itself {base * 1e3:6.0f} ms  "
        f"shared {best * 1e3:6.0f} ms  ratio {base / best:.2f}  (tokens alone {read / (read - saved):.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=2, help="Threads torch uses.")
    parser.add_argument("--rounds", type=int, default=5, help="Steps of each, after one to warm up.")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for case in CASES:
        measure(case, args.rounds)


if __name__ == "__main__":
    main()
