"""Weights in Megatron's own distributed format, for other programs that speak it; any layout reads any other's.

A run's checkpoints are Hugging Face folders and need none of this.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state

from miles.backends.megatron.model import MegatronModel
from miles.core.errors import CheckpointError, UsageError


def save(model: MegatronModel, folder: Path) -> None:
    """Write ``folder``; all ranks call, and all write."""
    if find_spec("psutil") is None:
        raise UsageError("Megatron-Core writes checkpoints with psutil, and waits for ever without it; install psutil.")
    if model.peers.lead:
        folder.mkdir(parents=True, exist_ok=True)
    _together(model)
    dist_checkpointing.save(_state(model), str(folder))
    _together(model)


def load(model: MegatronModel, folder: Path) -> None:
    """Fill this rank's weights with what ``save`` wrote, whatever layout it had; all ranks call."""
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise CheckpointError(f"{folder} is no distributed checkpoint of Megatron's; give a folder that it wrote.")
    found: Any = dist_checkpointing.load(_state(model), str(folder))
    for name, chunk in model.chunks().items():
        chunk.load_state_dict(found[name], strict=True)
    model.adopt()


def _state(model: MegatronModel) -> dict[str, Any]:
    about = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {name: chunk.sharded_state_dict(metadata=about) for name, chunk in model.chunks().items()}


def _together(model: MegatronModel) -> None:
    model.rings.everyone.sum(torch.zeros((), device=model.device))
