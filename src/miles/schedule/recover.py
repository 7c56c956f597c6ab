"""Checkpoints of a run: complete or absent, found again, and the cursor that says where the run stood.

A checkpoint is written into a hidden folder, every file is fsynced and listed with its digest in
``manifest.json``, and the folder is renamed into place: whatever dies whenever, a folder named
``step-…`` is whole. What an interrupted write left behind is removed by the next save.

    begin    the trainer writes into a draft, or has copied what it will write        training waits
    finish   wait for the notes of its ranks, seal, rename, prune                     training may go on
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from miles.core import notes
from miles.core.errors import CheckpointError
from miles.core.notes import Written

_NAME = re.compile(r"step-(\d{6,})")

# Seconds without a word or a byte from a rank that still writes: after so many it is given up; after fewer when the
# run is failing anyway.
_PATIENCE, _HURRY = 1800.0, 120.0


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


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is not there yet: its folder for now, and what it will be called."""

    folder: Path
    name: str
    cursor: Cursor


class Checkpoints:
    """The ``checkpoints/`` folder of a run. ``keep`` bounds how many complete ones stay.

    In the ``background`` a checkpoint is finished while training goes on; a ``forgiving`` run goes on, with a warning,
    when one could not be written. Both are for whoever calls ``begin`` and ``finish`` to heed.
    """

    def __init__(
        self, folder: Path, *, keep: int | None = None, background: bool = False, forgiving: bool = False
    ) -> None:
        self.background, self.forgiving = background, forgiving
        self._folder = folder
        self._keep = keep
        self._patience = _PATIENCE

    async def save(self, cursor: Cursor, write: Callable[[Path], Awaitable[None]]) -> str:
        """Write one checkpoint, atomically, and prune old ones; its folder's name is returned."""
        return self.finish(await self.begin(cursor, write))

    async def begin(self, cursor: Cursor, write: Callable[[Path], Awaitable[None]]) -> Draft:
        """Have the trainer ``write`` into a draft; what it has not written then, it writes by itself."""
        name = name_of(cursor.step)
        # A name of its own: a rank of an earlier life that has not died yet must find no folder to write to.
        draft = Draft(self._folder / f".writing-{name}-{secrets.token_hex(4)}", name, cursor)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for torn in self._folder.glob(".writing-*"):
                shutil.rmtree(torn, ignore_errors=True)
            draft.folder.mkdir()
            await write(draft.folder)
        except (OSError, CheckpointError) as error:
            raise self._failed(draft, error) from error
        return draft

    def finish(self, draft: Draft) -> str:
        """Wait until the draft is whole, put it in place and prune old checkpoints; gives its name.

        Where it cannot be made whole it is removed.
        """
        try:
            notes.wait_for_all(draft.folder, lambda: self._patience)
            written = notes.outcome(draft.folder)
            notes.clear(draft.folder)
            (draft.folder / "cursor.json").write_text(json.dumps(asdict(draft.cursor), indent=1, sort_keys=True))
            self._seal(draft.folder, written)
            self._put_in_place(draft.folder, self._folder / draft.name)
        except (OSError, CheckpointError) as error:
            raise self._failed(draft, error) from error
        self._prune()
        return draft.name

    def hurry(self) -> None:
        """Do not wait long for a rank that may be gone."""
        self._patience = _HURRY

    def _failed(self, draft: Draft, error: OSError | CheckpointError) -> CheckpointError:
        shutil.rmtree(draft.folder, ignore_errors=True)
        cause = error.strerror if isinstance(error, OSError) and error.strerror else error
        return CheckpointError(
            f"could not write checkpoint {self._folder / draft.name}: {cause}; "
            f"the checkpoints before it are untouched (latest: {self._latest_name() or 'none'})"
        )

    def folder_of(self, name: str) -> Path:
        """Where the checkpoint of that name is."""
        return self._folder / name

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

    def _seal(self, draft: Path, written: Mapping[str, Written]) -> None:
        """List every file with size and digest, and force all of it to disk; what is ``written`` its rank has."""
        files = sorted(p for p in draft.rglob("*") if p.is_file())
        listing: dict[str, dict[str, Any]] = {}
        for path in files:
            name = str(path.relative_to(draft))
            listing[name] = asdict(written.get(name) or Written(path.stat().st_size, _sha256(path)))
            if listing[name]["bytes"] != path.stat().st_size:
                raise CheckpointError(f"{name} has {path.stat().st_size} bytes, of {listing[name]['bytes']} written")
        if gone := written.keys() - listing.keys():
            raise CheckpointError(f"{min(gone)} was written and is not there")
        (draft / "manifest.json").write_text(json.dumps(listing, indent=1, sort_keys=True))
        folders = [path for path in draft.rglob("*") if path.is_dir()]
        for path in [*files, draft / "manifest.json", *folders, draft]:
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
