"""Trainer checkpoint: a Hugging Face model, the optimizer state, and a small JSON file.

The folder is itself a model in Hugging Face format. Every tensor in it is unsharded, so a checkpoint can be loaded with
any number of ranks and any parallelism:

    all ranks      gather a tensor; its owner copies it to the host                       training waits
    every rank     writes, hashes, fsyncs and rereads its files, and writes a marker      in a thread
    the lead       adds the index, the config, the tokenizer and ``trainer.json``         in its thread

``save`` waits for the threads unless it saves in the background. The caller renames the folder into place once all
ranks have written their markers (``core.markers``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from miles.core import markers
from miles.core.errors import CheckpointError
from miles.core.types import Version
from miles.models.checkpoint.safetensors_io import ITEM_BYTES, WEIGHTS, TensorHeader, index_file_name, write_json
from miles.models.checkpoint.safetensors_io import StoredTensor as OnDisk
from miles.models.checkpoint.save import SHARD_BYTES
from miles.models.checkpoint.save_plan import CODES, DTYPES, SavePlan, SaveUnit
from miles.train.checkpoint.shards import ShardFile, TensorGroup, build_index, plan_files
from miles.train.checkpoint.staging import StagingPool
from miles.train.checkpoint.writer import ShardWriter, read_tensors
from miles.train.config import TrainConfig
from miles.train.dp_group import SINGLE_RANK, DataParallelGroup
from miles.train.model_protocols import ShardedParameters, TorchDistModel, find_torch_dist_model
from miles.train.multi_policy import FOLDER as POLICIES
from miles.train.optim.optimizer import OptimizerProtocol

OPTIMIZER = "optimizer.safetensors"
TRAINER_STATE = "trainer.json"
# Format 2 has an optimizer in several files; format 1 is readable by any version. Format 3 has weights in Megatron's
# distributed format, and says where the optimizer is.
_FORMATS = (1, 2, 3)
_TORCH_DIST = 3
_MASTER = "master"
# Seconds without progress of another rank after which a save fails.
_TIMEOUT = 600.0

# Safetensors dtype of an optimizer state entry, and its value if it is a scalar.
_EntryType = tuple[str, float | None]


class CheckpointSaver:
    """Settings, staging memory and current writer of one model's checkpoints.

    With ``background`` files are written while training continues, from a copy in host memory of the size of this
    rank's files. With ``verify`` files are read back and compared. With ``torch_dist`` weights are written in
    Megatron's distributed format.
    """

    def __init__(self, *, background: bool = False, verify: bool = True, torch_dist: bool = False) -> None:
        self.background = background
        self.verify = verify
        self.torch_dist = torch_dist
        self._pool: StagingPool | None = None
        self._writer: ShardWriter | None = None

    def start_writer(self, folder: Path, device: torch.device) -> ShardWriter:
        """Start the writer of a new checkpoint, after the previous one has finished."""
        self.wait()
        if self._pool is None:
            self._pool = StagingPool(pinned=device.type == "cuda")
        self._writer = ShardWriter(folder, self._pool, bounded=not self.background, verify=self.verify)
        return self._writer

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._writer is not None:
            self._writer.wait()
            self._writer = None


def build_saver(config: TrainConfig, *, torch_dist: bool = False) -> CheckpointSaver:
    """Build the saver from the options."""
    return CheckpointSaver(background=config.async_save, verify=config.verify_checkpoints, torch_dist=torch_dist)


def save(
    folder: Path,
    model: ShardedParameters,
    optimizer: OptimizerProtocol,
    version: Version,
    dp_group: DataParallelGroup = SINGLE_RANK,
    saver: CheckpointSaver | None = None,
    extra: Mapping[str, OnDisk] | None = None,
) -> None:
    """Write everything that exact resumption needs into an existing ``folder``; all ranks call at once.

    Tensors of ``extra`` are copied into the model's files, instead of those of the same names that it would copy.

    Returns when the files are complete and on disk or, in the background, when the model is no longer needed.
    If a rank cannot write, the lead raises the error, or reports it by its marker in the background.
    """
    saver = saver or CheckpointSaver()
    save_plan = model.save_plan()
    stores_optimizer, write_torch_dist = False, None
    if saver.torch_dist:
        saver.wait()
        how = {"iteration": version.number, "background": saver.background}
        stores_optimizer, write_torch_dist = _save_torch_dist(folder, model, optimizer, save_plan, how)
    rank, ranks = _get_rank(dp_group)
    if dp_group.is_lead:
        markers.announce_ranks(folder, ranks)
    if save_plan is not None and extra:
        copied = tuple({**dict(save_plan.extra_tensors), **extra}.items())
        save_plan = replace(save_plan, extra_tensors=copied)
    if save_plan is None:
        assert ranks == 1, "a sharded model has a save plan"
        model.save(folder)
    parts = _build_parts(model, optimizer, save_plan, ranks, weights=not saver.torch_dist, state=not stores_optimizer)
    # Everything the thread writes is fixed here, because the next step changes the optimizer's count too.
    trainer_state = _build_trainer_state(parts, optimizer, version)
    if saver.torch_dist:
        trainer_state |= {"format": _TORCH_DIST, "optimizer": "torch_dist" if stores_optimizer else "safetensors"}
    writer = saver.start_writer(folder, model.device)
    if write_torch_dist is not None:
        writer.run("Megatron's files", write_torch_dist)
    try:
        for part in parts:
            _write_part(writer, part, rank)
    except BaseException as error:
        reason = f"rank {rank} stopped saving ({type(error).__name__})"
        writer.close(lambda _: markers.mark_failed(folder, rank, reason))
        raise
    write_rest = partial(_write_lead_files, folder, parts, save_plan, trainer_state) if dp_group.is_lead else None
    writer.close(partial(_write_marker, folder, rank, write_rest))
    if not saver.background:
        saver.wait()
        _raise_failures(folder, rank, writer, dp_group)


def _save_torch_dist(
    folder: Path,
    model: ShardedParameters,
    optimizer: OptimizerProtocol,
    save_plan: SavePlan | None,
    how: Mapping[str, Any],
) -> tuple[bool, Callable[[], None] | None]:
    """Write the weights in Megatron's format, with those that every rank has besides the sharded model."""
    inner = find_torch_dist_model(model)
    assert inner is not None and save_plan is not None, "a rule requires a model of Megatron"
    own, sharded = model.parameters(), inner.parameters()
    replicated = {unit.name: own[unit.name].detach() for unit in save_plan.units if unit.name not in sharded}
    return inner.save_torch_dist(folder, optimizer, gather_unit=save_plan.gather_unit, replicated=replicated, **how)


def load(
    folder: Path,
    model: ShardedParameters,
    optimizer: OptimizerProtocol,
    dp_group: DataParallelGroup = SINGLE_RANK,
) -> Version:
    """Load weights and optimizer state, whatever parallelism wrote them; returns their version."""
    trainer_state = _read_trainer_state(folder)
    version = Version(str(trainer_state["version"]["policy"]), int(trainer_state["version"]["number"]))
    if trainer_state["format"] == _TORCH_DIST:
        _check_torch_dist_optimizer(folder, model, trainer_state)
        if trainer_state["optimizer"] == "torch_dist":
            assert isinstance(model, TorchDistModel)
            model.load_torch_dist(folder, optimizer)
            return version
    try:
        tensors = read_tensors(folder, OPTIMIZER)
    except (CheckpointError, OSError) as cause:
        raise CheckpointError(f"{folder / OPTIMIZER} cannot be read ({cause}); use an older checkpoint.") from cause
    model.load(folder)
    state = dict(_shard_state(model, tensors))
    optimizer.load(state, updates=int(trainer_state["updates"]))
    model.after_update()
    return version


def find_version(folder: Path, number: int) -> Path | None:
    """Return the checkpoint beside ``folder`` with this version of the same policy, the first if there are several."""
    folder = folder.resolve()
    step = folder.parents[1] if folder.parent.name == POLICIES else folder
    beside = (other / folder.relative_to(step) for other in sorted(step.parent.glob("step-*")))
    trained = (each for each in beside if (each / TRAINER_STATE).is_file())
    return next((each for each in trained if _read_trainer_state(each)["version"]["number"] == number), None)


def _check_torch_dist_optimizer(folder: Path, model: ShardedParameters, trainer_state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if this model cannot read Megatron's format."""
    if find_torch_dist_model(model) is None:
        raise CheckpointError(
            f"{folder} is in Megatron's torch_dist format; resume with --train-backend megatron, or start from its "
            f"weights: miles convert {folder} OUT --format bfloat16, and --hf-checkpoint OUT."
        )
    if trainer_state.get("optimizer") == "torch_dist" and not isinstance(model, TorchDistModel):
        raise CheckpointError(
            f"{folder} has no adapter because its weights were trained; leave --lora-rank out, or start from it as "
            "--hf-checkpoint."
        )
    if trainer_state.get("optimizer") not in ("torch_dist", "safetensors"):
        raise CheckpointError(
            f"{folder / TRAINER_STATE} does not say where the optimizer's state is; use an older checkpoint."
        )


def _get_rank(dp_group: DataParallelGroup) -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dp_group is not SINGLE_RANK else (0, 1)


# -- planning ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """Tensor groups in the file ``name``, or in shards of it with an index."""

    name: str
    groups: Sequence[TensorGroup]
    files: Sequence[ShardFile]


def _build_parts(
    model: ShardedParameters,
    optimizer: OptimizerProtocol,
    save_plan: SavePlan | None,
    ranks: int,
    *,
    weights: bool = True,
    state: bool = True,
) -> list[_Part]:
    parts: list[_Part] = []
    if save_plan is not None:
        units = _build_unit_groups(model, save_plan.units, save_plan.gather_unit) if weights else []
        tensors = [*units, *map(_build_copied_group, save_plan.extra_tensors)] if weights else []
        if tensors:
            parts.append(_Part(WEIGHTS, tensors, plan_files(WEIGHTS, tensors, ranks, SHARD_BYTES)))
        for name, extra_units in save_plan.extra_files.items():
            groups = _build_unit_groups(model, extra_units)
            parts.append(_Part(name, groups, plan_files(name, groups, 1, None)))
    if state:
        groups = _build_optimizer_groups(model, optimizer, save_plan, ranks)
        limit = None if ranks == 1 else SHARD_BYTES  # with several ranks, completed files show progress
        parts.append(_Part(OPTIMIZER, groups, plan_files(OPTIMIZER, groups, ranks, limit)))
    return parts


def _build_unit_groups(
    model: ShardedParameters, units: Sequence[SaveUnit], gather_unit: Callable[[str], Tensor] | None = None
) -> list[TensorGroup]:
    local = model.parameters()

    def gather(name: str) -> Tensor:
        return _gather(model, name, lambda: local[name]) if gather_unit is None else gather_unit(name)

    return [TensorGroup(tensors=u.headers(), gather=partial(gather, u.name), views=u.views) for u in units]


def _build_copied_group(entry: tuple[str, OnDisk]) -> TensorGroup:
    name, stored = entry
    return TensorGroup(
        tensors=(TensorHeader(name, stored.dtype, stored.shape, stored.stop - stored.start),), stored=stored
    )


def _build_optimizer_groups(
    model: ShardedParameters, optimizer: OptimizerProtocol, save_plan: SavePlan | None, ranks: int
) -> list[TensorGroup]:
    """Return the optimizer state, and float32 masters of weights that the model files round."""
    local, state = model.parameters(), optimizer.state()
    entries: dict[str, _EntryType] = {}
    for name in state:
        value = state[name]
        entries[name] = CODES[value.dtype], None if value.dim() else float(value)
    shapes = {name: tuple(p.shape) for name, p in local.items()}
    if save_plan is not None:
        shapes = save_plan.full_shapes()
        for name, dtype in save_plan.dtypes().items():
            if local[name].requires_grad and local[name].dtype != dtype:
                entries[f"{_MASTER}.{name}"] = CODES[local[name].dtype], None
    groups: list[TensorGroup] = []
    for name, (code, scalar) in _union_over_ranks(entries, ranks).items():
        param = name.partition(".")[2]
        if scalar is not None:
            gather, shape = partial(torch.tensor, scalar, dtype=DTYPES[code]), ()
        else:
            gather, shape = partial(_gather, model, param, partial(_get_entry, state, local, name, code)), shapes[param]
        size = prod(shape) * ITEM_BYTES[code]
        groups.append(TensorGroup(tensors=(TensorHeader(name, code, shape, size),), gather=gather))
    return groups


def _union_over_ranks(entries: dict[str, _EntryType], ranks: int) -> dict[str, _EntryType]:
    """Return the entries of all ranks, in one order: a rank with an empty shard may have no entry."""
    if ranks == 1:
        return entries
    tables: list[dict[str, _EntryType] | None] = [None] * ranks
    dist.all_gather_object(tables, entries)
    return {name: entry for table in tables if table is not None for name, entry in table.items()}


def _get_entry(state: Mapping[str, Tensor], local: Mapping[str, Tensor], name: str, code: str) -> Tensor:
    if name in state:
        return state[name]
    key, _, param = name.partition(".")
    parameter = local[param].detach()
    if key == _MASTER:
        return parameter
    assert not parameter.numel(), f"this rank's optimizer has no {name}, but others have"
    return parameter.to(DTYPES[code])


def _gather(model: ShardedParameters, name: str, local: Callable[[], Tensor]) -> Tensor:
    shard = local().detach()
    return model.gather(name, shard.to(model.device) if dist.is_initialized() else shard)


# -- writing --------------------------------------------------------------------------------


def _write_part(writer: ShardWriter, part: _Part, rank: int) -> None:
    """Gather every tensor group, on all ranks in the same order; this rank writes those of its files."""
    first = {file.groups[0]: file for file in part.files if file.groups and file.rank == rank}
    last = {file.groups[-1] for file in first.values()}
    own = {number for file in first.values() for number in file.groups}
    for number, group in enumerate(part.groups):
        if number in first:
            file = first[number]
            writer.begin(file.name, [tensor for n in file.groups for tensor in part.groups[n].tensors])
        full = None if group.gather is None else group.gather()
        if number in own:
            _write_group(writer, group, full)
        if number in last:
            writer.end()
    if not part.groups and rank == 0:
        writer.begin(part.name, ())
        writer.end()


def _write_group(writer: ShardWriter, group: TensorGroup, full: Tensor | None) -> None:
    if full is None:
        assert group.stored is not None
        writer.copy(group.tensors[0].name, group.stored)
        return
    for view, described in zip(group.views(full), group.tensors, strict=True):
        assert tuple(view.shape) == described.shape, f"{described.name}: {tuple(view.shape)}, not {described.shape}"
        writer.tensor(view)


def _build_trainer_state(parts: Sequence[_Part], optimizer: OptimizerProtocol, version: Version) -> dict[str, Any]:
    is_sharded = any(part.name == OPTIMIZER and len(part.files) > 1 for part in parts)
    return {
        "format": 2 if is_sharded else 1,
        "version": {"policy": version.policy, "number": version.number},
        "updates": optimizer.updates,
    }


def _write_lead_files(
    folder: Path, parts: Sequence[_Part], save_plan: SavePlan | None, trainer_state: Mapping[str, Any]
) -> None:
    """Write the files besides the tensors, on the lead rank."""
    for part in parts:
        if len(part.files) > 1:
            write_json(folder / index_file_name(part.name), build_index(part.files, part.groups))
    if save_plan is not None:
        save_plan.write_metadata(folder)
    write_json(folder / TRAINER_STATE, trainer_state)


def _write_marker(folder: Path, rank: int, write_rest: Callable[[], None] | None, writer: ShardWriter) -> None:
    """At the end of the writer's thread: write the lead's files, and the rank's marker."""
    try:
        if writer.failure is None and write_rest is not None:
            write_rest()
    except Exception as cause:
        writer.failure = "the metadata files", cause
    try:
        if writer.failure is None:
            markers.mark_complete(folder, rank, writer.files)
    except OSError as cause:
        writer.failure = "its completion marker", cause
    if writer.failure is not None:
        with contextlib.suppress(OSError):  # the waiting side will time out and report it
            markers.mark_failed(folder, rank, _format_failure(rank, *writer.failure))


def _format_failure(rank: int, name: str, cause: Exception) -> str:
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause) or repr(cause)
    return f"rank {rank} could not write {name}: {reason}"


def _raise_failures(folder: Path, rank: int, writer: ShardWriter, dp_group: DataParallelGroup) -> None:
    """Raise the failure of any rank on the lead; on other ranks only a failure that could not be reported."""
    if writer.failure is not None and rank in markers.list_missing_ranks(folder):
        raise CheckpointError(_format_failure(rank, *writer.failure)) from writer.failure[1]
    if dp_group.is_lead:
        markers.wait_for_all_ranks(folder, lambda: _TIMEOUT)
        markers.collect_files(folder)


# -- reading --------------------------------------------------------------------------------


@torch.no_grad()
def _shard_state(model: ShardedParameters, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's shard of every optimizer tensor; a master is copied into a weight of the same dtype."""
    local = model.parameters()
    for name, full in tensors:
        key, _, param = name.partition(".")
        if param not in local:
            raise CheckpointError(f"the optimizer state holds {name}, which this model does not have.")
        shard = full if not full.dim() else model.shard(param, full)
        if key == _MASTER and local[param].dtype == full.dtype:
            local[param].copy_(shard)
        else:
            yield name, shard


def _read_trainer_state(folder: Path) -> dict[str, Any]:
    path = folder / TRAINER_STATE
    try:
        trainer_state = json.loads(path.read_text())
    except FileNotFoundError as cause:
        raise CheckpointError(
            f"{path} is missing, so this is not a training checkpoint; "
            "to start from its weights alone use --hf-checkpoint."
        ) from cause
    except (OSError, ValueError) as cause:
        raise CheckpointError(f"{path} cannot be read ({cause}); use an older checkpoint.") from cause
    if trainer_state.get("format") not in _FORMATS:
        raise CheckpointError(
            f"{path} has format {trainer_state.get('format')}, but this Miles reads formats up to {_FORMATS[-1]}."
        )
    return trainer_state
