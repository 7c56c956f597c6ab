"""Async rollout modes compared: the same training steps on a small model whose responses have a long tail of lengths.

A response's length is sampled from a log-normal by its seed, and EOS is never sampled: runs differ only in who waits
for whom. Reports tokens trained per second of all steps, and the ratio to synchronous rollout. The limit: rollout and
training share this machine's cores, so overlapping them gains at most the time in which one of them leaves cores idle;
what async modes save beyond that is the wait for each batch's last responses, when engine steps are nearly empty.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from miles.core.protocols import SamplingParams
from miles.core.types import Prompt
from miles.launch.commands import demo_task
from miles.launch.main import main as miles
from miles.rollout.generate.single_turn import SingleTurn

TEMPOS: dict[str, tuple[str, ...]] = {
    "in step": (),
    "in step, half as many again, cut": ("--over-sampling-batch-size", "{more}"),
    "in step, cut and gone on with": ("--over-sampling-batch-size", "{more}", "--partial-rollout"),
    "one step off": ("--max-weight-staleness", "1"),
    "drifting by 4": ("--max-weight-staleness", "4", "--reorder-window", "{window}"),
    "drifting by 4, retracted": (
        *("--max-weight-staleness", "4", "--reorder-window", "{window}", "--pause-generation-mode", "retract"),
    ),
    "drifting by 4, aborted": (
        *("--max-weight-staleness", "4", "--reorder-window", "{window}", "--pause-generation-mode", "abort"),
    ),
}


def lengthen(median: int, sigma: float, longest: int) -> None:
    """Have every reply end where its seed says."""
    plain = SingleTurn._within_context

    def within(self: SingleTurn, prompt: Prompt, prompt_length: int, sampling: SamplingParams) -> SamplingParams:
        drawn = median * np.exp(sigma * np.random.default_rng(sampling.seed & 0xFFFFFFFF).normal())
        long = replace(sampling, max_new_tokens=int(np.clip(drawn, 1, longest)), ignore_eos=True)
        return plain(self, prompt, prompt_length, long)

    SingleTurn._within_context = within


def run_training(world: Path, run: Path, flags: tuple[str, ...], args: argparse.Namespace) -> dict[str, float]:
    """One run, and what its logs say."""
    line = [
        *("--hf-checkpoint", str(world), "--prompt-data", str(world / "train.jsonl"), "--save", str(run)),
        *("--label-key", "label", "--apply-chat-template", "--rm-type", "deterministic_random"),
        *("--rollout-batch-size", str(args.prompts), "--n-samples-per-prompt", str(args.attempts)),
        *("--rollout-max-response-len", str(args.longest), "--num-rollout", str(args.steps), "--lr", "1e-4"),
        *("--device", "cpu", "--num-threads", "1", "--view", "plain", "--no-save-rollouts", *flags),
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        code = miles(["train", *line])
    assert code == 0, "the run failed"
    steps = [row for row in _rows(run / "metrics.jsonl") if row["kind"] == "train"]
    seconds = sum(row["seconds"]["step"] for row in _rows(run / "timings.jsonl") if row["kind"] == "train")
    tokens = sum(row["response_length"] for row in steps) * args.prompts * args.attempts
    return {"seconds": seconds, "tokens": tokens, "stale": max(row["staleness"] for row in steps)}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--attempts", type=int, default=4)
    parser.add_argument("--median", type=int, default=24)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=400)
    parser.add_argument("--only", nargs="*", default=list(TEMPOS))
    args = parser.parse_args()
    lengthen(args.median, args.sigma, args.longest)
    known = {"more": args.prompts * 3 // 2, "window": 3 * args.prompts}
    base: float | None = None
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder, "world")
        world.mkdir()
        task = demo_task.Task(warmup_words=64, train_words=256, heldout_words=6, longest=4)
        demo_task.write_task(world, task, seed=1)
        demo_task.write_checkpoint(world, moe=False, seed=1)
        config = world / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2 * args.longest}))
        run_training(world, Path(folder, "warm"), (), argparse.Namespace(**vars(args) | {"steps": 1}))
        print(f"{'tempo':36}{'s':>8}{'tok/s':>9}{'x':>7}{'stale':>7}")
        for number, name in enumerate(args.only):
            flags = tuple(flag.format(**known) for flag in TEMPOS[name])
            reported = run_training(world, Path(folder, f"run-{number}"), flags, args)
            rate = reported["tokens"] / reported["seconds"]
            base = rate if base is None else base
            print(
                f"{name:36}{reported['seconds']:8.1f}{rate:9.0f}{rate / base:7.2f}{reported['stale']:7.0f}", flush=True
            )


if __name__ == "__main__":
    sys.exit(main())
