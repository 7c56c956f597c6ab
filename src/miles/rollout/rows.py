"""One record of a prompt file: what is read of it, where it lies, and how one that is no good is told of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.core.errors import DataError

Bad = Callable[[DataError], None]
"""Told of a row that cannot be read; raises, or counts it and lets the reading go on."""


def refuse(error: DataError) -> None:
    """Stop at the first bad row."""
    raise error


@dataclass(frozen=True, slots=True)
class Row:
    """One record: its index in the data, where to find it, the columns that were read, and the names of all."""

    index: int
    where: str
    columns: dict[str, Any]
    found: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The columns with the preferred reply to a prompt and with the other one."""

    chosen: str = "chosen"
    rejected: str = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns a prompt is made of; nothing else is kept of a row."""

    input: str
    label: str | None = None
    metadata: str = "metadata"
    pair: Pair | None = None

    @property
    def required(self) -> tuple[tuple[str, str], ...]:
        """The columns every row must have, each with the flag that names it."""
        label = () if self.label is None else ((self.label, "--label-key"),)
        pair = () if self.pair is None else ((self.pair.chosen, "--chosen-key"), (self.pair.rejected, "--rejected-key"))
        return ((self.input, "--input-key"), *label, *pair)

    @property
    def names(self) -> frozenset[str]:
        """Every column that is read where it is there."""
        return frozenset({key for key, _ in self.required} | {self.metadata})

    def missing(self, where: str, key: str, flag: str, found: Sequence[str]) -> DataError:
        """What to say where the column ``key`` is not."""
        there = ", ".join(map(str, found)) or "none"
        return DataError(f"{where}: there is no column {key} (found: {there}); name the right one with {flag}.")
