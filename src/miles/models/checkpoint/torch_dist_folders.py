"""Folders of distributed checkpoints (torch_dist): the tracker file, the names of iterations, and completeness.

Nothing here imports ``torch.distributed.checkpoint``, which takes as long as a third of torch itself.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from miles.core.errors import CheckpointError
from miles.models.checkpoint.safetensors_io import read_json

TRACKER = "latest_checkpointed_iteration.txt"
"""File that names the newest checkpoint of a folder: the number of an iteration, or ``release``."""
RELEASE = "release"
BACKEND_FILE = "metadata.json"
METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"


def is_torch_dist(folder: Path) -> bool:
    """Whether the folder is a torch_dist checkpoint, perhaps a damaged one."""
    try:
        return json.loads((folder / BACKEND_FILE).read_text()).get("sharded_backend") == "torch_dist"
    except (OSError, ValueError, AttributeError):
        return False


def format_iteration(iteration: int) -> str:
    """Return the folder name of an iteration.

    >>> format_iteration(20)
    'iter_0000020'
    """
    return f"iter_{iteration:07d}"


def find_torch_dist(folder: Path) -> Path | None:
    """Return the checkpoint in ``folder``: itself, or the one that its tracker file names; None if it has neither."""
    if is_torch_dist(folder):
        return folder
    tracker = folder / TRACKER
    if not tracker.is_file():
        return None
    word = tracker.read_text().strip()
    if word != RELEASE and not word.isdecimal():
        raise CheckpointError(f"{tracker} says {word[:40]!r}, not an iteration or {RELEASE}; correct it.")
    found = folder / (RELEASE if word == RELEASE else format_iteration(int(word)))
    if not found.is_dir():
        raise CheckpointError(f"{tracker} names {found.name}, which is missing; copy the checkpoint again.")
    return found


def check_torch_dist(folder: Path) -> None:
    """Raise CheckpointError if the folder is no torch_dist checkpoint, or an incomplete one."""
    if not (folder / BACKEND_FILE).is_file() and not (folder / METADATA_FILE).is_file():
        raise CheckpointError(f"{folder} is not a Megatron distributed checkpoint; use a folder that it wrote.")
    for name in (METADATA_FILE, BACKEND_FILE, COMMON_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} is incomplete: {name} is missing, which is written at the end; use another checkpoint."
            )
    backend = read_json(folder / BACKEND_FILE).get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(
            f"{folder} has the format {backend}, not torch_dist; write it with --ckpt-format torch_dist."
        )


def write_tracker(folder: Path, word: str) -> None:
    """Write the tracker file of ``folder``, atomically."""
    part = folder / f"{TRACKER}.part"
    part.write_text(word)
    os.replace(part, folder / TRACKER)
