"""Checkpoints of adapters on disk: a folder each, complete or absent, in PEFT's format, with the training state.

A folder is never overwritten: a checkpoint that is saved again under its name gets a folder of its own. Folders that no
checkpoint has are removed only when the journal was shortened, as it may still name them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from miles.backends.service.adapter import STATE, Adapter, sync_folder, write_peft
from miles.backends.service.state import FOLDERS, Checkpoint, CheckpointKind
from miles.models.spec import DecoderSpec
from miles.rollout.serving.errors import RequestError

__all__ = ["CheckpointFiles", "check_name"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(name: object) -> str:
    """Return a checkpoint's name; RequestError if it is none."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise RequestError(
            f"{name!r} is no name of a checkpoint: use up to 128 letters, digits, dots, hyphens and underscores.",
            status=422,
        )
    return name


class CheckpointFiles:
    """The folders of all checkpoints, and those of adapters in training. The trainer's thread writes them."""

    def __init__(self, folder: Path, spec: DecoderSpec, base_model: str) -> None:
        self.folder = folder / "checkpoints"
        self.adapters = folder / "adapters"
        self.evicted = folder / "evicted"
        shutil.rmtree(self.evicted, ignore_errors=True)
        for each in (self.folder, self.adapters, self.evicted):
            each.mkdir(parents=True, exist_ok=True)
        known = (
            int(each.name.partition("-")[0])
            for each in (*self.folder.iterdir(), *self.adapters.iterdir())
            if each.name[0].isdigit()
        )
        self._numbers = count(max(known, default=0) + 1)
        self._spec = spec
        self._base_model = base_model

    def write(self, adapter: Adapter, kind: CheckpointKind, name: str) -> tuple[str, int]:
        """Write a checkpoint; returns its folder's name and its size."""
        folder = self.folder / f"{next(self._numbers)}-{FOLDERS[kind]}-{name}"
        temporary = self.folder / f"tmp-{folder.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        write_peft(temporary, adapter, self._spec, self._base_model)
        if kind == "training":
            adapter.save(temporary / STATE)
        sync_folder(temporary)
        os.rename(temporary, folder)
        sync_folder(self.folder)
        return folder.name, sum(file.stat().st_size for file in folder.iterdir())

    def load(self, adapter: Adapter, folder: str, *, optimizer: bool) -> None:
        """Load the training checkpoint in a folder into an adapter of the same shape."""
        adapter.load(self.folder / folder / STATE, optimizer=optimizer)

    def find(self, checkpoint: Checkpoint) -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / checkpoint.folder

    def save_adapter(self, adapter: Adapter) -> str:
        """Save the state of an adapter in training; returns the file's name."""
        file = self.adapters / f"{next(self._numbers)}-adapter.safetensors"
        adapter.save(file)
        return file.name

    def remove_unused(self, checkpoints: Iterable[Checkpoint], adapters: Iterable[str]) -> None:
        """Remove the folders and files that nothing names any more."""
        kept = {checkpoint.folder for checkpoint in checkpoints}
        for folder in self.folder.iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        used = set(adapters)
        for file in self.adapters.iterdir():
            if file.name not in used:
                file.unlink()
