"""Acceptance of drafts over a GRPO run: n-grams, a frozen EAGLE-3 head, and a head that is trained along.

    python benchmarks/bench_draft_acceptance.py MODEL OUT [--steps 100] [--warm-up 80] [--lr 2e-5] [--kinds ...]
    python benchmarks/bench_draft_acceptance.py demo OUT --steps 100        # and demo-moe, on a CPU

MODEL and its task are those of ``bench_precision_learning.py``. The warm-up trains a new head on samples of the policy,
whose own learning rate is next to nothing. Then one run each drafts with n-grams, with the head as it is, and with the
head while ``--draft-train eagle3`` trains it. All verify ``--drafts`` tokens of each request in each step, so that
acceptance is measured on all tokens, and not only where drafts pay.

OUT receives ``acceptance.json`` and ``acceptance.png``: tokens per verification, and the reward, by step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_precision_learning import MILES, Task

NGRAM, FROZEN, ONLINE = "n-gram", "frozen head", "online head"
WARM_UP = "warm-up"
TRAIN_HEAD = ["--draft-train", "eagle3", "--draft-lr", "1e-3", "--mtp-loss-scaling-factor", "1.0"]


def list_flags(kind: str, head: Path, drafts: int, lr: str) -> list[str]:
    """Return the flags of a kind of draft; the warm-up's head is in ``head``."""
    verify = ["--disable-speculative-adaptive", "--speculative-num-draft-tokens", str(drafts)]
    verify += ["--engine-max-running", "2048"]  # rows of a step: 512 requests and their drafts
    return {
        WARM_UP: ["--lr", "1e-12", *TRAIN_HEAD],
        NGRAM: ["--lr", lr, "--speculative-algorithm", "ngram", *verify],
        FROZEN: ["--lr", lr, "--speculative-algorithm", "eagle3", "--speculative-draft-model-path", str(head), *verify],
        ONLINE: ["--lr", lr, "--speculative-algorithm", "eagle3", "--draft-load", str(head), *TRAIN_HEAD, *verify],
    }[kind]


def run_one(task: Task, kind: str, flags: list[str]) -> dict[str, Any]:
    """Train once and return what was accepted by step."""
    save = task.run_folder(kind, 0)
    command = [*MILES, "train", *task.train_flags(0, save), "--save-interval", str(task.steps)]
    command += ["--disable-save-rollouts", *flags]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    (task.out / f"{save.name}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        print(kind, "failed:", done.stderr[-800:], flush=True)
    rows = [json.loads(line) for line in _read_lines(save / "timings.jsonl")]
    timings = {row["step"]: row["seconds"] for row in rows if row["kind"] == "train"}
    lines = [json.loads(line) for line in _read_lines(save / "metrics.jsonl")]
    metrics = {line["step"]: line for line in lines if line["kind"] == "train"}
    return {
        "kind": kind,
        "rc": done.returncode,
        "seconds": time.perf_counter() - began,
        "accept_length": _find_series(timings, "speculative/accept_length"),
        "rollout_seconds": _find_series(timings, "rollout"),
        "reward": _find_series(metrics, "reward"),
        "agreement": _find_series(metrics, "draft_agreement_1"),
    }


def _read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _find_series(rows: dict[int, dict[str, float]], name: str) -> dict[int, float]:
    return {step: row[name] for step, row in rows.items() if name in row}


def plot(found: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6))
    for axis, key, title in zip(axes, ("accept_length", "reward"), ("tokens per verification", "reward"), strict=True):
        for one in found:
            axis.plot(list(one[key]), list(one[key].values()), lw=1.2, label=one["kind"])
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=80)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--lr", default="2e-5")
    parser.add_argument("--kinds", nargs="+", default=[NGRAM, FROZEN, ONLINE], choices=[NGRAM, FROZEN, ONLINE])
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags of miles train, last")
    args = parser.parse_args()
    out = args.out.absolute()
    warm, task = Task(args.model, out / "warm", args.warm_up), Task(args.model, out, args.steps)
    for each in (warm, task):
        each.prepare({0})
    checkpoint = warm.run_folder(WARM_UP, 0) / "checkpoints" / f"step-{args.warm_up:06d}"
    head = checkpoint / "draft"
    if not head.exists():
        first = run_one(warm, WARM_UP, [*list_flags(WARM_UP, head, args.drafts, args.lr), *args.flags])
        agreed = list(first["agreement"].values())
        print(f"warm-up {first['seconds']:.0f} s: the head's first token agrees {agreed[0]:.2f} -> {agreed[-1]:.2f}")

    def run(kind: str) -> dict[str, Any]:
        return run_one(task, kind, [*list_flags(kind, head, args.drafts, args.lr), *args.flags])

    with ThreadPoolExecutor(args.at_once) as pool:
        found = list(pool.map(run, args.kinds))
    (out / "acceptance.json").write_text(json.dumps(found))
    for one in found:
        lengths, rewards = list(one["accept_length"].values()), list(one["reward"].values())
        tenths = [sum(lengths[i : i + 10]) / len(lengths[i : i + 10]) for i in range(0, len(lengths), 10)]
        ends = f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}" if rewards else ""
        print(f"{one['kind']:12} {one['seconds']:5.0f} s {ends} tokens per verification, ten steps each:", end=" ")
        print(" ".join(f"{each:.2f}" for each in tenths), flush=True)
    plot(found, out / "acceptance.png")


if __name__ == "__main__":
    main()
