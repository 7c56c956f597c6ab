"""Data of the library: rows in memory, an iterable, or paths as ``--prompt-data`` has them.

Rows in memory are written to ``data/`` in the run's directory, so that a run has its data with it and is resumed with
the same; rewards get the rows as they were given.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from miles.algo.config import PREFERENCE_LOSSES
from miles.core.errors import DataError, MilesError
from miles.core.types import Prompt
from miles.launch.config import Config
from miles.rollout.data.mixture import PART_ID_STRIDE
from miles.rollout.data.paths import parse_entry, read_rows
from miles.rollout.data.schema import Columns, PreferenceColumns
from miles.rollout.data.task_suites import is_suite
from miles.rollout.evaluate import HELD_OUT_SET

Row = Mapping[str, Any]
Data = str | PurePath | Iterable[Row | str]
"""A path as --prompt-data takes it, or rows: dictionaries, or texts."""
FOLDER = "data"


def list_rows(data: Iterable[Row | str], input_key: str, limit: int | None) -> list[Row]:
    """The rows of ``data``; a text is the prompt itself. Of an iterable without a length, ``limit`` rows are read."""
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise DataError(
            f"data is a {type(data).__name__}; give a list of dictionaries, an iterable of them, or a path."
        )
    rows = data if isinstance(data, Sized) else islice(data, limit)
    return [_to_row(row, index, input_key) for index, row in enumerate(rows)]


def _to_row(row: Any, index: int, input_key: str) -> Row:
    if isinstance(row, str):
        return {input_key: row}
    if not isinstance(row, Mapping):
        raise DataError(f"data[{index}] is a {type(row).__name__}; a row is a dictionary of columns, or a text.")
    return row


def list_columns(config: Config) -> Columns:
    """The columns that the run reads."""
    r = config.rollout
    paired = config.algo.loss_type in PREFERENCE_LOSSES
    return Columns(
        input=r.input_key,
        label=r.label_key,
        metadata=r.metadata_key,
        tool=r.tool_key,
        pair=PreferenceColumns(chosen=r.chosen_key, rejected=r.rejected_key) if paired else None,
        media={kind: str(column) for kind, column in r.multimodal_keys.items()},
    )


@contextmanager
def storing_rows(rows: Sequence[Row], folder: Path, columns: Columns) -> Iterator[Path]:
    """Write the ``columns`` of all rows to a file in ``folder`` named by its content; an error inside removes it."""
    if not rows:
        raise DataError("data holds no rows; give at least one.")
    text = "".join(_format_row(row, index, columns) for index, row in enumerate(rows))
    path = folder / f"prompts-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    is_new = not path.exists()
    if is_new:
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".part-{os.getpid()}")
        draft.write_text(text, encoding="utf-8")
        draft.rename(path)
    try:
        yield path
    except MilesError:
        if is_new:
            path.unlink()
            with suppress(OSError):  # other files are there
                folder.rmdir()
                folder.parent.rmdir()
        raise


def _format_row(row: Row, index: int, columns: Columns) -> str:
    for key, flag in columns.required_columns:
        if key not in row:
            raise columns.missing_column(f"data[{index}]", key, flag, tuple(map(str, row)))
    kept = {name: row[name] for name in sorted(columns.names) if name in row}
    try:
        return json.dumps(kept, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise DataError(
            f"data[{index}] cannot be written as JSON ({error}); its columns {', '.join(kept)} take texts, numbers, "
            "lists and tables."
        ) from error


class RecordIndex:
    """Finds the row that a prompt was made of: among rows in memory, or in the files, which it reads when first asked.

    While a held-out set is evaluated, the prompt is one of that set; rows in memory are those of training. Rows of a
    procedural task have no columns but those of the prompt.
    """

    def __init__(self, rows: Sequence[Row] | None, entries: Sequence[str] = ()) -> None:
        self._rows = rows
        self._entries: dict[str | None, Sequence[str]] = {None: entries}
        self._rows_by_id: dict[str | None, dict[int, Row]] = {}

    def set_entries(self, training: Sequence[str], held_out: Mapping[str, str]) -> None:
        """Set the data entries of training, and of each held-out set by name."""
        self._entries = {None: training, **{name: [entry] for name, entry in held_out.items()}}

    def __call__(self, prompt: Prompt) -> Row:
        name = HELD_OUT_SET.get()
        if self._rows is not None and name is None:
            return self._rows[prompt.id]
        if name not in self._rows_by_id:
            self._rows_by_id[name] = dict(_iter_stored(self._entries[name]))
        return self._rows_by_id[name].get(prompt.id) or {"label": prompt.label, **prompt.metadata}


def _iter_stored(paths: Sequence[str]) -> Iterator[tuple[int, Row]]:
    for part, path in enumerate(paths):
        entry = parse_entry(path)
        if not is_suite(entry.path):
            whole = path if entry.weight is None else path.rpartition("*")[0]
            yield from ((part * PART_ID_STRIDE + row.index, row.columns) for row in read_rows(whole))
