"""What a user names as data (files, folders, globs, whole or as a slice, perhaps with a weight), and its rows.

An entry is ``path``, ``path@[a:b]``, ``path*weight`` or ``path@[a:b]*weight``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from glob import has_magic, iglob
from pathlib import Path

from miles.core.errors import DataError, UsageError
from miles.rollout.generated import is_generated, task_of
from miles.rollout.rows import Bad, Columns, Row, refuse
from miles.rollout.saved import is_saved, saved_files

SUFFIXES = (".jsonl", ".parquet", ".arrow")
_SLICED = re.compile(r"(?P<path>.*)@\[(?P<inside>[^\[\]]*)\]", re.DOTALL)
_BOUNDS = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")
_WEIGHTED = re.compile(r"(?P<rest>.+)\*(?P<weight>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,2})?)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing named as data, taken apart; no ``weight`` was given where it is None."""

    path: str
    rows: slice
    weight: Fraction | None

    @property
    def name(self) -> str:
        """What to call it: the file without its folders and suffix, or the generated task."""
        if is_generated(self.path):
            return task_of(self.path).name
        last = Path(self.path).name
        suffix = next((suffix for suffix in SUFFIXES if last.endswith(suffix)), "")
        return last.removesuffix(suffix) or self.path


# -- words ----------------------------------------------------------------------------------


def entry_of(word: str) -> Entry:
    """Take ``path@[a:b]*weight`` apart.

    >>> entry_of("data/*.jsonl@[:-10]*0.3")
    Entry(path='data/*.jsonl', rows=slice(None, -10, None), weight=Fraction(3, 10))
    """
    found = _WEIGHTED.fullmatch(word)
    rest = word if found is None else found["rest"]
    weight = None if found is None else Fraction(found["weight"])
    if weight is not None and weight <= 0:
        raise UsageError(
            f"The weight of {rest} must be above 0, and is {float(weight):g}; give it a share or leave it out."
        )
    path, rows = split_slice(rest)
    return Entry(path, rows, weight)


def entries_of(words: Sequence[str]) -> tuple[Entry, ...]:
    """Every part of ``--prompt-data``; either all have a weight or none has."""
    entries = tuple(entry_of(word) for word in words)
    without = [word for word, entry in zip(words, entries, strict=True) if entry.weight is None]
    if without and len(without) < len(words):
        raise UsageError(
            f"--prompt-data gives {', '.join(without)} no weight and others one; give all of them one, "
            "as in file.jsonl*0.3, or none."
        )
    return entries


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
        if entry_of(path).weight is not None:
            raise UsageError(f"--eval-prompt-data {name} {path} has a weight, but a held-out set is read once, whole.")
        named[name] = path
    return named


# -- files ----------------------------------------------------------------------------------


def files_of(path: str) -> tuple[Path, ...]:
    """The data files a path stands for, in the order they are read: itself, those of a folder, those a glob matches.

    A folder that ``datasets`` saved stands for the Arrow files it lists; any other for the data files right in it.
    """
    given = Path(path)
    if given.is_dir():
        return _in_folder(given)
    if given.is_file():
        if given.suffix not in SUFFIXES:
            raise DataError(f"{path} is not a .jsonl, .parquet or .arrow file.")
        return (given,)
    if not has_magic(path):
        raise DataError(f"{path} does not exist{_neighbours(given)}.")
    matched = sorted(Path(found) for found in iglob(path, recursive=True))
    files = [file for found in matched for file in _matched(found)]
    if not files:
        what = f"{len(matched)} names and none of them is" if matched else "nothing that is"
        raise DataError(f"{path} matches {what} a .jsonl, .parquet or .arrow file, or a saved data set.")
    return tuple(dict.fromkeys(files))


def _matched(found: Path) -> tuple[Path, ...]:
    if found.is_dir():
        return saved_files(found) if is_saved(found) else ()
    return (found,) if found.suffix in SUFFIXES else ()


def _in_folder(folder: Path) -> tuple[Path, ...]:
    if is_saved(folder):
        return saved_files(folder)
    files = tuple(sorted(f for f in folder.iterdir() if f.suffix in SUFFIXES and f.is_file() and f.name[0] != "."))
    if not files:
        raise DataError(f"{folder} holds no .jsonl, .parquet or .arrow file, and is no saved data set.")
    return files


def _neighbours(file: Path) -> str:
    """What lies where a missing file was looked for."""
    if not file.parent.is_dir():
        return f", nor does the folder {file.parent}"
    there = sorted(f.name for f in file.parent.iterdir() if f.suffix in SUFFIXES or (f.is_dir() and is_saved(f)))
    return f"; {file.parent} holds {', '.join(there[:5])}{', ...' if len(there) > 5 else ''}" if there else ""


# -- rows -----------------------------------------------------------------------------------


def count_rows(path: str) -> int:
    """How many rows the files of ``path`` hold, bad ones included."""
    return sum(_count(file) for file in files_of(path))


def read_rows(path: str, columns: Columns | None = None, bad: Bad = refuse) -> Iterator[Row]:
    """The rows of the files a path stands for, or of a slice ``path@[a:b]`` of them all, one at a time.

    A row's index counts through all files, bad rows included. Only ``columns`` are kept of it, all when None.
    """
    name, part = split_slice(path)
    files = files_of(name)
    chosen = _chosen(part, files)
    first = 0
    for file in files:
        if first >= chosen.stop:
            return
        if file.suffix == ".jsonl":
            first = yield from _jsonl(file, columns, first, chosen, bad)
        else:
            from miles.rollout.arrow import arrow_rows, parquet_rows

            read = parquet_rows if file.suffix == ".parquet" else arrow_rows
            yield from read(file, columns, first, chosen, bad)
            first += _count(file) if len(files) > 1 else 0


def _chosen(part: slice, files: Sequence[Path]) -> range:
    """The indices a slice means; rows are counted only where it counts from the end."""
    if (part.start or 0) < 0 or (part.stop or 0) < 0:
        return range(sum(_count(file) for file in files))[part]
    return range(part.start or 0, sys.maxsize if part.stop is None else part.stop)


def _count(file: Path) -> int:
    if file.suffix == ".jsonl":
        with file.open("rb") as stream:
            return sum(1 for line in stream if line.strip())
    from miles.rollout.arrow import arrow_count, parquet_count

    return parquet_count(file) if file.suffix == ".parquet" else arrow_count(file)


def _jsonl(file: Path, columns: Columns | None, first: int, chosen: range, bad: Bad) -> Generator[Row, None, int]:
    """Every chosen line; gives the index after the last line that was looked at."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if first >= chosen.stop:
                break
            if not line.strip():
                continue
            if first in chosen:
                row = _line(file, number, line, columns, first, bad)
                if row is not None:
                    yield row
            first += 1
    return first


def _line(file: Path, number: int, line: bytes, columns: Columns | None, index: int, bad: Bad) -> Row | None:
    where = f"{file}, line {number}"
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON alike
        bad(DataError(f"{where}: this is not JSON ({error})."))
        return None
    if not isinstance(record, dict):
        bad(DataError(f"{where}: a row is a JSON object, and this is a {type(record).__name__}."))
        return None
    kept = record if columns is None else {name: record[name] for name in columns.names if name in record}
    return Row(index, where, kept, tuple(record))
