"""Effect of routing replay: an engine in bfloat16, a trainer in float32, and a router between near-equal experts.

gap   log-probs of the same tokens, engine against trainer, with the trainer's own routing, with the experts of
      sampled tokens replayed, and with those of all tokens; flips are choices the trainer would not have made
run   words of three letters to reverse, RL from the same warmed-up weights with and without replay, step by step.
      One vector is added to every expert's row of the routers before: in exact arithmetic that changes nothing, since
      a router compares experts; in bfloat16 few bits are left to tell them apart, and the engine routes most tokens
      differently than the trainer would

python benchmarks/bench_routing_replay.py [gap] [run] [--steps 60] [--lr 2e-3] [--shift 12] [--folder DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from miles.backends.fsdp.local_model import LocalModel
from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.core.protocols import Completion, SamplingParams
from miles.core.routed_experts import to_signed_ids
from miles.core.token_fields import ROUTED_EXPERTS
from miles.core.types import Tokens, Version
from miles.launch.commands import demo_task
from miles.launch.main import main as miles
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.families import config_from_spec
from miles.models.spec import DecoderSpec, LayerSpec, MoeSpec
from miles.sync.publish import Publication

SHAPES = ((8, 2, 4), (32, 2, 4), (128, 2, 4), (64, 4, 4), (64, 2, 8))
"""Experts, experts a token, layers."""


def build_spec(experts: int, each: int, layers: int, size: int = 32) -> DecoderSpec:
    """The demo's model with other experts."""
    made = demo_task.spec(moe=True)
    moe = MoeSpec(num_experts=experts, experts_per_token=each, size=size, norm_topk_prob=True)
    layer = LayerSpec(mixer=made.layers[0].mixer, ffn=moe)
    return replace(made, layers=(layer,) * layers)


def build_decoder(spec: DecoderSpec, *, louder: float, seed: int = 0) -> Decoder:
    """Random weights whose experts have a say: as they are drawn, the residual stream would drown them."""
    decoder = hf.init_random(spec, seed=seed, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "moe" in name and "router" not in name:
                parameter.mul_(louder)
    return decoder


# -- the gap --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gaps:
    """Mean |Δ log-prob| of sampled tokens, and the share of replayed choices the trainer would not have made."""

    own: float
    sampled: float
    all: float
    flips: float


async def sample_completions(decoder: Decoder, prompts: list[Tokens], tokens: int) -> list[Completion]:
    """What an engine in bfloat16 writes."""
    config = NativeConfig(engine_kv_tokens=8192)
    engine = NativeEngine(
        decoder.spec, device="cpu", dtype=torch.bfloat16, config=config, run=InlineExecutor(), decode=None
    )
    weights = {name: p.detach().to(torch.bfloat16) for name, p in decoder.named_parameters()}
    await Publication(weights=lambda: weights, engines=[engine], transport="shared", run=InlineExecutor()).publish(
        Version()
    )
    drawn = [SamplingParams(max_new_tokens=tokens, seed=i, ignore_eos=True) for i in range(len(prompts))]
    found = await asyncio.gather(*(engine.generate(p, how) for p, how in zip(prompts, drawn, strict=True)))
    await engine.close()
    return found


@torch.no_grad()
def measure_gaps(decoder: Decoder, *, prompts: int = 16, tokens: int = 24) -> Gaps:
    """Engine against trainer on what the engine wrote."""
    rng = np.random.default_rng(0)
    asked = [rng.integers(0, decoder.spec.vocab_size - 2, 12).astype(np.int32) for _ in range(prompts)]
    written = asyncio.run(sample_completions(decoder, asked, tokens))
    model = LocalModel(decoder, frozen=True)
    found: dict[str, list[float]] = {"own": [], "sampled": [], "all": []}
    flips = replayed = 0
    for prompt, completion in zip(asked, written, strict=True):
        span = completion.spans[0]
        read_T = torch.from_numpy(np.concatenate((prompt, span.tokens)).astype(np.int64))
        told_TLk = to_signed_ids(
            np.concatenate((completion.prompt_extras[ROUTED_EXPERTS], span.extras[ROUTED_EXPERTS]))
        )
        late_TLk = told_TLk.copy()
        late_TLk[: len(prompt)] = -1
        replays = {"own": None, "sampled": torch.from_numpy(late_TLk), "all": torch.from_numpy(told_TLk)}
        for name, replay_TLk in replays.items():
            read = model.read(read_T, torch.arange(len(read_T)), [len(read_T)], replay_TLk)
            logits_RV = read.hidden_TD[len(prompt) - 1 : -1] @ model.head().T
            logp_R = logits_RV.log_softmax(-1).gather(1, read_T[len(prompt) :, None])[:, 0]
            found[name] += (logp_R.numpy() - span.logprobs).__abs__().tolist()
            if name == "all" and read.flips is not None and read.replayed is not None:
                flips, replayed = flips + int(read.flips), replayed + int(read.replayed)
    return Gaps(**{name: fmean(values) for name, values in found.items()}, flips=flips / replayed)


def show_gaps() -> None:
    print(
        f"{'experts':>8} {'a token':>8} {'layers':>7} {'flips':>8} {'own':>9} {'sampled':>9} {'all':>9} {'all/own':>8}"
    )
    for experts, each, layers in SHAPES:
        gaps = measure_gaps(build_decoder(build_spec(experts, each, layers), louder=4.0))
        print(
            f"{experts:>8} {each:>8} {layers:>7} {gaps.flips:>8.2%} {gaps.own:>9.5f} {gaps.sampled:>9.5f} "
            f"{gaps.all:>9.5f} {gaps.all / gaps.own:>8.2f}"
        )


# -- the run --------------------------------------------------------------------------------


TASK = demo_task.Task(shortest=3, longest=3)


def write_start_model(folder: Path, seed: int) -> Path:
    """Words, and a model whose tokens go to one expert a layer, whole: nothing but the choice can differ."""
    folder.mkdir(parents=True)
    demo_task.write_task(folder, TASK, seed)
    spec = build_spec(16, 1, 2, size=64)
    hf.export(build_decoder(spec, louder=2.0, seed=seed), folder, config=config_from_spec(spec))
    demo_task.write_tokenizer(folder)
    return folder


def common(folder: Path, seed: int) -> list[str]:
    return [
        *("--input-key", "input", "--label-key", "label", "--apply-chat-template"),
        *("--rollout-max-response-len", str(TASK.longest + 5), "--rollout-shuffle", "--view", "none"),
        *("--adam-beta2", "0.95", "--weight-decay", "0", "--seed", str(seed), "--rollout-seed", str(seed)),
        *("--num-threads", "1", "--device", "cpu", "--dtype", "float32", "--disable-save-rollouts"),
    ]


def train_quietly(*flags: str) -> None:
    """``miles train`` without its words."""
    with redirect_stdout(StringIO()):
        assert miles(["train", *flags]) == 0


def train_sft(folder: Path, seed: int, steps: int) -> Path:
    """Supervised, until most sampled answers are right."""
    start, run = write_start_model(folder / "start", seed), folder / "warm"
    train_quietly(
        *("--hf-checkpoint", str(start), "--prompt-data", str(start / "warmup.jsonl"), "--save", str(run)),
        *("--loss-type", "sft_loss", "--rollout-batch-size", "64", "--num-rollout", str(steps), "--lr", "3e-3"),
        *("--lr-warmup-iters", "20", "--calculate-per-token-loss", *common(folder, seed)),
    )
    return run / "checkpoints" / f"step-{steps:06d}"


def shift_routers(warm: Path, folder: Path, by: float) -> Path:
    """The same model with one vector added to every row of each router."""
    shutil.copytree(warm, folder)
    weights, chance = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(7)
    for name, weight_ED in weights.items():
        if name.endswith("mlp.gate.weight"):
            weights[name] = weight_ED + by * torch.randn(weight_ED.shape[1], generator=chance)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def train_rl(folder: Path, warm: Path, *, replay: bool, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Reinforcement learning from there; its metrics, step by step."""
    run = folder / ("replayed" if replay else "plain")
    start = folder / "start"
    train_quietly(
        *("--hf-checkpoint", str(warm), "--prompt-data", str(start / "train.jsonl"), "--save", str(run)),
        *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--num-rollout", str(options.steps)),
        *("--lr", str(options.lr), "--rollout-dtype", "bfloat16", "--rm-type", "exact", "--use-rollout-logprobs"),
        *("--parity-no-replay-interval", "0", "--save-interval", "100000"),
        *(["--use-rollout-routing-replay"] if replay else []),
        *common(folder, options.seed),
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "parity_mean_abs" in row]


def show_run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(options.folder or made)
        warm = shift_routers(train_sft(folder, options.seed, options.warm), folder / "shifted", options.shift)
        found = {name: train_rl(folder, warm, replay=name == "replay", options=options) for name in ("plain", "replay")}
    each = max(1, options.steps // 8)
    print(f"{'steps':>9} | " + " | ".join(f"{name:>8} {'gap':>8} {'grad':>7}" for name in found))
    for start in range(0, options.steps, each):
        cells: list[str] = []
        for rows in found.values():
            part = rows[start : start + each]
            means = [fmean(row[name] for row in part) for name in ("reward", "parity_mean_abs", "grad_norm")]
            cells.append(f"{means[0]:>8.3f} {means[1]:>8.4f} {means[2]:>7.3f}")
        print(f"{start + 1:>4}-{start + each:<4} | " + " | ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["gap", "run"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--shift", type=float, default=12.0, help="how large the vector is that routers are shifted by")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "gap" in options.parts:
        show_gaps()
    if "run" in options.parts:
        show_run(options)


if __name__ == "__main__":
    main()
