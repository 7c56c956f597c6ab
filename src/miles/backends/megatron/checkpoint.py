"""Megatron's own distributed checkpoints of weights and optimizer, for other programs that use the format.

Any parallel layout reads any other's. A run's checkpoints are Hugging Face folders and do not need this.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state

from miles.backends.megatron.distributed_optimizer import MegatronOptimizer
from miles.backends.megatron.model import MegatronModel
from miles.core.errors import CheckpointError, UsageError
from miles.train.optim.optimizer import OptimizerProtocol

_OPTIMIZER, _PROGRESS = "optimizer", "miles"


def save(model: MegatronModel, folder: Path, optimizer: OptimizerProtocol | None = None) -> None:
    """Write ``folder``; all ranks call, and all write. An ``optimizer`` must be a MegatronOptimizer."""
    if find_spec("psutil") is None:
        raise UsageError("Megatron-Core needs psutil to write checkpoints and hangs without it; install psutil.")
    megatron_optimizer = _as_megatron_optimizer(optimizer)
    if model.dp_group.is_lead:
        folder.mkdir(parents=True, exist_ok=True)
    model.barrier()
    state = _state(model)
    if megatron_optimizer is not None:
        megatron_optimizer.init_state()
        state[_OPTIMIZER] = megatron_optimizer.inner.sharded_state_dict(_names_source(state), metadata=_metadata())
        state[_PROGRESS] = {"updates": megatron_optimizer.updates, "steps": megatron_optimizer.steps}
    dist_checkpointing.save(state, str(folder))
    model.barrier()


def load(model: MegatronModel, folder: Path, optimizer: OptimizerProtocol | None = None) -> None:
    """Load this rank's weights, and its ``optimizer``, from what ``save`` wrote in any layout.

    All ranks call. Without an optimizer that of the checkpoint is ignored; load weights so before building one.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise CheckpointError(f"{folder} is not a Megatron distributed checkpoint; use a folder that it wrote.")
    megatron_optimizer = _as_megatron_optimizer(optimizer)
    if megatron_optimizer is not None and _PROGRESS not in dist_checkpointing.load_common_state_dict(str(folder)):
        raise CheckpointError(f"{folder} has weights but no optimizer state; load it without an optimizer.")
    state = _state(model)
    if megatron_optimizer is not None:
        megatron_optimizer.init_state()
        state[_OPTIMIZER] = megatron_optimizer.inner.sharded_state_dict(
            _names_source(state), is_loading=True, metadata=_metadata()
        )
    found: Any = dist_checkpointing.load(state, str(folder))
    for name, chunk in model.chunks().items():
        chunk.load_state_dict(found[name], strict=True)
    model.adopt()
    if megatron_optimizer is not None:
        megatron_optimizer.inner.load_state_dict(found[_OPTIMIZER])
        megatron_optimizer.resume(**found[_PROGRESS])


def _as_megatron_optimizer(optimizer: OptimizerProtocol | None) -> MegatronOptimizer | None:
    if optimizer is None or isinstance(optimizer, MegatronOptimizer):
        return optimizer
    raise UsageError(
        "Megatron checkpoints only store the state of Megatron's optimizer: add --megatron-use-distributed-optimizer, "
        "or save the weights without an optimizer."
    )


def _state(model: MegatronModel) -> dict[str, Any]:
    return {name: chunk.sharded_state_dict(metadata=_metadata()) for name, chunk in model.chunks().items()}


def _names_source(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict from which the optimizer takes tensor names: one chunk's, or all."""
    return state["model"] if "model" in state else dict(state)


def _metadata() -> dict[str, Any]:
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
