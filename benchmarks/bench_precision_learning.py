"""Learning in low precision: GRPO in several precisions and seeds, with a real small model or the model of the demo.

    python benchmarks/bench_precision_learning.py MODEL OUT [--steps 80] [--seeds 0 1 2] [--at-once 6]
    python benchmarks/bench_precision_learning.py demo OUT --steps 200 --at-once 1        # and demo-moe, on a CPU

MODEL is a Hugging Face folder (SmolLM2-135M-Instruct in docs/precision.md), trained on sums and differences; or
``demo`` or ``demo-moe``, which reverse words as ``miles demo`` does: its warm-up, once for each seed and without
quantization, and then its GRPO flags. Each run is ``miles train`` in a process of its own; several run at once on one
device. A run whose folder in OUT is complete is not repeated.

OUT receives ``curves.json`` and ``curves.png``: held-out reward, mean difference of log-probs between engine and
trainer, and entropy, by step. A last row evaluates the runs without quantization after their weights were converted to
INT4, without training in it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

WIDE = "not quantized"
SETTINGS: dict[str, list[str]] = {
    WIDE: [],
    "FP8 both planes": ["--train-precision", "fp8"],
    "FP8 rollout only": ["--rollout-precision", "fp8"],
    "INT4 training": ["--train-precision", "int4_g32"],
}
CONVERTED = "INT4 after training"
DEMOS = ("demo", "demo-moe")


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


@dataclass(frozen=True)
class Task:
    """What is trained: the model of all runs, or a demo."""

    model: str
    out: Path
    steps: int

    @property
    def is_demo(self) -> bool:
        return self.model in DEMOS

    def run_folder(self, setting: str, seed: int) -> Path:
        return self.out / "runs" / f"{setting.replace(' ', '-')}-{seed}"

    def prepare(self, seeds: set[int]) -> None:
        """Write the prompts, and the warmed-up models of a demo."""
        self.out.mkdir(parents=True, exist_ok=True)
        if not self.is_demo:
            write_data(self.out)
            return
        for seed in sorted(seeds):
            folder = self.out / f"start-{seed}"
            if (folder / "grpo" / "checkpoints" / "step-000001").exists():
                continue
            command = [*MILES, "demo", "--steps", "1", "--seed", str(seed), "--save", str(folder), "--plain"]
            subprocess.run([*command, *(["--moe"] if self.model == "demo-moe" else [])], check=True)

    def train_flags(self, seed: int, save: Path) -> list[str]:
        return self._demo_flags(seed, save) if self.is_demo else self._sum_flags(seed, save)

    def _sum_flags(self, seed: int, save: Path) -> list[str]:
        flags = ["--hf-checkpoint", self.model, "--apply-chat-template"]
        flags += ["--prompt-data", str(self.out / "train.jsonl"), "--input-key", "question", "--label-key", "answer"]
        flags += ["--eval-prompt-data", "heldout", str(self.out / "heldout.jsonl"), "--eval-interval", "10"]
        flags += ["--n-samples-per-eval-prompt", "2", "--rm-type", "last_int", "--rollout-shuffle"]
        flags += ["--rollout-batch-size", "64", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "48"]
        flags += ["--lr", "1e-5", "--lr-warmup-iters", "5", "--num-rollout", str(self.steps), "--seed", str(seed)]
        flags += ["--rollout-seed", str(seed), "--engine-memory-fraction", "0.02", "--engine-max-running", "512"]
        return [*flags, "--max-tokens-per-gpu", "8192", "--dtype", "bfloat16", "--save", str(save)]

    def _demo_flags(self, seed: int, save: Path) -> list[str]:
        from miles.launch.commands.demo import DemoFolders, grpo_flags
        from miles.launch.config import DemoOptions

        folders = DemoFolders(root=self.out / f"start-{seed}")
        warm = max((folders.warmup / "checkpoints").glob("step-*"))
        options = DemoOptions(moe=self.model == "demo-moe", seed=seed, steps=self.steps)
        return [*grpo_flags(folders, options, warm), "--save", str(save)]

    def eval_flags(self, seed: int) -> list[str]:
        if self.is_demo:
            from miles.launch.commands.demo_task import Task as DemoTask

            data = ["--eval-prompt-data", "heldout", str(self.out / f"start-{seed}" / "start" / "heldout.jsonl")]
            flags = ["--input-key", "input", "--label-key", "label", "--rm-type", "exact", *data]
            length = str(DemoTask().longest + 3)
            return [*flags, "--n-samples-per-eval-prompt", "4", "--rollout-max-response-len", length]
        flags = ["--input-key", "question", "--label-key", "answer", "--rm-type", "last_int", "--dtype", "bfloat16"]
        flags += ["--eval-prompt-data", "heldout", str(self.out / "heldout.jsonl")]
        return [*flags, "--n-samples-per-eval-prompt", "2", "--rollout-max-response-len", "48"]


MILES = [sys.executable, "-m", "miles.launch.main"]


def run_one(task: Task, setting: str, seed: int) -> dict[str, Any]:
    """Train once and return the curves."""
    save = task.run_folder(setting, seed)
    ends = ["--disable-save-rollouts", "--save-interval", str(task.steps)]
    command = [*MILES, "train", *task.train_flags(seed, save), *ends, *SETTINGS[setting]]
    began, rc = time.perf_counter(), 0
    if not (save / "checkpoints" / f"step-{task.steps:06d}").exists():
        done = subprocess.run(command, capture_output=True, text=True)
        rc = done.returncode
        (task.out / f"{save.name}.log").write_text(done.stdout + done.stderr)
        if rc:
            print(save.name, "failed:", done.stderr[-600:], flush=True)
    rows = read_metrics(save / "metrics.jsonl")
    return {"setting": setting, "seed": seed, "rc": rc, "seconds": time.perf_counter() - began, **rows}


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


def evaluate_converted(task: Task, seed: int) -> dict[str, Any]:
    """Round a checkpoint that was trained without quantization to INT4 and evaluate it."""
    trained = task.run_folder(WIDE, seed)
    command = [*MILES, "eval", "--hf-checkpoint", str(trained / "checkpoints" / f"step-{task.steps:06d}")]
    command += ["--apply-chat-template", *task.eval_flags(seed), "--rollout-precision", "int4_g32"]
    done = subprocess.run(command, capture_output=True, text=True)
    (task.out / f"converted-{seed}.log").write_text(done.stdout + done.stderr)
    reports = sorted((trained / "eval").glob("*.json"))
    reward = json.loads(reports[-1].read_text())["metrics"]["eval/heldout/reward"] if reports else float("nan")
    return {"setting": CONVERTED, "seed": seed, "rc": done.returncode, "heldout": {task.steps: reward}}


def plot(rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw a row of curves for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(len(rows), 3, figsize=(13, 3.4 * len(rows)), squeeze=False)
    keys = (("heldout", "held-out reward"), ("parity", "parity"), ("entropy", "entropy"))
    for axes, (model, found) in zip(grid, rows.items(), strict=True):
        for axis, (key, title) in zip(axes, keys, strict=True):
            for color, setting in enumerate(SETTINGS):
                for one in (each for each in found if each["setting"] == setting and each.get(key)):
                    points = sorted((int(step), value) for step, value in one[key].items())
                    label = setting if one["seed"] == 0 else None
                    axis.plot(*zip(*points, strict=True), color=f"C{color}", alpha=0.8, lw=1, label=label)
            axis.set_title(f"{model}: {title}")
            axis.set_xlabel("step")
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
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="folders of other models, to plot them below")
    args = parser.parse_args()
    task = Task(args.model, args.out.absolute(), args.steps)
    jobs = [(setting, seed) for seed in args.seeds for setting in args.settings]
    if args.runs:
        jobs = [(name, int(seed)) for name, _, seed in (run.rpartition(":") for run in args.runs)]
    task.prepare({seed for _, seed in jobs})
    with ThreadPoolExecutor(args.at_once) as pool:
        found = list(pool.map(lambda job: run_one(task, *job), jobs))
        wide = [seed for setting, seed in jobs if setting == WIDE]
        found += pool.map(lambda seed: evaluate_converted(task, seed), wide)
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
    others = {folder.name: json.loads((folder / "curves.json").read_text()) for folder in args.also}
    plot({Path(args.model).name: found, **others}, args.out / "curves.png")


if __name__ == "__main__":
    main()
