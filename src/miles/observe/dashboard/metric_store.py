"""Metrics of a run by column, kept up to date with its files, and downsampled for a chart.

T is the number of recorded steps of a metric, P the number of points of a chart.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.observe.dashboard.log_tail import LogTail

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_KEYS = frozenset({"kind", "step", "ticket"})


@dataclass(slots=True)
class _Column:
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    is_sorted: bool = True

    def append(self, step: int, value: float) -> None:
        self.is_sorted = self.is_sorted and (not self.steps or step > self.steps[-1])
        self.steps.append(step)
        self.values.append(value)

    def read(self) -> tuple[IntArray, FloatArray]:
        """Return the steps, ascending, and their values; of a step written twice the later one."""
        steps_T, values_T = np.array(self.steps, np.int64), np.array(self.values, np.float64)
        if self.is_sorted:
            return steps_T, values_T
        unique_T, first_T = np.unique(steps_T[::-1], return_index=True)
        return unique_T, values_T[::-1][first_T]


class MetricStore:
    """Columns of a log of metrics or timings; ``update`` reads what was appended to the file."""

    def __init__(self, path: Path) -> None:
        self._tail = LogTail(path)
        self._columns: dict[str, dict[str, _Column]] = {}
        self._latest: dict[str, int] = {}

    def update(self) -> bool:
        """Read new lines; true if there were any."""
        restarted, records = self._tail.read_new()
        if restarted:
            self._columns.clear()
            self._latest.clear()
        for record in records:
            self._add(record)
        return restarted or bool(records)

    def names(self, kind: str) -> list[str]:
        """Return the names of a kind, sorted."""
        return sorted(self._columns.get(kind, ()))

    def series(self, kind: str, name: str) -> tuple[IntArray, FloatArray]:
        """Return the steps and values of a metric; empty arrays if there is none."""
        return self._columns.get(kind, {}).get(name, _Column()).read()

    def latest_step(self, kind: str) -> int:
        """Return the largest step of a kind; 0 if there is none."""
        return self._latest.get(kind, 0)

    def last(self, kind: str, name: str) -> float | None:
        """Return the newest value of a metric."""
        values_T = self.series(kind, name)[1]
        return float(values_T[-1]) if len(values_T) else None

    @property
    def unreadable(self) -> int:
        """Number of lines that could not be read."""
        return self._tail.unreadable

    def _add(self, record: Mapping[str, Any]) -> None:
        kind, step = record.get("kind"), record.get("step", record.get("ticket"))
        values = record.get("seconds", record)
        if not isinstance(step, int) or not isinstance(kind, str) or not isinstance(values, Mapping):
            return
        self._latest[kind] = max(step, self._latest.get(kind, 0))
        columns = self._columns.setdefault(kind, {})
        for name, value in values.items():
            if values is record and name in _KEYS:
                continue
            if type(value) is not float:
                try:
                    value = float(value)  # NaN and infinities are strings
                except (TypeError, ValueError):
                    continue
            column = columns.get(name)
            if column is None:
                column = columns[name] = _Column()
            column.append(step, value)


def accumulate_at(steps: IntArray, amounts: FloatArray, at: IntArray, *, inclusive: bool = True) -> FloatArray:
    """Return the sum of the finite amounts of all steps up to each step of ``at``; without that step itself if not
    ``inclusive``."""
    totals = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(amounts), amounts, 0.0))])
    return totals[np.searchsorted(steps, at, side="right" if inclusive else "left")]


def select_points(values: FloatArray, limit: int) -> IntArray:
    """Return the indices of at most ``limit`` points that draw the same curve: the ends, and each part's extremes.

    >>> select_points(np.array([0.0, 1.0, 9.0, 1.0, 0.0, -5.0, 0.0, 1.0]), 6).tolist()
    [0, 2, 5, 7]
    """
    count = len(values)
    if count <= max(limit, 4):
        return np.arange(count)
    num_parts = (max(limit, 4) - 2) // 2
    width = -(-count // num_parts)
    padded = np.full(num_parts * width, np.nan)
    padded[:count] = values
    parts = padded.reshape(num_parts, width)
    parts = parts[~np.isnan(parts).all(axis=1)]
    starts = np.arange(num_parts)[~np.isnan(padded.reshape(num_parts, width)).all(axis=1)] * width
    extremes = [starts + np.nanargmin(parts, axis=1), starts + np.nanargmax(parts, axis=1)] if len(parts) else []
    return np.unique(np.concatenate([[0, count - 1], *extremes]).astype(np.int64))


def to_json_numbers(values: FloatArray, digits: int = 7) -> list[float | None]:
    """Return the numbers with ``digits`` significant digits; what is not finite, which JSON lacks, is None."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
