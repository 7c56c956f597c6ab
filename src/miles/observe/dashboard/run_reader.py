"""Reader of one run directory for the dashboard: logs, config, sessions, rollout steps, and its status."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles.observe.dashboard.log_tail import LogTail
from miles.observe.dashboard.metric_store import (
    FloatArray,
    IntArray,
    MetricStore,
    accumulate_at,
    select_points,
    to_json_numbers,
)
from miles.observe.plots import smooth

_ROLLOUT = re.compile(r"step-(\d{6,})\.parquet")
_SILENT_SECONDS = 120.0
"""A run that has written nothing for so long, and for ten steps, is reported as silent."""
_FILES = ("metrics.jsonl", "timings.jsonl", "logs/sessions.jsonl", "config.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesQuery:
    """Which points of a metric are asked for: smoothing over neighbours, number of points, newer than a step."""

    smoothing: int = 0
    limit: int = 1000
    since: int | None = None


class RunReader:
    """One run; ``update`` reads what its files have gained. It never writes and never locks the directory."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.metrics = MetricStore(path / "metrics.jsonl")
        self.timings = MetricStore(path / "timings.jsonl")
        self._sessions_tail = LogTail(path / "logs" / "sessions.jsonl")
        self.sessions: list[dict[str, Any]] = []
        self._revision = 0

    def update(self) -> None:
        """Read new lines of all logs."""
        restarted, records = self._sessions_tail.read_new()
        if restarted:
            self.sessions.clear()
        self.sessions += records
        changed = [self.metrics.update(), self.timings.update(), restarted or bool(records)]
        self._revision += any(changed)

    @property
    def revision(self) -> int:
        """A number that grows when the logs have gained lines."""
        return self._revision

    @property
    def step(self) -> int:
        """The newest finished step."""
        return self.metrics.latest_step("train")

    def read_config(self) -> dict[str, dict[str, Any]]:
        """Return the options by section; empty if the file is missing or damaged."""
        try:
            found = tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {section: values for section, values in found.items() if isinstance(values, dict)}

    def flat_config(self) -> dict[str, Any]:
        """Return the options by name."""
        return {name: value for values in self.read_config().values() for name, value in values.items()}

    def rollout_steps(self) -> list[int]:
        """Return the steps that have a rollout file."""
        folder = self.path / "rollouts"
        if not folder.is_dir():
            return []
        return sorted(int(found[1]) for file in folder.iterdir() if (found := _ROLLOUT.fullmatch(file.name)))

    def stall_files(self) -> list[str]:
        """Return the names of the stack dumps of stalls."""
        return sorted(file.name for file in (self.path / "logs").glob("stall-*.txt"))

    def total_steps(self) -> int | None:
        """Return the number of steps the run was started for."""
        started = [record for record in self.sessions if record.get("event") == "RunStarted"]
        return int(started[-1]["steps"]) if started and isinstance(started[-1].get("steps"), int) else None

    def status(self, now: float) -> str:
        """Return ``finished``, ``stopped``, ``running``, ``silent`` (nothing written lately) or ``not started``."""
        events = [record for record in self.sessions if record.get("event") in ("RunStarted", "RunEnded")]
        if not events:
            return "not started" if not self.metrics.names("train") else "stopped"
        if events[-1]["event"] == "RunEnded":
            return "finished" if events[-1].get("finished") else "stopped"
        return "running" if now - self.last_change() < self._silent_after() else "silent"

    def last_change(self) -> float:
        """Return when a log was last written, in seconds since the epoch; 0 if there is none."""
        found = [path for name in _FILES if (path := self.path / name).is_file()]
        return max((path.stat().st_mtime for path in found), default=0.0)

    def _silent_after(self) -> float:
        seconds_T = self.timings.series("train", "step")[1]
        return max(_SILENT_SECONDS, 10 * float(np.median(seconds_T[-20:]))) if len(seconds_T) else 10 * _SILENT_SECONDS

    # -- series -----------------------------------------------------------------------------

    def tokens_at(self, steps: IntArray) -> FloatArray:
        """Return the tokens sampled (without rollouts: trained on) up to each step."""
        names = self.metrics.names("train")
        name = "rollout_tokens" if "rollout_tokens" in names else "tokens"
        return accumulate_at(*self.metrics.series("train", name), steps)

    def seconds_at(self, steps: IntArray) -> FloatArray:
        """Return the seconds of steps and of earlier evaluations up to each step."""
        own = accumulate_at(*self.timings.series("train", "step"), steps)
        return own + accumulate_at(*self.timings.series("eval", "evaluate"), steps, inclusive=False)

    def read_series(self, name: str, query: SeriesQuery) -> dict[str, Any]:
        """Return the points of a metric for a chart; ``seconds/...`` is a timing, ``eval/...`` an evaluation."""
        kind = "eval" if name.startswith("eval/") else "train"
        if name.startswith("seconds/"):
            own = name.removeprefix("seconds/")
            kind = "eval" if own == "evaluate" else "train"
            steps_T, values_T = self.timings.series(kind, own)
        else:
            steps_T, values_T = self.metrics.series(kind, name)
        last_step = int(steps_T[-1]) if len(steps_T) else None
        is_smoothed = query.smoothing > 0 and kind == "train" and len(values_T) > 0  # evaluations are few
        smoothed_T = np.array(smooth(values_T.tolist(), query.smoothing)) if is_smoothed else None
        error_T = self._standard_error(name, steps_T)
        if query.since is not None:
            kept = steps_T > query.since
            steps_T, values_T = steps_T[kept], values_T[kept]
            smoothed_T = None if smoothed_T is None else smoothed_T[kept]
            error_T = None if error_T is None else error_T[kept]
        points_P = select_points(values_T, query.limit)
        found = {
            "run": self.name,
            "name": name,
            "total": len(steps_T),
            "last_step": last_step,
            "step": steps_T[points_P].tolist(),
            "tokens": to_json_numbers(self.tokens_at(steps_T[points_P]), 12),
            "hours": to_json_numbers(self.seconds_at(steps_T[points_P]) / 3600, 10),
            "y": to_json_numbers(values_T[points_P]),
        }
        if smoothed_T is not None:
            found["smooth"] = to_json_numbers(smoothed_T[points_P])
        if error_T is not None:
            found["error"] = to_json_numbers(error_T[points_P])
        return found

    def _standard_error(self, name: str, steps: IntArray) -> FloatArray | None:
        """Return the standard error of a mean reward at its steps, where the files have what it is computed from."""
        if name == "reward":
            deviation_steps, deviation = self.metrics.series("train", "reward_std")
            samples_steps, samples = self.metrics.series("train", "samples")
            same = np.array_equal(deviation_steps, steps) and np.array_equal(samples_steps, steps)
            return deviation / np.sqrt(np.maximum(samples, 1)) if same and len(steps) else None
        if name.startswith("eval/") and name.endswith("/reward"):
            error_steps, error = self.metrics.series("eval", f"{name}_stderr")
            return error if len(steps) and np.array_equal(error_steps, steps) else None
        return None


def flatten_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the options in which two configs differ: name and both values, None for one that is not set.

    >>> flatten_difference({"lr": 1e-3, "seed": 0}, {"lr": 1e-4, "seed": 0, "save": "a"})
    [('lr', 0.001, 0.0001), ('save', None, 'a')]
    """
    names = sorted({*first, *second})
    return [(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]
