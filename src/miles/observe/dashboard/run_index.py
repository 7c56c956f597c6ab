"""Index of runs: finds run directories below folders, and keeps one reader for each."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from miles.core.errors import UsageError
from miles.observe.dashboard.run_reader import RunReader
from miles.observe.step_line import eval_rewards

_MAX_DEPTH = 6
_INSIDE_RUNS = frozenset({"checkpoints", "rollouts", "media", "trace", "tensorboard", "wandb", "logs", "eval"})


class RunIndex:
    """The runs at and below ``roots``; runs that appear later are found by ``refresh``.

    A run's name is its path below its root; nothing else of the disk can be named through this index.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [Path(root) for root in roots]
        for root in self._roots:
            if not root.is_dir():
                raise UsageError(f"{root} is not a folder; name a run directory, or a folder of runs.")
        self._readers: dict[Path, RunReader] = {}

    def refresh(self) -> None:
        """Look for new runs."""
        for root in self._roots:
            for path in find_runs(root):
                if path not in self._readers:
                    self._readers[path] = RunReader(self._choose_name(root, path), path)

    def names(self) -> list[str]:
        """Return the names of all runs that still exist."""
        return [reader.name for path, reader in self._readers.items() if path.is_dir()]

    def get(self, name: str) -> RunReader:
        """Return the reader of a run by its name, brought up to date; KeyError if there is none."""
        reader = self.find(name)
        reader.update()
        return reader

    def find(self, name: str) -> RunReader:
        """Return the reader of a run by its name, as it is; KeyError if there is none."""
        for path, reader in self._readers.items():
            if reader.name == name and path.is_dir():
                return reader
        raise KeyError(name)

    def _choose_name(self, root: Path, path: Path) -> str:
        relative = path.relative_to(root).as_posix()
        name = path.resolve().name if relative == "." else relative
        if len(self._roots) > 1 and relative != ".":
            name = f"{root.resolve().name}/{relative}"
        taken = {reader.name for reader in self._readers.values()}
        if name in taken:
            name = f"{path.resolve().parent.name}/{name}"
        number = 2
        unique = name
        while unique in taken:
            unique = f"{name} ({number})"
            number += 1
        return unique


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the run directories at and below ``root``, sorted; links to folders are not followed."""

    def walk(folder: Path, depth: int) -> Iterator[Path]:
        if (folder / "config.toml").is_file():
            yield folder
            return
        if depth == _MAX_DEPTH:
            return
        try:
            with os.scandir(folder) as entries:
                inner = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except OSError:
            return
        for name in inner:
            if not name.startswith(".") and name not in _INSIDE_RUNS:
                yield from walk(folder / name, depth + 1)

    yield from walk(root, 0)


def summarize_run(run: RunReader, now: float) -> dict[str, Any]:
    """Return the row of a run in the table of runs."""
    config = run.flat_config()
    started = [record.get("time") for record in run.sessions if record.get("event") == "RunStarted"]
    steps_T, tokens_T = run.metrics.series("train", "rollout_tokens")
    best = find_best_evaluations(run)
    model = str(config.get("hf_checkpoint", ""))
    return {
        "name": run.name,
        "status": run.status(now),
        "step": run.step,
        "steps": run.total_steps(),
        "reward": clean(run.metrics.last("train", "reward")),
        "best": best,
        "tokens": float(tokens_T.sum()) if len(steps_T) else 0.0,
        "hours": float(run.seconds_at(steps_T[-1:])[0]) / 3600 if len(steps_T) else 0.0,
        "started": started[0] if started else None,
        "changed": run.last_change(),
        "model": "/".join(Path(model).parts[-2:]) if model else "",
        "algorithm": config.get("advantage_estimator"),
        "loss": config.get("loss_type"),
        "revision": run.revision,
    }


def find_best_evaluations(run: RunReader) -> dict[str, dict[str, float | None]]:
    """Return of every held-out set the first, last and best reward, and the step of the best."""
    found: dict[str, dict[str, float | None]] = {}
    for name in run.metrics.names("eval"):
        short = next(iter(eval_rewards({name: 0.0})), None)
        if short is None:
            continue
        steps_T, values_T = run.metrics.series("eval", name)
        finite = [(value, -step) for step, value in zip(steps_T.tolist(), values_T.tolist(), strict=True)]
        finite = [point for point in finite if math.isfinite(point[0])]
        if finite:
            value, step = max(finite)
            found[short] = {
                "first": clean(float(values_T[0])),
                "last": clean(float(values_T[-1])),
                "best": value,
                "step": -step,
            }
    return found


def clean(value: float | None) -> float | None:
    """Return the number, or None if it is not finite, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None
