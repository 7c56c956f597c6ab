"""Checkpoint directory of a run: atomic checkpoints, and the cursor from which a run resumes.

A checkpoint is written into a hidden folder, every file is fsynced and listed with its digest in
``manifest.json``, and the folder is renamed into place: a folder named ``step-…`` is always complete. It gets a hidden
name before it is deleted. The next save removes what an interrupted write or deletion left behind.

    begin    the trainer writes into a draft folder, or takes a snapshot to write     training waits
    finish   wait for the completion markers of all ranks, seal, rename, prune        training may continue
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

from miles.core import markers
from miles.core.errors import CheckpointError, describe_error
from miles.core.markers import FileDigest

_NAME = re.compile(r"step-(\d{6,})")
_DRAFT = ".writing-"
_CURSOR = "cursor.json"

# Seconds without progress of a writing rank after which the save fails; shorter when the run is failing anyway.
_TIMEOUT = 1800.0
_TIMEOUT_AFTER_FAILURE = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The state of a run after ``step`` steps: what exact resumption needs besides the weights.

    ``ticket`` is the oldest unconsumed ticket, ``done_tickets`` the consumed ones above it, ``source`` the prompt
    source's state just before ``ticket`` was read, ``log_offsets`` the length of each log.
    """

    step: int
    version: int
    ticket: int = 0
    done_tickets: tuple[int, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)
    log_offsets: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointDraft:
    """An unfinished checkpoint: its temporary folder and its final name."""

    folder: Path
    name: str
    cursor: Cursor


class CheckpointDirectory:
    """The ``checkpoints/`` folder of a run. ``keep`` bounds the number of complete checkpoints.

    ``background``: checkpoints are finished while training continues. ``forgiving``: a failed save is a warning. The
    caller of ``begin`` and ``finish`` implements both.
    """

    def __init__(
        self, folder: Path, *, keep: int | None = None, background: bool = False, forgiving: bool = False
    ) -> None:
        self.background = background
        self.forgiving = forgiving
        self._folder = folder
        self._keep = keep
        self._timeout = _TIMEOUT

    async def save(self, cursor: Cursor, write: Callable[[Path], Awaitable[None]]) -> str:
        """Write one checkpoint atomically and prune old ones; returns its folder's name."""
        return self.finish(await self.begin(cursor, write))

    async def begin(self, cursor: Cursor, write: Callable[[Path], Awaitable[None]]) -> CheckpointDraft:
        """Let the trainer ``write`` into a draft folder; it may continue writing in the background."""
        name = checkpoint_name(cursor.step)
        # A unique name: a rank of a previous process that is still alive must not find a folder to write to.
        draft = CheckpointDraft(self._folder / f"{_DRAFT}{name}-{secrets.token_hex(4)}", name, cursor)
        try:
            self._folder.mkdir(exist_ok=True)  # in a directory that was removed meanwhile, nothing is saved
            for stale in self._folder.glob(f"{_DRAFT}*"):
                shutil.rmtree(stale, ignore_errors=True)
            draft.folder.mkdir()
            await write(draft.folder)
        except (OSError, CheckpointError) as error:
            raise self._discard(draft, error) from error
        return draft

    def finish(self, draft: CheckpointDraft) -> str:
        """Wait until the draft is complete, rename it into place and prune old checkpoints; returns its name.

        A draft that cannot be completed is removed.
        """
        try:
            markers.wait_for_all_ranks(draft.folder, lambda: self._timeout)
            files = markers.collect_files(draft.folder)
            markers.clear_markers(draft.folder)
            (draft.folder / _CURSOR).write_text(json.dumps(asdict(draft.cursor), indent=1, sort_keys=True))
            self._seal(draft.folder, files)
            self._rename_into_place(draft.folder, self._folder / draft.name)
        except (OSError, CheckpointError) as error:
            raise self._discard(draft, error) from error
        self._prune()
        return draft.name

    def shorten_timeout(self) -> None:
        """Wait less for ranks that may be gone, because the run is failing."""
        self._timeout = _TIMEOUT_AFTER_FAILURE

    def _discard(self, draft: CheckpointDraft, error: OSError | CheckpointError) -> CheckpointError:
        shutil.rmtree(draft.folder, ignore_errors=True)
        cause = error.strerror if isinstance(error, OSError) and error.strerror else error
        return CheckpointError(
            f"could not write checkpoint {self._folder / draft.name}: {cause}; "
            f"earlier checkpoints are intact (latest: {self._latest_name() or 'none'})"
        )

    def get_path(self, name: str) -> Path:
        """Return the folder of a checkpoint."""
        return self._folder / name

    def latest(self) -> tuple[Path, Cursor] | None:
        """Return the newest complete checkpoint and its cursor; None if there is none."""
        name = self._latest_name()
        return None if name is None else (self._folder / name, read_cursor(self._folder / name))

    def _latest_name(self) -> str | None:
        return max((p.name for p in self._complete()), key=_parse_step, default=None)

    def _complete(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted((p for p in self._folder.iterdir() if _NAME.fullmatch(p.name)), key=lambda p: _parse_step(p.name))

    def _seal(self, draft: Path, digests: Mapping[str, FileDigest]) -> None:
        """List every file with size and digest in the manifest and fsync; ``digests`` are those the ranks reported."""
        files = sorted(p for p in draft.rglob("*") if p.is_file())
        listing: dict[str, dict[str, Any]] = {}
        for path in files:
            name = str(path.relative_to(draft))
            listing[name] = asdict(digests.get(name) or FileDigest(path.stat().st_size, _sha256(path)))
            if path.suffix == ".safetensors":
                listing[name]["tensors"] = _read_tensor_table(path)
            if listing[name]["bytes"] != path.stat().st_size:
                raise CheckpointError(
                    f"{name} has {path.stat().st_size} bytes, but {listing[name]['bytes']} were written"
                )
        if missing := digests.keys() - listing.keys():
            raise CheckpointError(f"{min(missing)} was written but is missing")
        (draft / "manifest.json").write_text(json.dumps(listing, indent=1, sort_keys=True))
        folders = [path for path in draft.rglob("*") if path.is_dir()]
        for path in [*files, draft / "manifest.json", *folders, draft]:
            _fsync(path)

    def _rename_into_place(self, draft: Path, final: Path) -> None:
        if final.exists():  # the same step, saved before the run was resumed
            old = final.with_name(f"{_DRAFT}old-{final.name}-{secrets.token_hex(4)}")
            os.rename(final, old)
            os.rename(draft, final)
            shutil.rmtree(old)
        else:
            os.rename(draft, final)
        _fsync(self._folder)

    def _prune(self) -> None:
        """Delete all but the newest; a deletion that is interrupted leaves no folder that looks complete."""
        try:
            for old in () if self._keep is None else self._complete()[: -self._keep]:
                hidden = old.with_name(f"{_DRAFT}old-{old.name}-{secrets.token_hex(4)}")
                os.rename(old, hidden)
                shutil.rmtree(hidden)
        except OSError as error:
            raise CheckpointError(
                f"the oldest checkpoint of {self._folder} could not be deleted ({error.strerror}), as "
                f"--keep-checkpoints {self._keep} asks; the newest, {self._latest_name()}, is complete"
            ) from error


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint after ``step`` steps."""
    return f"step-{step:06d}"


def read_cursor(folder: Path) -> Cursor:
    """Return the cursor of a checkpoint after verifying its files."""
    verify_checkpoint(folder)
    try:
        raw = json.loads((folder / _CURSOR).read_text())
        return Cursor(**{**raw, "done_tickets": tuple(raw["done_tickets"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _invalid_checkpoint(folder, f"{_CURSOR}: {describe_error(error)}") from error


def verify_checkpoint(folder: Path) -> None:
    """Raise CheckpointError if any file is missing or differs from the manifest."""
    listing = _read_manifest(folder)
    if _CURSOR not in listing:
        raise _invalid_checkpoint(folder, f"manifest.json does not list {_CURSOR}")
    for name, digest in listing.items():
        if not _is_intact(folder / name, digest):
            raise CheckpointError(
                f"{folder / name} is missing or damaged; remove {folder} to resume from the previous checkpoint"
            )


def verify_weights(folder: Path) -> None:
    """Raise CheckpointError if a file of the model in a checkpoint of a run differs from the manifest.

    The optimizer's files are not read, and a folder that is no checkpoint of a run has nothing to compare with.
    """
    if not (folder / _CURSOR).is_file():
        return
    for name, digest in _read_manifest(folder).items():
        if "/" not in name and not name.startswith("optimizer") and not _is_intact(folder / name, digest):
            raise CheckpointError(f"{folder / name} is missing or damaged; name another checkpoint of its run")


def _read_manifest(folder: Path) -> dict[str, FileDigest]:
    try:
        listing = json.loads((folder / "manifest.json").read_text())
        return {str(name): FileDigest(int(file["bytes"]), str(file["sha256"])) for name, file in listing.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _invalid_checkpoint(folder, f"manifest.json: {describe_error(error)}") from error


def _invalid_checkpoint(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} is not a valid checkpoint ({reason}); choose another with --load, or remove it to resume from the "
        "previous one"
    )


def _is_intact(path: Path, digest: FileDigest) -> bool:
    try:
        return path.is_file() and path.stat().st_size == digest.bytes and _sha256(path) == digest.sha256
    except OSError:
        return False


def _read_tensor_table(path: Path) -> dict[str, dict[str, Any]]:
    """Return dtype and shape of every tensor in a safetensors file, for the manifest."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: {"dtype": entry["dtype"], "shape": entry["shape"]} for name, entry in tensors.items()}


def _parse_step(name: str) -> int:
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
