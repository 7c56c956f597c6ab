"""What the ranks of a trainer tell of a checkpoint's files: how many of them write, and what each has written or not.

A rank may still be writing when the trainer goes on, and in another process than whoever waits for the folder to be
whole; so it is told in the folder itself, in small hidden files that are gone before the folder is a checkpoint.

    .ranks.json        {"ranks": 2}                                         the folder is being written, by so many
    .rank-00000.json   {"files": {NAME: {"bytes": ..., "sha256": ...}}}     that rank's files are whole and on disk
    .rank-00001.json   {"failure": "..."}                                   that rank gave up, and has removed its own
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles.core.errors import CheckpointError

_RANKS = ".ranks.json"
# Seconds between two looks.
_LOOK = 0.02


@dataclass(frozen=True, slots=True)
class Written:
    """A file's length and its digest."""

    bytes: int
    sha256: str


def announce(folder: Path, ranks: int) -> None:
    """From now on ``folder`` is whole only when so many ranks have told of their files."""
    _put(folder / _RANKS, {"ranks": ranks})


def tell(folder: Path, rank: int, files: Mapping[str, Written]) -> None:
    """All files of ``rank`` are complete and on disk."""
    _put(_note(folder, rank), {"files": {name: asdict(written) for name, written in files.items()}})


def tell_failure(folder: Path, rank: int, sentence: str) -> None:
    """``rank`` has given up, and writes no more."""
    _put(_note(folder, rank), {"failure": sentence})


def missing(root: Path) -> list[int]:
    """The ranks that are still writing somewhere under ``root``."""
    return sorted({rank for folder, ranks in _announced(root) for rank in ranks if not _note(folder, rank).exists()})


def wait_for_all(root: Path, patience: Callable[[], float]) -> None:
    """Return when no rank is missing; a CheckpointError when nothing under ``root`` has changed for ``patience()``."""
    size, since = -1, time.monotonic()
    while silent := missing(root):
        now = _bytes(root)
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > patience():
            raise CheckpointError(f"nothing was heard from rank {silent[0]}, and no file grew, for {patience():.0f} s")
        time.sleep(_LOOK)


def outcome(root: Path) -> dict[str, Written]:
    """What was written under ``root``, by path, now that no rank is missing; a CheckpointError where one gave up."""
    found: dict[str, Written] = {}
    failures: list[str] = []
    for folder, ranks in _announced(root):
        for rank in ranks:
            told = json.loads(_note(folder, rank).read_text())
            failures += [told["failure"]] if "failure" in told else []
            for name, entry in told.get("files", {}).items():
                found[str((folder / name).relative_to(root))] = Written(**entry)
    if failures:
        raise CheckpointError("; ".join(failures))
    return found


def clear(root: Path) -> None:
    """Remove every note."""
    for folder, ranks in _announced(root):
        for rank in ranks:
            _note(folder, rank).unlink(missing_ok=True)
        (folder / _RANKS).unlink()


def _bytes(root: Path) -> int:
    total = 0
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a note's draft, or what a rank that gave up removes
            total += path.stat().st_size
    return total


def _announced(root: Path) -> list[tuple[Path, range]]:
    return [(mark.parent, range(json.loads(mark.read_text())["ranks"])) for mark in sorted(root.rglob(_RANKS))]


def _note(folder: Path, rank: int) -> Path:
    return folder / f".rank-{rank:05d}.json"


def _put(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all: someone may be looking."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(value))
    os.replace(draft, path)
