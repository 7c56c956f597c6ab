"""Prompt data paths: files, folders, globs, slices and weights, Hugging Face dataset folders, and reading their rows.

A path may also be a split on the hub, as in ``openai/gsm8k:main@train``. An entry is ``path``, ``path@[a:b]``,
``path*weight`` or ``path@[a:b]*weight``.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from glob import has_magic, iglob
from pathlib import Path
from typing import Any, cast

from miles.core.errors import DataError, UsageError
from miles.core.hub_names import parse_hub_name
from miles.rollout.data.schema import Columns, DataRow, OnBadRow, raise_bad_row
from miles.rollout.data.task_suites import get_task_name, is_suite

SUFFIXES = (".jsonl", ".parquet", ".arrow")
_SLICED = re.compile(r"(?P<path>.*)@\[(?P<inside>[^\[\]]*)\]", re.DOTALL)
_BOUNDS = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")
_WEIGHTED = re.compile(r"(?P<rest>.+)\*(?P<weight>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,2})?)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DataEntry:
    """A parsed data entry; ``weight`` is None where none was given."""

    path: str
    rows: slice
    weight: Fraction | None

    @property
    def name(self) -> str:
        """Its name: the file unweighted folders and suffix, or the task of a suite."""
        if is_suite(self.path):
            return get_task_name(self.path)
        if (name := parse_hub_name("dataset", self.path)) is not None:
            return name.repo.rpartition("/")[2]
        last = Path(self.path).name
        suffix = next((suffix for suffix in SUFFIXES if last.endswith(suffix)), "")
        return last.removesuffix(suffix) or self.path


# -- entries --------------------------------------------------------------------------------


def parse_entry(entry: str) -> DataEntry:
    """Parse ``path@[a:b]*weight``.

    >>> parse_entry("data/*.jsonl@[:-10]*0.3")
    DataEntry(path='data/*.jsonl', rows=slice(None, -10, None), weight=Fraction(3, 10))
    """
    found = _WEIGHTED.fullmatch(entry)
    rest = entry if found is None else found["rest"]
    weight = None if found is None else Fraction(found["weight"])
    if weight is not None and weight <= 0:
        raise UsageError(
            f"The weight of {rest} must be above 0, and is {float(weight):g}; give it a share or leave it out."
        )
    path, rows = split_slice(rest)
    return DataEntry(path, rows, weight)


def parse_entries(entries_text: Sequence[str]) -> tuple[DataEntry, ...]:
    """Parse all entries of ``--prompt-data``; either all have a weight or none has."""
    entries = tuple(parse_entry(entry) for entry in entries_text)
    unweighted = [text for text, entry in zip(entries_text, entries, strict=True) if entry.weight is None]
    if unweighted and len(unweighted) < len(entries_text):
        raise UsageError(
            f"--prompt-data gives {', '.join(unweighted)} no weight and others one; give all of them one, "
            "as in file.jsonl*0.3, or none."
        )
    return entries


def split_slice(path: str) -> tuple[str, slice]:
    """Split ``data.jsonl@[a:b]`` into the file and the slice; a plain path is the whole file.

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


def parse_named_paths(pairs: Sequence[str]) -> dict[str, str]:
    """Parse ``name path name path ...`` into a mapping, in order."""
    if len(pairs) % 2:
        raise UsageError(
            f"--eval-prompt-data takes pairs of a name and a file, and these do not pair up: {' '.join(pairs)}."
        )
    named: dict[str, str] = {}
    for name, path in zip(pairs[::2], pairs[1::2], strict=True):
        if name in named:
            raise UsageError(f"--eval-prompt-data names the set {name} twice; give each held-out set its own name.")
        if parse_entry(path).weight is not None:
            raise UsageError(f"--eval-prompt-data {name} {path} has a weight, but a held-out set is read once, whole.")
        named[name] = path
    return named


# -- files ----------------------------------------------------------------------------------


def resolve_files(path: str) -> tuple[Path, ...]:
    """The data files of a path in reading order: the file itself, those of a folder, or those a glob matches.

    A name on the hub stands for the files of its split in the cache, a folder saved by ``datasets`` for the Arrow files
    it lists, any other folder for the data files directly in it.
    """
    if (name := parse_hub_name("dataset", path)) is not None:
        from miles.rollout.data.hub_dataset import find_files

        return find_files(name)
    given = Path(path)
    if given.is_dir():
        return _list_folder(given)
    if given.is_file():
        if given.suffix not in SUFFIXES:
            raise DataError(f"{path} is not a .jsonl, .parquet or .arrow file.")
        return (given,)
    if not has_magic(path):
        raise DataError(f"{path} does not exist{_list_neighbours(given)}.")
    matched = sorted(Path(found) for found in iglob(path, recursive=True))
    files = [file for found in matched for file in _match_files(found)]
    if not files:
        what = f"{len(matched)} names and none of them is" if matched else "nothing that is"
        raise DataError(f"{path} matches {what} a .jsonl, .parquet or .arrow file, or a saved data set.")
    return tuple(dict.fromkeys(files))


def _match_files(found: Path) -> tuple[Path, ...]:
    if found.is_dir():
        return list_saved_files(found) if is_saved_dataset(found) else ()
    return (found,) if found.suffix in SUFFIXES else ()


def _list_folder(folder: Path) -> tuple[Path, ...]:
    if is_saved_dataset(folder):
        return list_saved_files(folder)
    files = tuple(sorted(f for f in folder.iterdir() if f.suffix in SUFFIXES and f.is_file() and f.name[0] != "."))
    if not files:
        raise DataError(f"{folder} holds no .jsonl, .parquet or .arrow file, and is no saved data set.")
    return files


def _list_neighbours(file: Path) -> str:
    """The data files in the folder of a missing file, for the error message."""
    if not file.parent.is_dir():
        return f", nor does the folder {file.parent}"
    names = sorted(
        f.name for f in file.parent.iterdir() if f.suffix in SUFFIXES or (f.is_dir() and is_saved_dataset(f))
    )
    return f"; {file.parent} holds {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else ""


# -- folders saved by Hugging Face datasets --------------------------------------------------


def is_saved_dataset(folder: Path) -> bool:
    """Whether the folder was written by ``save_to_disk``, as one dataset or as several splits."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def list_saved_files(folder: Path) -> tuple[Path, ...]:
    """The Arrow files of a saved dataset, in row order; a dictionary with one split is that split.

    A dataset is ``state.json``, ``dataset_info.json`` and ``data-*.arrow``; a dictionary of splits is
    ``dataset_dict.json`` and one such folder per split. The ``datasets`` library is not needed.
    """
    if (folder / "dataset_dict.json").is_file():
        return list_saved_files(_only_split(folder))
    listing = folder / "state.json"
    state = _read_json_object(listing)
    if state.get("_indices_data_files"):
        raise DataError(f"{folder} keeps its order in a separate file; save it again after flatten_indices().")
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "filename" in e for e in entries):
        raise DataError(f"{listing} lists no data files; save the data set again.")
    files = tuple(folder / str(entry["filename"]) for entry in cast("list[dict[str, Any]]", entries))
    for file in files:
        if not file.is_file():
            raise DataError(f"{listing} lists {file.name}, which is not there; copy the whole folder.")
    if not files:
        raise DataError(f"{folder} is a saved data set without rows.")
    return files


def _only_split(folder: Path) -> Path:
    listing = folder / "dataset_dict.json"
    splits = _read_json_object(listing).get("splits")
    if not isinstance(splits, list) or not splits:
        raise DataError(f"{listing} lists no splits; save the data set again.")
    names = [str(split) for split in cast("list[Any]", splits)]
    if len(names) > 1:
        raise DataError(f"{folder} holds the splits {', '.join(names)}; name one, as in {folder / names[0]}.")
    split = folder / names[0]
    if not (split / "state.json").is_file():
        raise DataError(f"{listing} lists the split {names[0]}, which is not there; copy the whole folder.")
    return split


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is not JSON ({error}); save the data set again.") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} must hold an object; save the data set again.")
    return cast("dict[str, Any]", found)


# -- rows -----------------------------------------------------------------------------------


def count_rows(path: str) -> int:
    """Number of rows of all files of ``path``, bad ones included."""
    return sum(_count_rows(file) for file in resolve_files(path))


def read_rows(path: str, columns: Columns | None = None, on_bad_row: OnBadRow = raise_bad_row) -> Iterator[DataRow]:
    """Iterate over the rows of a path's files, or of a slice ``path@[a:b]`` of them.

    A row's index counts through all files, bad rows included. Only ``columns`` are kept, or all when None.
    """
    name, part = split_slice(path)
    files = resolve_files(name)
    selected = _select_rows(part, files)
    first = 0
    for file in files:
        if first >= selected.stop:
            return
        if file.suffix == ".jsonl":
            first = yield from _read_jsonl(file, columns, first, selected, on_bad_row)
        else:
            from miles.rollout.data.arrow_reader import read_arrow_rows, read_parquet_rows

            read = read_parquet_rows if file.suffix == ".parquet" else read_arrow_rows
            yield from read(file, columns, first, selected, on_bad_row)
            first += _count_rows(file) if len(files) > 1 else 0


def _select_rows(part: slice, files: Sequence[Path]) -> range:
    """The row indices of a slice; rows are counted only where it counts from the end."""
    if (part.start or 0) < 0 or (part.stop or 0) < 0:
        return range(sum(_count_rows(file) for file in files))[part]
    return range(part.start or 0, sys.maxsize if part.stop is None else part.stop)


def _count_rows(file: Path) -> int:
    if file.suffix == ".jsonl":
        with file.open("rb") as stream:
            return sum(1 for line in stream if line.removeprefix(codecs.BOM_UTF8).strip())
    from miles.rollout.data.arrow_reader import count_arrow_rows, count_parquet_rows

    return count_parquet_rows(file) if file.suffix == ".parquet" else count_arrow_rows(file)


def _read_jsonl(
    file: Path, columns: Columns | None, first: int, selected: range, on_bad_row: OnBadRow
) -> Generator[DataRow, None, int]:
    """Yield every selected line; returns the index after the last line read."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if first >= selected.stop:
                break
            if not line.removeprefix(codecs.BOM_UTF8).strip():
                continue
            if first in selected:
                row = _parse_line(file, number, line, columns, first, on_bad_row)
                if row is not None:
                    yield row
            first += 1
    return first


def _parse_line(
    file: Path, number: int, line: bytes, columns: Columns | None, index: int, on_bad_row: OnBadRow
) -> DataRow | None:
    where = f"{file}, line {number}"
    try:
        record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:  # also invalid UTF-8
        on_bad_row(DataError(f"{where}: this is not JSON ({error})."))
        return None
    if not isinstance(record, dict):
        on_bad_row(DataError(f"{where}: a row is a JSON object, and this is a {type(record).__name__}."))
        return None
    kept = record if columns is None else {name: record[name] for name in columns.names if name in record}
    if b"\\u" in line and not _is_encodable(kept):
        on_bad_row(
            DataError(f"{where}: a text has half of a surrogate pair (\\ud800 to \\udfff), which is no character.")
        )
        return None
    return DataRow(index, where, kept, tuple(record), file.parent)


def _is_encodable(columns: dict[str, Any]) -> bool:
    try:
        json.dumps(columns, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
