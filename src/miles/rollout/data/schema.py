"""Row schema of prompt data: the columns that are read, one row, and the handling of bad rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.core.errors import DataError

TOOLS = "tools"
"""Key of a prompt's metadata with the tools that the chat template lists."""

OnBadRow = Callable[[DataError], None]
"""Called with the error of a bad row; raises, or counts it and continues."""


def raise_bad_row(error: DataError) -> None:
    """Raise at the first bad row."""
    raise error


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row: its index in the data, its location, the columns read, the names of all columns, and its folder."""

    index: int
    where: str
    columns: dict[str, Any]
    found: tuple[str, ...]
    folder: Path = Path()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceColumns:
    """The columns with the preferred and the rejected reply to a prompt."""

    chosen: str = "chosen"
    rejected: str = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns a prompt is built from; no others are kept."""

    input: str
    label: str | None = None
    metadata: str = "metadata"
    tool: str | None = None
    pair: PreferenceColumns | None = None
    media: Mapping[str, str] = field(default_factory=dict)

    @property
    def required_columns(self) -> tuple[tuple[str, str], ...]:
        """The columns every row must have, each with the flag that names it."""
        label = () if self.label is None else ((self.label, "--label-key"),)
        pair = () if self.pair is None else ((self.pair.chosen, "--chosen-key"), (self.pair.rejected, "--rejected-key"))
        return ((self.input, "--input-key"), *label, *pair)

    @property
    def names(self) -> frozenset[str]:
        """Every column to read where it exists."""
        optional = (self.metadata, self.tool, *self.media.values())
        return frozenset({key for key, _ in self.required_columns} | {name for name in optional if name})

    def missing_column(self, where: str, key: str, flag: str, found: Sequence[str]) -> DataError:
        """The error of a row without the column ``key``."""
        names = ", ".join(map(str, found)) or "none"
        return DataError(f"{where}: there is no column {key} (found: {names}); name the right one with {flag}.")
