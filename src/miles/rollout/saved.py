"""Folders that the ``datasets`` library saved: which Arrow files they list, found without that library.

A data set (``Dataset.save_to_disk``) is ``state.json``, ``dataset_info.json`` and ``data-*.arrow``; a dictionary of
splits is ``dataset_dict.json`` and one such folder a split.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from miles.core.errors import DataError


def is_saved(folder: Path) -> bool:
    """Whether the folder was written by ``save_to_disk``, as one data set or as several splits."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def saved_files(folder: Path) -> tuple[Path, ...]:
    """The Arrow files of a saved data set, in the order of its rows; a dictionary with one split is that split."""
    if (folder / "dataset_dict.json").is_file():
        return saved_files(_only_split(folder))
    listing = folder / "state.json"
    state = _read(listing)
    if state.get("_indices_data_files"):
        raise DataError(f"{folder} keeps its order in a file of its own; save it again after flatten_indices().")
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
    splits = _read(listing).get("splits")
    if not isinstance(splits, list) or not splits:
        raise DataError(f"{listing} lists no splits; save the data set again.")
    names = [str(split) for split in cast("list[Any]", splits)]
    if len(names) > 1:
        raise DataError(f"{folder} holds the splits {', '.join(names)}; name one, as in {folder / names[0]}.")
    split = folder / names[0]
    if not (split / "state.json").is_file():
        raise DataError(f"{listing} lists the split {names[0]}, which is not there; copy the whole folder.")
    return split


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is not JSON ({error}); save the data set again.") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} must hold an object; save the data set again.")
    return cast("dict[str, Any]", found)
