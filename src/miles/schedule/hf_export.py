"""Export of checkpoints as plain Hugging Face folders (--save-hf): model and tokenizer, without the optimizer."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from miles.core.events import Event, Saved

_OWN_FILES = ("cursor.json", "manifest.json", "trainer.json")
"""Files of a checkpoint that continue a run and are no part of the model."""
DRAFT = "draft"
"""Subfolder of a checkpoint with an EAGLE-3 head, which is served beside the model."""


class HfExport:
    """Copies the model of every complete checkpoint in ``checkpoints`` to the folder of its step.

    Files are linked where the file system allows it, so a copy takes no space while the checkpoint is there. A folder
    appears complete or not at all, and replaces one of the same name. With ``convert`` the model is written by that,
    given the checkpoint and a folder that does not exist.
    """

    def __init__(
        self,
        checkpoints: Path,
        find_target: Callable[[int], Path],
        convert: Callable[[Path, Path], None] | None = None,
    ) -> None:
        self._checkpoints = checkpoints
        self._find_target = find_target
        self._convert = link_model if convert is None else convert

    def __call__(self, event: Event) -> None:
        if isinstance(event, Saved):
            _export(self._checkpoints / event.name, self._find_target(event.step), self._convert)

    def commit(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is open."""


def link_model(checkpoint: Path, target: Path) -> None:
    """Copy or link the files of the model."""
    _link_files(checkpoint, target)


def list_model_files(folder: Path) -> list[Path]:
    """Return the files of a folder of a checkpoint without those that continue a run."""
    files = (file for file in sorted(folder.iterdir()) if file.is_file() and file.name not in _OWN_FILES)
    return [file for file in files if not file.name.startswith("optimizer")]


def _link_files(folder: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for file in list_model_files(folder):
        _link_or_copy(file, target / file.name)


def _export(checkpoint: Path, target: Path, convert: Callable[[Path, Path], None]) -> None:
    partial = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    convert(checkpoint, partial)
    if (checkpoint / DRAFT).is_dir():
        _link_files(checkpoint / DRAFT, partial / DRAFT)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, target)
