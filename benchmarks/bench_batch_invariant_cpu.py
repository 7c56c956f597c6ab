"""Cost of ``--parity exact`` on a CPU: the demo's model and task, a few GRPO steps in each mode, in one run.

python benchmarks/bench_batch_invariant_cpu.py [--steps 8] [--rounds 2] [--moe]

The limit is the same run in ``fast``, which reduces in whatever order is quickest: a ratio of 1.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median

import torch

from miles.launch.commands import demo_task
from miles.launch.main import main as miles

PARTS = {"rollout": "rollout", "training": "train/optimize"}


def measure_seconds(world: Path, run: Path, parity: str, steps: int) -> dict[str, float]:
    """Median seconds of a step by part, the first left out."""
    flags = [
        *("--hf-checkpoint", str(world), "--prompt-data", str(world / "train.jsonl"), "--save", str(run)),
        *("--input-key", "input", "--label-key", "label", "--apply-chat-template", "--rm-type", "exact"),
        *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--num-rollout", str(steps)),
        *("--rollout-max-response-len", "8", "--device", "cpu", "--dtype", "float32", "--num-threads", "1"),
        *("--view", "none", "--disable-save-rollouts", "--parity", parity),
    ]
    with redirect_stdout(StringIO()):
        assert miles(["train", *flags]) == 0
    rows = [json.loads(line)["seconds"] for line in (run / "timings.jsonl").read_text().splitlines()]
    return {part: median(row[name] for row in rows[1:]) for part, name in PARTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--moe", action="store_true", help="the demo's model with experts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {"fast": [], "exact": []}
    with tempfile.TemporaryDirectory() as made:
        world = Path(made) / "world"
        world.mkdir()
        demo_task.write_task(world, demo_task.Task(), seed=1)
        demo_task.write_checkpoint(world, moe=options.moe, seed=1)
        for number in range(options.rounds):
            for parity, rows in found.items():
                rows.append(measure_seconds(world, Path(made) / f"{parity}-{number}", parity, options.steps))
    print(f"{'':10} {'fast':>9} {'exact':>9} {'ratio':>6}")
    for part in PARTS:
        fast, exact = (min(row[part] for row in found[parity]) for parity in ("fast", "exact"))
        print(f"{part:10} {fast:>7.3f} s {exact:>7.3f} s {exact / fast:>6.2f}")


if __name__ == "__main__":
    main()
