"""Weights and optimizer in Megatron's own distributed format, for other programs that speak it.

Any layout reads any other's. A run's checkpoints are Hugging Face folders and need none of this.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state

from miles.backends.megatron.dealt import Dealt
from miles.backends.megatron.model import MegatronModel
from miles.core.errors import CheckpointError, UsageError
from miles.train.optim import Updates

_OPTIMIZER, _PROGRESS = "optimizer", "miles"


def save(model: MegatronModel, folder: Path, optimizer: Updates | None = None) -> None:
    """Write ``folder``; all ranks call, and all write. An ``optimizer`` must be Megatron's distributed one."""
    if find_spec("psutil") is None:
        raise UsageError("Megatron-Core writes checkpoints with psutil, and waits for ever without it; install psutil.")
    dealt = _dealt(optimizer)
    if model.peers.lead:
        folder.mkdir(parents=True, exist_ok=True)
    _together(model)
    state = _state(model)
    if dealt is not None:
        dealt.begin()
        state[_OPTIMIZER] = dealt.megatrons.sharded_state_dict(_chosen(state), metadata=_about())
        state[_PROGRESS] = {"updates": dealt.updates, "steps": dealt.steps}
    dist_checkpointing.save(state, str(folder))
    _together(model)


def load(model: MegatronModel, folder: Path, optimizer: Updates | None = None) -> None:
    """Fill this rank's weights, and its ``optimizer``, with what ``save`` wrote, whatever layout it had.

    All ranks call. Without an optimizer that of the checkpoint is left out; read it so before one is made.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise CheckpointError(f"{folder} is no distributed checkpoint of Megatron's; give a folder that it wrote.")
    dealt = _dealt(optimizer)
    if dealt is not None and _PROGRESS not in dist_checkpointing.load_common_state_dict(str(folder)):
        raise CheckpointError(f"{folder} holds weights and no optimizer; read it without one.")
    state = _state(model)
    if dealt is not None:
        dealt.begin()
        state[_OPTIMIZER] = dealt.megatrons.sharded_state_dict(_chosen(state), is_loading=True, metadata=_about())
    found: Any = dist_checkpointing.load(state, str(folder))
    for name, chunk in model.chunks().items():
        chunk.load_state_dict(found[name], strict=True)
    model.adopt()
    if dealt is not None:
        dealt.megatrons.load_state_dict(found[_OPTIMIZER])
        dealt.resume(**found[_PROGRESS])


def _dealt(optimizer: Updates | None) -> Dealt | None:
    if optimizer is None or isinstance(optimizer, Dealt):
        return optimizer
    raise UsageError(
        "Megatron's checkpoints hold the state of its own optimizer alone: add --megatron-use-distributed-optimizer, "
        "or save the weights without an optimizer."
    )


def _state(model: MegatronModel) -> dict[str, Any]:
    return {name: chunk.sharded_state_dict(metadata=_about()) for name, chunk in model.chunks().items()}


def _chosen(state: dict[str, Any]) -> dict[str, Any]:
    """What the optimizer takes the names of its tensors from: that of one run of layers, or those of all."""
    return state["model"] if "model" in state else dict(state)


def _about() -> dict[str, Any]:
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _together(model: MegatronModel) -> None:
    model.rings.everyone.sum(torch.zeros((), device=model.device))
