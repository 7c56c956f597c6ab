"""Reading back what a run wrote, line by line, through whatever a kill or an editor did to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.core.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of ``metrics.jsonl`` or ``timings.jsonl``: what it is about and its numbers."""

    kind: str
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """All readable lines in order, and the numbers (from 1) of those that were not."""

    rows: tuple[Row, ...]
    unreadable: tuple[int, ...]

    def of(self, kind: str) -> list[Row]:
        """The rows of one kind, one a step: where a step was written twice the later one counts."""
        return sorted({row.step: row for row in self.rows if row.kind == kind}.values(), key=lambda row: row.step)

    def series(self, kind: str, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it was written."""
        found = [(row.step, row.values[name]) for row in self.of(kind) if name in row.values]
        return [step for step, _ in found], [value for _, value in found]

    def names(self, kind: str) -> list[str]:
        """Every metric name of a kind, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.of(kind) for name in row.values))


def read_rows(path: Path) -> Rows:
    """Read a file of rows; unreadable lines are counted, not fatal, and a file that is not there is."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    rows: list[Row] = []
    unreadable: list[int] = []
    for number, text in enumerate(data.splitlines(), 1):
        row = _row(text)
        if row is not None:
            rows.append(row)
        elif text.strip():
            unreadable.append(number)
    return Rows(rows=tuple(rows), unreadable=tuple(unreadable))


def _row(text: bytes) -> Row | None:
    try:
        record = json.loads(text)
        if not isinstance(record, dict):
            return None
        kind, step = record.pop("kind"), record.pop("step", record.pop("ticket", None))
        numbers = record.get("seconds", record)
        values = {str(name): _number(value) for name, value in numbers.items()}
        return Row(kind=str(kind), step=int(step), values=values)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _number(value: Any) -> float:
    """NaN and infinities come as strings (see record.line)."""
    return float(value)
