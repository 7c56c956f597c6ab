"""Learning in low precision: GRPO on sums and differences with a real small model, in several precisions and seeds.

    python benchmarks/bench_precision_learning.py MODEL OUT [--steps 80] [--seeds 0 1 2] [--at-once 6]

MODEL is a Hugging Face folder (SmolLM2-135M-Instruct in docs/precision.md). Each run is ``miles train`` in a process of
its own; several run at once on one GPU. OUT receives ``curves.json`` and ``curves.png``: held-out reward, mean
difference of log-probs between engine and trainer, and entropy, by step. A last row evaluates the bf16 runs after their
weights were converted to INT4, without training in it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

SETTINGS: dict[str, list[str]] = {
    "bf16": [],
    "FP8 both planes": ["--train-precision", "fp8"],
    "FP8 rollout only": ["--rollout-precision", "fp8"],
    "INT4 training": ["--train-precision", "int4_g32"],
}
CONVERTED = "INT4 after training"


def write_data(folder: Path) -> None:
    """Write the prompts: sums and differences of numbers up to 60, 4,096 to train on and 256 held out."""
    random = Random(0)
    rows = []
    for _ in range(4096 + 256):
        a, b, sign = random.randint(0, 60), random.randint(0, 60), random.choice("+-")
        question = f"What is {a} {sign} {b}? Answer with the number only."
        rows.append({"question": question, "answer": str(a + b if sign == "+" else a - b)})
    for name, part in (("train", rows[:4096]), ("heldout", rows[4096:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def run_one(model: str, out: Path, setting: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once and return the curves."""
    name = f"{setting.replace(' ', '-')}-{seed}"
    save = out / "runs" / name
    command = [sys.executable, "-m", "miles.launch.main", "train", "--hf-checkpoint", model, "--apply-chat-template"]
    command += ["--prompt-data", str(out / "train.jsonl"), "--input-key", "question", "--label-key", "answer"]
    command += ["--eval-prompt-data", "heldout", str(out / "heldout.jsonl"), "--eval-interval", "10"]
    command += ["--n-samples-per-eval-prompt", "2", "--rm-type", "last_int", "--rollout-shuffle", "--dtype", "bfloat16"]
    command += ["--rollout-batch-size", "64", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "48"]
    command += ["--lr", "1e-5", "--lr-warmup-iters", "5", "--num-rollout", str(steps), "--seed", str(seed)]
    command += ["--rollout-seed", str(seed), "--engine-memory-fraction", "0.02", "--engine-max-running", "512"]
    command += ["--max-tokens-per-gpu", "8192"]
    command += ["--disable-save-rollouts", "--save", str(save), "--save-interval", str(steps), *SETTINGS[setting]]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    (out / f"{name}.log").write_text(done.stdout + done.stderr)
    rows = read_metrics(save / "metrics.jsonl")
    found = {"setting": setting, "seed": seed, "rc": done.returncode, "seconds": time.perf_counter() - began, **rows}
    if done.returncode:
        print(name, "failed:", done.stderr[-600:], flush=True)
    return found


def read_metrics(path: Path) -> dict[str, Any]:
    """Read the held-out reward by step, and the mean parity and entropy."""
    if not path.exists():
        return {"heldout": {}}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    train = [row for row in rows if row["kind"] == "train"]

    def series(key: str) -> dict[int, float]:
        return {row["step"]: row[key] for row in train if key in row}

    heldout = {row["step"]: row["eval/heldout/reward"] for row in rows if "eval/heldout/reward" in row}
    return {
        "heldout": heldout,
        "parity": series("parity_mean_abs"),
        "entropy": series("entropy"),
        "reward": series("reward"),
    }


def evaluate_converted(out: Path, seed: int, steps: int) -> dict[str, Any]:
    """Convert a trained bf16 checkpoint to INT4 and evaluate it."""
    checkpoint = out / "runs" / f"bf16-{seed}" / "checkpoints" / f"step-{steps:06d}"
    command = [sys.executable, "-m", "miles.launch.main", "eval", "--hf-checkpoint", str(checkpoint)]
    command += ["--apply-chat-template", "--input-key", "question", "--label-key", "answer", "--rm-type", "last_int"]
    command += ["--eval-prompt-data", "heldout", str(out / "heldout.jsonl"), "--n-samples-per-eval-prompt", "2"]
    command += ["--rollout-max-response-len", "48", "--dtype", "bfloat16", "--rollout-precision", "int4_g32"]
    done = subprocess.run(command, capture_output=True, text=True)
    (out / f"converted-{seed}.log").write_text(done.stdout + done.stderr)
    reports = sorted((out / "runs" / f"bf16-{seed}" / "eval").glob("*.json"))
    reward = json.loads(reports[-1].read_text())["metrics"]["eval/heldout/reward"] if reports else float("nan")
    return {"setting": CONVERTED, "seed": seed, "rc": done.returncode, "heldout": {steps: reward}}


def plot(found: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6))
    for index, (key, title) in enumerate(
        (("heldout", "held-out reward"), ("parity", "parity"), ("entropy", "entropy"))
    ):
        for color, setting in enumerate(SETTINGS):
            for one in (each for each in found if each["setting"] == setting and each.get(key)):
                points = sorted((int(step), value) for step, value in one[key].items())
                label = setting if one["seed"] == 0 else None
                axes[index].plot(*zip(*points, strict=True), color=f"C{color}", alpha=0.8, lw=1, label=label)
        axes[index].set_title(title)
        axes[index].set_xlabel("step")
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--runs", nargs="+", metavar="SETTING:SEED", help="these runs instead of all")
    parser.add_argument("--at-once", type=int, default=6)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_data(args.out)
    jobs = [(setting, seed) for seed in args.seeds for setting in args.settings]
    if args.runs:
        jobs = [(name, int(seed)) for name, _, seed in (run.rpartition(":") for run in args.runs)]
    with ThreadPoolExecutor(args.at_once) as pool:
        found = list(pool.map(lambda job: run_one(args.model, args.out, job[0], job[1], args.steps), jobs))
        wide = [seed for setting, seed in jobs if setting == "bf16"]
        found += pool.map(lambda seed: evaluate_converted(args.out, seed, args.steps), wide)
    (args.out / "curves.json").write_text(json.dumps(found))
    for one in found:
        ends = sorted((int(step), value) for step, value in one.get("heldout", {}).items())
        parity = list(one.get("parity", {}).values())
        entropy = list(one.get("entropy", {}).values())
        print(
            f"{one['setting']:18} seed {one['seed']} rc {one['rc']} {one.get('seconds', 0):5.0f} s held-out",
            f"{ends[0][1]:.3f} -> {ends[-1][1]:.3f}" if ends else "",
            f"parity {sum(parity) / len(parity):.4f}" if parity else "",
            f"entropy {entropy[0]:.3f} -> {entropy[-1]:.3f}" if entropy else "",
            flush=True,
        )
    plot(found, args.out / "curves.png")


if __name__ == "__main__":
    main()
