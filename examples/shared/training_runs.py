"""Training runs of examples: rows of data to write, runs to start, and checkpoints and metrics to read."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def newest(run: Path) -> Path:
    """The last checkpoint of a run."""
    return max((run / "checkpoints").glob("step-*"))


def measured(run: Path, kind: str) -> list[dict[str, float]]:
    """The run's metrics of one kind, in order."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == kind]


def run_example(
    name: str,
    write_start: Callable[..., None],
    warmup_flags: Callable[[Path, Path], list[str]],
    grpo_flags: Callable[[Path, Path, Path], list[str]],
    roles: Sequence[str] = (),
) -> None:
    """The command of an example, ``run.py [FOLDER [SEED]]``: its data and model are written, and both stages run."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else f"runs/{name}")
    seed = sys.argv[2] if len(sys.argv) > 2 else "0"
    write_start(root / "start", seed=int(seed))
    seeds = ["--seed", seed, "--rollout-seed", seed]
    run_stages(
        root,
        lambda start, save: [*warmup_flags(start, save), *seeds],
        lambda start, warm, save: [*grpo_flags(start, warm, save), *seeds],
        ("heldout",),
        roles,
    )


def run_stages(
    root: Path,
    warmup_flags: Callable[[Path, Path], list[str]],
    grpo_flags: Callable[[Path, Path, Path], list[str]],
    evaluated: Sequence[str],
    roles: Sequence[str] = (),
) -> None:
    """Supervised fine-tuning of ``root/start``, then GRPO on its last checkpoint; prints the rewards of evaluations.

    The flags are those of ``miles train`` for these folders: the start and where to save, and between them for GRPO the
    checkpoint that it starts from. ``evaluated`` are the sets of held-out rows, ``roles`` those of several policies.
    """
    began = time.monotonic()
    start, warmup, grpo = root / "start", root / "warmup", root / "grpo"
    train = [sys.executable, "-m", "miles.launch.main", "train"]
    subprocess.run([*train, *warmup_flags(start, warmup)], check=True)
    subprocess.run([*train, *grpo_flags(start, newest(warmup), grpo)], check=True)
    for name in evaluated:
        for role in roles or ("",):
            metric = f"eval/{name}/reward/{role}".rstrip("/")
            curve = ", ".join(f"{row[metric]:.2f} at step {row['step']}" for row in measured(grpo, "eval"))
            print(f"{f'{name} {role}'.rstrip()}: reward {curve}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"took {time.monotonic() - began:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of them on a CPU core")
