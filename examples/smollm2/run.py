"""Train SmolLM2-135M-Instruct on tasks of Reasoning Gym and with a calculator, in several modes, over several seeds.

    python examples/smollm2/run.py MODEL OUT [--tasks chain_sum ...] [--modes sync exact ...] [--seeds 0 1 2]

MODEL is the folder of the checkpoint. Each run is ``miles train`` in a process of its own, ``--at-once`` of them on one
GPU; one whose last checkpoint is there is not repeated. OUT receives the runs, ``results.json`` and ``curves.png``, and
a table is printed: held-out reward before and after, the share of responses in the first and the last step whose last
number is the answer, parity, entropy and seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pyarrow import parquet

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
import calculator
from training_runs import measured, newest

TRAIN = [sys.executable, "-m", "miles.launch.main", "train"]
# Tasks in the order of their difficulty for this model, and the settings of their generators.
REASONING_GYM: Mapping[str, str] = {
    "products": "min_terms=2&max_terms=2&min_digits=1&max_digits=1",
    "lcm": "max_value=12",
    "chain_sum": "min_terms=2&max_terms=2&min_digits=1&max_digits=2",
}
CALCULATOR = "calculator"
MODES: Mapping[str, list[str]] = {
    "sync": [],
    "exact": ["--parity", "exact"],
    "async": ["--max-weight-staleness", "2"],
    "lora": ["--lora-rank", "32", "--lora-alpha", "64", "--lr", "1e-4"],
    "ppo": ["--advantage-estimator", "ppo", "--critic-lr", "2e-5", "--num-critic-only-steps", "5"],
    "sglang": ["--rollout-backend", "sglang", "--sglang-mem-fraction-static", "0.3"],
    "distill": ["--advantage-estimator", "on_policy_distillation"],
}


@dataclass(frozen=True)
class Run:
    """One training run: its task, its mode and its seed."""

    task: str
    mode: str
    seed: int

    def folder(self, out: Path) -> Path:
        return out / f"{self.task}-{self.mode}-{self.seed}"


def data_flags(task: str, start: Path) -> list[str]:
    """Prompts to train on and held-out ones, and how replies are graded."""
    if task == CALCULATOR:
        return calculator.data_flags(start)
    settings = REASONING_GYM[task]
    heldout = f"reasoning_gym:{task}?size=128&seed=1000000&{settings}"
    return [
        *("--prompt-data", f"reasoning_gym:{task}?size=4096&seed=0&{settings}"),
        *("--eval-prompt-data", "heldout", heldout, "--rm-type", "reasoning_gym"),
    ]


def flags(run: Run, model: Path, out: Path, steps: int) -> list[str]:
    """The flags of ``miles train``."""
    start = newest(out / "calculator-warmup") if run.task == CALCULATOR else model
    given = [
        *("--hf-checkpoint", str(start), "--apply-chat-template", "--rollout-shuffle", "--dtype", "bfloat16"),
        *("--rollout-batch-size", "64", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "512"),
        *("--num-rollout", str(steps), "--eval-interval", str(max(steps // 4, 1)), "--n-samples-per-eval-prompt", "4"),
        *("--lr", "1e-5", "--lr-warmup-iters", "5", "--max-tokens-per-gpu", "8192", "--share-prefix"),
        *("--seed", str(run.seed), "--rollout-seed", str(run.seed), "--save-interval", str(steps)),
        *("--save", str(run.folder(out)), "--view", "plain", *data_flags(run.task, out / "calculator-data")),
    ]
    if run.mode == "distill":
        given += ["--opd-teacher-load", str(newest(Run(run.task, "sync", run.seed).folder(out)))]
    return [*given, *MODES[run.mode]]


def prepare_calculator(model: Path, out: Path) -> None:
    """Write the rows of the calculator's task, and warm the model up on demonstrations."""
    data, warmup = out / "calculator-data", out / "calculator-warmup"
    calculator.write_data(data)
    if not (warmup / "checkpoints").exists():
        subprocess.run([*TRAIN, *calculator.warmup_flags(model, data, warmup)], check=True)


def train(run: Run, model: Path, out: Path, steps: int, more: list[str]) -> dict[str, Any]:
    """Train once; the curves and the seconds of the command."""
    folder, began = run.folder(out), time.perf_counter()
    if not (folder / "checkpoints" / f"step-{steps:06d}").exists():
        with (out / f"{folder.name}.log").open("w") as log:
            done = subprocess.run([*TRAIN, *flags(run, model, out, steps), *more], stdout=log, stderr=log)
        if done.returncode:
            return {"run": vars(run), "failed": (out / f"{folder.name}.log").read_text()[-800:]}
    rows = measured(folder, "train")
    return {
        "run": vars(run),
        "seconds": round(time.perf_counter() - began, 1),
        "heldout": {row["step"]: row["eval/heldout/reward"] for row in measured(folder, "eval")},
        "right": [last_number_right(folder, step) for step in (1, steps)],
        **{key: [row.get(key) for row in rows] for key in ("reward", "parity_mean_abs", "entropy")},
    }


def last_number_right(folder: Path, step: int) -> float | None:
    """The share of a step's responses whose last number is the answer, whatever else they say."""
    rows = parquet.read_table(folder / "rollouts" / f"step-{step:06d}.parquet", columns=["label", "text"]).to_pylist()
    if any(row["label"] is None for row in rows):
        return None
    found = [(re.findall(r"-?\d+", row["text"]) or [""])[-1] for row in rows]
    return sum(number == row["label"].strip() for number, row in zip(found, rows, strict=True)) / len(rows)


def describe(result: Mapping[str, Any]) -> str:
    """A row of the table."""
    run = result["run"]
    name = f"{run['task']:<16} {run['mode']:<8} {run['seed']:>4}"
    if "failed" in result:
        return f"{name}  failed: {result['failed'].strip().splitlines()[-1:]}"
    scores, parity = list(result["heldout"].values()), [each for each in result["parity_mean_abs"] if each is not None]
    entropy = [each for each in result["entropy"] if each is not None]
    mean = f"{sum(parity) / len(parity):.4f}" if parity else "-"
    span = f"{entropy[0]:.2f} -> {entropy[-1]:.2f}" if entropy else "-"
    right = "" if None in result["right"] else "  last number right {:.2f} -> {:.2f}".format(*result["right"])
    return (
        f"{name}  {scores[0]:.3f} -> {scores[-1]:.3f}{right}  parity {mean}  entropy {span}  {result['seconds']:.0f} s"
    )


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Held-out reward by step: one panel a task, one colour a mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tasks = list(dict.fromkeys(each["run"]["task"] for each in results))
    figure, grid = plt.subplots(1, len(tasks), figsize=(4.6 * len(tasks), 3.6), squeeze=False)
    for axis, task in zip(grid[0], tasks, strict=True):
        for each in (one for one in results if one["run"]["task"] == task and "heldout" in one):
            mode = each["run"]["mode"]
            known = axis.get_legend_handles_labels()[1]
            label = None if mode in known else mode
            color = f"C{list(MODES).index(mode)}"
            axis.plot([int(step) for step in each["heldout"]], each["heldout"].values(), color=color, label=label)
        axis.set(title=task, xlabel="step", ylabel="held-out reward", ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("out", type=Path, help="folder of the runs")
    tasks = [*REASONING_GYM, CALCULATOR]
    parser.add_argument("--tasks", nargs="+", default=tasks, choices=tasks, help="tasks to train on")
    parser.add_argument("--modes", nargs="+", default=["sync"], choices=list(MODES), help="ways to train")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the runs")
    parser.add_argument("--steps", type=int, default=80, help="training steps of a run")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time on one GPU")
    args, more = parser.parse_known_args()
    model, out = args.model.absolute(), args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if CALCULATOR in args.tasks:
        prepare_calculator(model, out)
    runs = [Run(task, mode, seed) for mode in args.modes for task in args.tasks for seed in args.seeds]
    with ThreadPoolExecutor(args.at_once) as pool:
        results = list(pool.map(lambda run: train(run, model, out, args.steps, more), runs))
    (out / "results.json").write_text(json.dumps(results))
    print("\n".join(map(describe, results)))
    if find_spec("matplotlib") is None:
        print("curves.png was not drawn: matplotlib is not installed")
    else:
        plot(results, out / "curves.png")


if __name__ == "__main__":
    main()
