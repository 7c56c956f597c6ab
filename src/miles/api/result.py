"""Result of a training run: its metrics, curves, trajectories and checkpoint, read from the run's directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.api.samples import PolicySample, list_samples
from miles.core.errors import DataError
from miles.launch.rules.paths import find_newest_checkpoint
from miles.observe.log_reader import LogRows, read_rows
from miles.observe.rollout_reader import read_step_rollouts

if TYPE_CHECKING:
    from pandas import DataFrame  # pyright: ignore[reportMissingImports]

_STEP_FILE = re.compile(r"step-(\d+)\.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run has made. ``finished`` is false for one that was stopped; the same call with ``save=`` resumes it."""

    directory: Path
    finished: bool

    @property
    def checkpoint(self) -> Path:
        """The folder of the newest checkpoint: a Hugging Face model with the optimizer beside it."""
        found = find_newest_checkpoint(self.directory)
        if found is None:
            raise DataError(f"{self.directory} has no checkpoint; the run was stopped before the first one.")
        return found

    @property
    def model(self) -> str:
        """The trained model, as ``miles.open`` and ``miles.train`` take it."""
        return str(self.checkpoint)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of each step, which is under ``step``."""
        return self._list_rows("train")

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """The metrics of each evaluation, with the step after which it was made under ``step``."""
        return self._list_rows("eval")

    @property
    def frame(self) -> DataFrame:
        """The metrics as a pandas table with one row per step; pandas must be installed."""
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise DataError("result.frame needs pandas; install it, or use result.metrics.") from error
        return pandas.DataFrame(self.metrics).set_index("step")

    def curve(self, name: str = "reward") -> tuple[list[int], list[float]]:
        """The steps and values of one metric, of training or of evaluations (``eval/…``)."""
        rows = self._read_log()
        for kind in ("train", "eval"):
            if name in rows.names(kind):
                return rows.series(kind, name)
        known = ", ".join((*rows.names("train"), *rows.names("eval")))
        raise DataError(f"{self.directory} has no metric {name}; there are {known}.")

    @property
    def curves(self) -> Path | None:
        """The picture of the run's curves; None if none was made."""
        path = self.directory / "curves.png"
        return path if path.exists() else None

    def samples(self, step: int | None = None) -> list[PolicySample]:
        """The trajectories that ``step`` was trained on, by default the last step."""
        files = {
            int(found[1]): path
            for path in (self.directory / "rollouts").glob("step-*.parquet")
            if (found := _STEP_FILE.fullmatch(path.name))
        }
        if not files:
            raise DataError(f"{self.directory} has no saved trajectories; train with save_rollouts=True.")
        wanted = max(files) if step is None else step
        if wanted not in files:
            raise DataError(
                f"{self.directory} has no trajectories of step {wanted}; it has {min(files)} to {max(files)}."
            )
        return list_samples(read_step_rollouts(files[wanted]).groups)

    def __repr__(self) -> str:
        steps = self.metrics
        rewards = [row["reward"] for row in steps if "reward" in row]
        learned = f", reward {rewards[0]:.3g} to {rewards[-1]:.3g}" if rewards else ""
        state = "finished" if self.finished else "stopped"
        return f"<TrainResult: {state} after {len(steps)} steps{learned}, in {self.directory}>"

    def _repr_png_(self) -> Any:
        return None if self.curves is None else self.curves.read_bytes()

    def _list_rows(self, kind: str) -> list[dict[str, float]]:
        return [{"step": row.step, **row.values} for row in self._read_log().select(kind)]

    def _read_log(self) -> LogRows:
        return read_rows(self.directory / "metrics.jsonl")
