"""Reader of a run's metric and timing logs that tolerates damaged lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles.core.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """One line of ``metrics.jsonl`` or ``timings.jsonl``."""

    kind: str
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRows:
    """All readable lines in order, and the line numbers (from 1) of unreadable ones."""

    rows: tuple[LogRow, ...]
    unreadable: tuple[int, ...]

    def select(self, kind: str) -> list[LogRow]:
        """Return the rows of one kind, one per step: if a step was written twice, the later one counts."""
        return sorted({row.step: row for row in self.rows if row.kind == kind}.values(), key=lambda row: row.step)

    def series(self, kind: str, name: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of one metric."""
        points = [(row.step, row.values[name]) for row in self.select(kind) if name in row.values]
        return [step for step, _ in points], [value for _, value in points]

    def names(self, kind: str) -> list[str]:
        """Return all metric names of a kind, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.select(kind) for name in row.values))


def read_rows(path: Path) -> LogRows:
    """Read a log file; unreadable lines are recorded, and a missing file is a DataError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    rows: list[LogRow] = []
    unreadable: list[int] = []
    for number, text in enumerate(data.splitlines(), 1):
        row = _row(text)
        if row is not None:
            rows.append(row)
        elif text.strip():
            unreadable.append(number)
    return LogRows(rows=tuple(rows), unreadable=tuple(unreadable))


def _row(text: bytes) -> LogRow | None:
    try:
        record = json.loads(text)
        if not isinstance(record, dict):
            return None
        kind, step = record.pop("kind"), record.pop("step", record.pop("ticket", None))
        numbers = record.get("seconds", record)
        # NaN and infinities are strings (see event_records.encode_line)
        values = {str(name): float(value) for name, value in numbers.items()}
        return LogRow(kind=str(kind), step=int(step), values=values)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
