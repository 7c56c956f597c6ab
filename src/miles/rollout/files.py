"""Prompt files as rows: JSONL and Parquet, whole or as a slice, with errors that name the line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.core.errors import DataError, UsageError

_SLICED = re.compile(r"(?P<path>.*)@\[(?P<inside>[^\[\]]*)\]", re.DOTALL)
_BOUNDS = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")


@dataclass(frozen=True, slots=True)
class Row:
    """One record: its index in the whole file, where to find it, and its columns."""

    index: int
    where: str
    columns: dict[str, Any]


def split_slice(path: str) -> tuple[str, slice]:
    """Part ``data.jsonl@[a:b]`` into the file and the slice; a plain path is the whole file.

    >>> split_slice("data.jsonl@[10:-5]")
    ('data.jsonl', slice(10, -5, None))
    """
    found = _SLICED.fullmatch(path)
    if found is None:
        return path, slice(None)
    bounds = _BOUNDS.fullmatch(found["inside"])
    if bounds is None:
        raise UsageError(
            f"The slice of {path} must be two row numbers, either may be absent, as in file.jsonl@[0:100]."
        )
    start, stop = (None if bound is None else int(bound) for bound in bounds.groups())
    return found["path"], slice(start, stop)


def named_paths(pairs: Sequence[str]) -> dict[str, str]:
    """``name path name path ...`` as a mapping, in the order given."""
    if len(pairs) % 2:
        raise UsageError(
            f"--eval-prompt-data takes pairs of a name and a file, and these do not pair up: {' '.join(pairs)}."
        )
    named: dict[str, str] = {}
    for name, path in zip(pairs[::2], pairs[1::2], strict=True):
        if name in named:
            raise UsageError(f"--eval-prompt-data names the set {name} twice; give each held-out set its own name.")
        named[name] = path
    return named


def read_rows(path: str) -> list[Row]:
    """The rows of a ``.jsonl`` or ``.parquet`` file, or of a slice of it."""
    name, part = split_slice(path)
    file = Path(name)
    if not file.is_file():
        raise DataError(f"There is no prompt file at {name}; check --prompt-data and --eval-prompt-data.")
    if file.suffix == ".jsonl":
        rows = _jsonl(file, part)
    elif file.suffix == ".parquet":
        rows = _parquet(file, part)
    else:
        raise DataError(f"{name} must end in .jsonl or .parquet, the two formats prompts are read from.")
    if not rows:
        raise DataError(f"{path} holds no rows; check the file and its slice.")
    return rows


def _jsonl(file: Path, part: slice) -> list[Row]:
    with file.open("rb") as stream:
        lines = [(number, line) for number, line in enumerate(stream, 1) if line.strip()]
    rows: list[Row] = []
    for index in range(len(lines))[part]:
        number, line = lines[index]
        where = f"{file}, line {number}"
        try:
            columns = json.loads(line.decode())
        except ValueError as error:  # bad UTF-8 and bad JSON alike
            raise DataError(f"{where}: this is not JSON ({error}).") from error
        if not isinstance(columns, dict):
            raise DataError(f"{where}: a row is a JSON object, and this is a {type(columns).__name__}.")
        rows.append(Row(index, where, columns))
    return rows


def _parquet(file: Path, part: slice) -> list[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file).read()
    except (ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet ({str(error).splitlines()[0]}).") from error
    chosen = range(table.num_rows)[part]
    records = table.slice(chosen.start, len(chosen)).to_pylist()
    return [Row(index, f"{file}, row {index + 1}", columns) for index, columns in zip(chosen, records, strict=True)]
