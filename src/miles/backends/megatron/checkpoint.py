"""Megatron's distributed checkpoints (torch_dist) of weights and optimizer, which any parallel layout reads.

``--ckpt-format torch_dist`` saves a run's weights in this format, and the optimizer's state too if it is Megatron's.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from miles.backends.megatron.distributed_optimizer import MegatronOptimizer
from miles.backends.megatron.module_choice import has_stacked_layers
from miles.backends.megatron.sharded_params import (
    build_empty_params,
    build_replicated,
    build_sharded_params,
    find_difference,
    join_params,
)
from miles.core.errors import CheckpointError, UsageError
from miles.models.checkpoint.torch_dist import TorchDistReader, build_model_args
from miles.models.checkpoint.torch_dist_folders import check_torch_dist
from miles.train.optim.optimizer import OptimizerProtocol

if TYPE_CHECKING:
    from miles.backends.megatron.model import MegatronModel

_OPTIMIZER, _PROGRESS = "optimizer", "miles"


class InProcessSaveStrategy(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by torch in the calling process.

    Megatron's own strategy forks writers, which the ranks of a run, being daemon processes, may not. With a ``group``
    that nothing else uses tensors are only copied to the host: ``write`` then writes them, in any thread.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        super().__init__("torch_dist", 1)
        self._device, self._group = device, group
        self.write: Callable[[], None] | None = None

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        if self._group is not None:
            _copy_to_host(flat)
        state = mcore_to_pyt_state_dict(flat, False)
        if self._group is None:
            self._write(state, Path(checkpoint_dir))
        else:
            self.write = partial(self._write_copied, state, Path(checkpoint_dir))

    def _write_copied(self, state: dict[str, Any], folder: Path) -> None:
        """Write a state that training has left; CheckpointError instead of torch's, which is no Exception."""
        try:
            self._write(state, folder)
        except CheckpointException as error:
            raise _as_checkpoint_error(folder, error) from error

    def _write(self, state: dict[str, Any], folder: Path) -> None:
        if self._device.type == "cuda":  # torch's writer takes the current GPU of its thread
            torch.cuda.set_device(self._device)
        save_state_dict(
            state,
            storage_writer=FileSystemWriter(folder),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._group,
        )


def _copy_to_host(flat: Mapping[str, Sequence[ShardedBase]]) -> None:
    """Replace the tensors of a state by copies in host memory, which training does not change."""
    for sharded in (each for parts in flat.values() for each in parts):
        if isinstance(sharded, ShardedTensor) and sharded.data is not None:
            sharded.data = sharded.data.detach().to("cpu", copy=True)


def save(
    model: MegatronModel,
    folder: Path,
    optimizer: OptimizerProtocol | None = None,
    *,
    iteration: int = 0,
    group: dist.ProcessGroup | None = None,
    gather_unit: Callable[[str], Tensor] | None = None,
    replicated: Mapping[str, Tensor] | None = None,
) -> Callable[[], None] | None:
    """Write ``folder``; all ranks call, and all write. An ``optimizer`` must be a MegatronOptimizer.

    The weights are those of ``model``, or the full tensors of ``gather_unit``, if they are base and adapters apart, and
    ``replicated`` ones, which every rank has. ``iteration`` is the number that Megatron's tools read from the
    checkpoint. With a ``group`` of all ranks over gloo tensors are copied, and what is returned writes them: a thread
    of every rank calls it, one checkpoint at a time.
    """
    megatron_optimizer = _as_megatron_optimizer(optimizer)
    if model.dp_group.is_lead:
        folder.mkdir(parents=True, exist_ok=True)
    model.barrier()
    by_param = gather_unit is not None or model.has_adapted_parts
    state: dict[str, Any] = {"model": build_sharded_params(model, gather_unit)} if by_param else _state(model)
    state["replicated"] = build_replicated(model, replicated or {})
    state |= {"args": Namespace(**build_model_args(model.spec)), "iteration": iteration, "checkpoint_version": 3.0}
    if megatron_optimizer is not None:
        megatron_optimizer.init_state()
        state[_OPTIMIZER] = megatron_optimizer.inner.sharded_state_dict(_names_source(state), metadata=_metadata(model))
        state[_PROGRESS] = {"updates": megatron_optimizer.updates, "steps": megatron_optimizer.steps}
    strategy = InProcessSaveStrategy(model.device, group)
    try:
        dist_checkpointing.save(state, str(folder), strategy)
    except (CheckpointingException, CheckpointException) as error:
        raise _as_checkpoint_error(folder, error) from error
    model.barrier()
    return strategy.write


def _as_checkpoint_error(folder: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"Megatron could not write {folder}: {_first_line(error)}")


def load(model: MegatronModel, folder: Path, optimizer: OptimizerProtocol | None = None) -> None:
    """Load this rank's weights, and its ``optimizer``, from what ``save`` wrote in any layout.

    All ranks call. Without an optimizer that of the checkpoint is ignored; load weights so before building one.
    """
    megatron_optimizer = _as_megatron_optimizer(optimizer)
    if model.has_adapted_parts:
        assert megatron_optimizer is None, "adapters have an optimizer of ours"
        model.set_params(read_params(model, folder))
        return
    check_torch_dist(folder)
    if megatron_optimizer is not None and _PROGRESS not in _read_common(folder):
        raise CheckpointError(f"{folder} has weights but no optimizer state; load it without an optimizer.")
    state = _state(model)
    if megatron_optimizer is not None:
        megatron_optimizer.init_state()
        state[_OPTIMIZER] = megatron_optimizer.inner.sharded_state_dict(
            _names_source(state), is_loading=True, metadata=_metadata(model)
        )
    found = _load_state(model, folder, state)
    for name, chunk in model.chunks().items():
        chunk.load_state_dict(found[name], strict=True)
    model.adopt()
    if megatron_optimizer is not None:
        megatron_optimizer.load_inner(found[_OPTIMIZER])
        megatron_optimizer.resume(**found[_PROGRESS])


def read_params(model: MegatronModel, folder: Path) -> dict[str, Tensor]:
    """Read this rank's part of each parameter of ``model`` to the host, whatever layout wrote it; all ranks call."""
    stored = TorchDistReader(folder).shapes()
    found = _load_state(model, folder, {"model": build_empty_params(model, stored)})
    return join_params(model, found["model"])


def find_different_weight(model: MegatronModel, folder: Path, gather_unit: Callable[[str], Tensor]) -> str | None:
    """Return the first weight of a checkpoint that differs from the full tensors of ``gather_unit``; all ranks call."""
    return find_difference(model, read_params(model, folder), gather_unit)


def _load_state(model: MegatronModel, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    try:
        found: Any = dist_checkpointing.load(state, str(folder))
    except (CheckpointingException, CheckpointException, KeyError) as error:
        raise CheckpointError(
            f"{folder} cannot be loaded into a {model.spec.family} model of this size: {_first_line(error)}"
        ) from error
    return found


def _read_common(folder: Path) -> dict[str, Any]:
    try:
        return dist_checkpointing.load_common_state_dict(str(folder))
    except (CheckpointingException, pickle.UnpicklingError, RuntimeError, OSError) as error:
        raise CheckpointError(f"{folder / 'common.pt'} cannot be read: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:  # the errors of all ranks
        return _first_line(next(iter(error.failures.values()))[0])
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def _as_megatron_optimizer(optimizer: OptimizerProtocol | None) -> MegatronOptimizer | None:
    if optimizer is None or isinstance(optimizer, MegatronOptimizer):
        return optimizer
    raise UsageError(
        "Megatron checkpoints only store the state of Megatron's optimizer: add --megatron-use-distributed-optimizer, "
        "or save the weights without an optimizer."
    )


def _state(model: MegatronModel) -> dict[str, Any]:
    return {name: chunk.sharded_state_dict(metadata=_metadata(model)) for name, chunk in model.chunks().items()}


def _names_source(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict from which the optimizer takes tensor names: one chunk's, or all."""
    return state["model"] if "model" in state else {name: part for name, part in state.items() if "model" in name}


def _metadata(model: MegatronModel) -> dict[str, Any]:
    return {
        "non_homogeneous_layers": not has_stacked_layers(model.spec),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
