"""Trainer tokens per second against a plain transformers training step on the same weights and samples.

Both make the same update (float32, AdamW, clipping): ours packs samples without padding and computes logits of trained
tokens only; the plain step pads a batch and leaves the rest to transformers. The two alternate in one process, so a
busy machine slows both. The limit is the time of the packed batch's matmuls alone, at the rate measured in this run.

    python benchmarks/bench_trainer.py [--threads 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.executor import InlineExecutor
from miles.core.types import Batch, Sample
from miles.models.checkpoint.param_map import build_param_map
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.train.config import TrainConfig
from miles.train.policy_trainer import PolicyTrainer

LR = 1e-4


@dataclass(frozen=True)
class Case:
    name: str
    hidden: int
    layers: int
    vocab: int
    samples: int
    shortest: int
    longest: int


CASES = (
    Case("demo, 10-13 tokens", 96, 2, 44, 256, 10, 13),
    Case("small, all 128 tokens", 256, 4, 4096, 16, 128, 128),
    Case("small, 16-256 tokens", 256, 4, 4096, 16, 16, 256),
)


def build_config(case: Case) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        intermediate_size=case.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=case.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=case.hidden // 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )


def build_samples(case: Case) -> tuple[Sample, ...]:
    rng = np.random.default_rng(0)
    out: list[Sample] = []
    for index in range(case.samples):
        n = int(rng.integers(case.shortest, case.longest + 1))
        mask = np.arange(n) >= n // 2
        zeros = np.zeros(n, np.float32)
        out.append(
            Sample(
                prompt_id=index,
                trajectory=0,
                tokens=rng.integers(0, case.vocab, n).astype(np.int32),
                mask=mask,
                logprobs=zeros,
                advantages=mask.astype(np.float32),
                versions=np.full(n, -1, np.int32),
            )
        )
    return tuple(out)


def ours(plain: Qwen3ForCausalLM, samples: tuple[Sample, ...]) -> Callable[[], float]:
    """A step of the Worker on a copy of the plain model's weights."""
    decoder = Decoder(spec_from_config(plain.config.to_dict()), device="cpu", dtype=torch.float32)
    theirs, mine = plain.state_dict(), dict(decoder.named_parameters())
    with torch.no_grad():
        for name, parts in build_param_map(decoder.spec).items():
            for piece in parts:
                piece.view(mine[name]).copy_(theirs[piece.hf_name])
    worker = PolicyTrainer(
        LocalModel(decoder),
        algo=AlgoConfig(loss_type="sft_loss"),
        train=TrainConfig(lr=LR),
        steps=1,
        updates=1000,
        temperature=1.0,
        run=InlineExecutor(),
    )
    batch = Batch(step=0, samples=samples, num_groups=len(samples))
    return lambda: asyncio.run(worker.step(batch)).metrics["loss"]


def theirs(model: Qwen3ForCausalLM, samples: tuple[Sample, ...]) -> Callable[[], float]:
    """The step a user would write by hand: pad, forward, log-softmax, masked mean, backward, clip, AdamW."""
    longest = max(len(s) for s in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    here, trained = torch.zeros_like(tokens), torch.zeros(len(samples), longest)
    for row, s in enumerate(samples):
        tokens[row, : len(s)] = torch.from_numpy(s.tokens)
        here[row, : len(s)] = 1
        trained[row, : len(s)] = torch.from_numpy(s.mask)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=LR, foreach=True)

    def step() -> float:
        logits = model(tokens, attention_mask=here, use_cache=False).logits
        logp: Tensor = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        mask = trained[:, 1:]
        loss = (-(logp * mask).sum(1) / mask.sum(1)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        return float(loss.detach())

    return step


def matmul_rate() -> float:
    """FLOP/s of a large product, the best this machine gives now."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / min(time_call(lambda: (a @ b).sum())[0] for _ in range(5))


def flops(case: Case, samples: tuple[Sample, ...], model: Qwen3ForCausalLM) -> float:
    """Matrix products of one forward and backward over what must be read (attention's own left out)."""
    body = sum(p.numel() for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n)
    read = sum(len(s) - 1 for s in samples)
    trained = sum(int(s.mask.sum()) for s in samples)
    return 6.0 * (body * read + case.vocab * case.hidden * trained)


def time_call(work: Callable[[], object]) -> tuple[float, object]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def measure(case: Case, rounds: int) -> None:
    torch.manual_seed(0)
    plain = Qwen3ForCausalLM(build_config(case))
    samples = build_samples(case)
    tokens = sum(len(s) for s in samples)
    mine, other = ours(plain, samples), theirs(plain, samples)
    times: dict[str, list[float]] = {"mine": [], "other": []}
    rates: list[float] = []
    for number in range(rounds + 1):
        took_mine, a = time_call(mine)
        took_other, b = time_call(other)
        assert abs(float(a) - float(b)) < 1e-3, f"the two steps disagree: {a} and {b}"  # type: ignore[arg-type]
        if number:  # the first round warms up
            times["mine"].append(took_mine)
            times["other"].append(took_other)
            rates.append(matmul_rate())
    best, base = float(np.median(times["mine"])), float(np.median(times["other"]))
    limit = flops(case, samples, plain) / float(np.median(rates))
    padded = len(samples) * max(len(s) for s in samples)
    print(
        f"{case.name:24s} {tokens:5d} tokens ({tokens / padded:.0%} of the padded batch)  "
        f"miles {tokens / best:8.0f} tok/s  transformers {tokens / base:8.0f} tok/s  ratio {base / best:.2f}  "
        f"step {best * 1e3:.0f} ms, matrix products alone {limit * 1e3:.0f} ms ({limit / best:.0%} of the step)"
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
