"""Checkpoints of a run: complete or absent, found again, and the cursor that says where the run stood.

A checkpoint is written into a hidden folder, every file is fsynced and listed with its digest in
``manifest.json``, and the folder is renamed into place: whatever dies whenever, a folder named
``step-…`` is whole. What an interrupted write left behind is removed by the next save.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from miles.core.errors import CheckpointError

_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where a run stands after ``step`` steps: what is needed, beside the weights, to go on exactly.

    ``ticket`` is the oldest ticket not yet dealt with, ``dealt`` those above it that were, ``source``
    the prompt source's state just before ``ticket`` was drawn, ``marks`` the logs' offsets.
    """

    step: int
    version: int
    ticket: int = 0
    dealt: tuple[int, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)
    marks: Mapping[str, int] = field(default_factory=dict)


class Checkpoints:
    """The ``checkpoints/`` folder of a run. ``keep`` bounds how many complete ones stay."""

    def __init__(self, folder: Path, *, keep: int | None = None) -> None:
        self._folder = folder
        self._keep = keep

    async def save(self, cursor: Cursor, write: Callable[[Path], Awaitable[None]]) -> str:
        """Write one checkpoint, atomically, and prune old ones; its folder's name is returned."""
        name = name_of(cursor.step)
        self._folder.mkdir(parents=True, exist_ok=True)
        for torn in self._folder.glob(".writing-*"):
            shutil.rmtree(torn)
        draft = self._folder / f".writing-{name}"
        draft.mkdir()
        try:
            await write(draft)
            (draft / "cursor.json").write_text(json.dumps(asdict(cursor), indent=1, sort_keys=True))
            self._seal(draft)
            self._put_in_place(draft, self._folder / name)
        except OSError as error:
            raise CheckpointError(
                f"could not write checkpoint {self._folder / name}: {error.strerror or error}; "
                f"the checkpoints before it are untouched (latest: {self._latest_name() or 'none'})"
            ) from error
        self._prune()
        return name

    def latest(self) -> tuple[Path, Cursor] | None:
        """The newest complete checkpoint and its cursor, or None in a fresh folder."""
        name = self._latest_name()
        return None if name is None else (self._folder / name, read_cursor(self._folder / name))

    def _latest_name(self) -> str | None:
        return max((p.name for p in self._complete()), key=_step_of, default=None)

    def _complete(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted((p for p in self._folder.iterdir() if _NAME.fullmatch(p.name)), key=lambda p: _step_of(p.name))

    def _seal(self, draft: Path) -> None:
        """List every file with size and digest, and force all of it to disk."""
        files = sorted(p for p in draft.rglob("*") if p.is_file())
        listing = {str(p.relative_to(draft)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
        (draft / "manifest.json").write_text(json.dumps(listing, indent=1, sort_keys=True))
        for path in [*files, draft / "manifest.json", draft]:
            _fsync(path)

    def _put_in_place(self, draft: Path, final: Path) -> None:
        if final.exists():  # the same step, saved in an earlier life of this run
            old = final.with_name(f".writing-old-{final.name}")
            os.rename(final, old)
            os.rename(draft, final)
            shutil.rmtree(old)
        else:
            os.rename(draft, final)
        _fsync(self._folder)

    def _prune(self) -> None:
        if self._keep is not None:
            for old in self._complete()[: -self._keep]:
                shutil.rmtree(old)


def name_of(step: int) -> str:
    """What the checkpoint after ``step`` steps is called."""
    return f"step-{step:06d}"


def read_cursor(folder: Path) -> Cursor:
    """The cursor of one checkpoint, after checking that every file is what was written."""
    verify(folder)
    raw = json.loads((folder / "cursor.json").read_text())
    return Cursor(**{**raw, "dealt": tuple(raw["dealt"])})


def verify(folder: Path) -> None:
    """Refuse a checkpoint any file of which is missing or has other bytes than when it was sealed."""
    try:
        listing = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint this program wrote (manifest.json: {error}); "
            "name another with --load, or remove it to go on from the one before"
        ) from error
    for name, entry in listing.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or _sha256(path) != entry["sha256"]:
            raise CheckpointError(
                f"{path} is missing or damaged since it was saved; remove {folder} to go on from the checkpoint before"
            )


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
