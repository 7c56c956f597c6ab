"""A trainer's checkpoint: a Hugging Face model, and beside it the optimizer and a page of numbers.

The folder is itself a model that anything which reads Hugging Face format can load. Every file is
flushed to the disk before ``save`` returns; making the folder appear all at once is the caller's part.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from miles.core.errors import CheckpointError
from miles.core.types import Version
from miles.train.optim import Optimizer
from miles.train.peers import ALONE, Peers
from miles.train.roles import Stored

OPTIMIZER = "optimizer.safetensors"
NUMBERS = "trainer.json"
_FORMAT = 1


def save(folder: Path, model: Stored, optimizer: Optimizer, version: Version, peers: Peers = ALONE) -> None:
    """Write everything an exact continuation needs into an existing ``folder``."""
    model.save(folder)
    state = {name: value.contiguous() for name, value in optimizer.state().items()}
    save_file(state, folder / OPTIMIZER)
    numbers = {
        "format": _FORMAT,
        "version": {"policy": version.policy, "number": version.number},
        "updates": optimizer.updates,
    }
    (folder / NUMBERS).write_text(json.dumps(numbers, indent=2) + "\n")
    for name in (OPTIMIZER, NUMBERS, "."):
        _flush(folder / name)


def load(folder: Path, model: Stored, optimizer: Optimizer) -> Version:
    """Put weights and optimizer back as ``save`` found them; gives the version they are."""
    numbers = _numbers(folder)
    try:
        state = load_file(folder / OPTIMIZER)
    except (OSError, SafetensorError) as cause:
        raise CheckpointError(f"{folder / OPTIMIZER} cannot be read ({cause}); use an older checkpoint.") from cause
    model.load(folder)
    optimizer.load(state, updates=int(numbers["updates"]))
    return Version(str(numbers["version"]["policy"]), int(numbers["version"]["number"]))


def _numbers(folder: Path) -> dict[str, Any]:
    path = folder / NUMBERS
    try:
        numbers = json.loads(path.read_text())
    except FileNotFoundError as cause:
        raise CheckpointError(
            f"{path} is missing, so this is no training checkpoint; "
            "to start from its weights alone use --hf-checkpoint."
        ) from cause
    except (OSError, ValueError) as cause:
        raise CheckpointError(f"{path} cannot be read ({cause}); use an older checkpoint.") from cause
    if numbers.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is of format {numbers.get('format')}, and this Miles reads format {_FORMAT}.")
    return numbers


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
