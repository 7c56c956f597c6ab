"""Per-rank completion markers of a checkpoint folder: how many ranks write, and what each has written.

Ranks may still be writing in the background when the trainer continues, and in other processes than the one that waits
for the folder to be complete. So they report in the folder itself, in small hidden files that are removed before the
folder becomes a checkpoint.

    .ranks.json        {"ranks": 2}                                         so many ranks are writing into the folder
    .rank-00000.json   {"files": {NAME: {"bytes": ..., "sha256": ...}}}     that rank's files are complete and on disk
    .rank-00001.json   {"failure": "..."}                                   that rank failed and removed its files
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
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file's length and SHA-256."""

    bytes: int
    sha256: str


def announce_ranks(folder: Path, ranks: int) -> None:
    """Declare that ``folder`` is complete only when ``ranks`` ranks have marked their files complete."""
    _write_atomically(folder / _RANKS, {"ranks": ranks})


def mark_complete(folder: Path, rank: int, files: Mapping[str, FileDigest]) -> None:
    """Report that all files of ``rank`` are complete and on disk."""
    _write_atomically(_marker(folder, rank), {"files": {name: asdict(digest) for name, digest in files.items()}})


def mark_failed(folder: Path, rank: int, reason: str) -> None:
    """Report that ``rank`` failed and writes no more."""
    _write_atomically(_marker(folder, rank), {"failure": reason})


def list_missing_ranks(root: Path) -> list[int]:
    """Return the ranks that are still writing somewhere under ``root``."""
    return sorted(
        {rank for folder, ranks in _find_announced(root) for rank in ranks if not _marker(folder, rank).exists()}
    )


def wait_for_all_ranks(root: Path, timeout: Callable[[], float]) -> None:
    """Wait until no rank is missing; CheckpointError if nothing under ``root`` changes for ``timeout()`` seconds."""
    size, since = -1, time.monotonic()
    while missing := list_missing_ranks(root):
        current_size = _total_bytes(root)
        if current_size != size:
            size, since = current_size, time.monotonic()
        elif time.monotonic() - since > timeout():
            raise CheckpointError(f"rank {missing[0]} did not report and no file grew for {timeout():.0f} s")
        time.sleep(_POLL_SECONDS)


def collect_files(root: Path) -> dict[str, FileDigest]:
    """Return all written files under ``root`` by path, once no rank is missing; CheckpointError if a rank failed."""
    files: dict[str, FileDigest] = {}
    failures: list[str] = []
    for folder, ranks in _find_announced(root):
        for rank in ranks:
            report = json.loads(_marker(folder, rank).read_text())
            if "failure" in report:
                failures.append(report["failure"])
            for name, entry in report.get("files", {}).items():
                files[str((folder / name).relative_to(root))] = FileDigest(**entry)
    if failures:
        raise CheckpointError("; ".join(failures))
    return files


def clear_markers(root: Path) -> None:
    """Remove all marker files."""
    for folder, ranks in _find_announced(root):
        for rank in ranks:
            _marker(folder, rank).unlink(missing_ok=True)
        (folder / _RANKS).unlink()


def _total_bytes(root: Path) -> int:
    total = 0
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a temporary file, or a file that a failed rank removed
            total += path.stat().st_size
    return total


def _find_announced(root: Path) -> list[tuple[Path, range]]:
    return [(path.parent, range(json.loads(path.read_text())["ranks"])) for path in sorted(root.rglob(_RANKS))]


def _marker(folder: Path, rank: int) -> Path:
    return folder / f".rank-{rank:05d}.json"


def _write_atomically(path: Path, value: Mapping[str, Any]) -> None:
    """Write the file under a temporary name and rename it, because readers poll for it."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(value))
    os.replace(temporary, path)
