"""Sharded state dicts of a decoder's parameters, for Megatron's distributed checkpoints (torch_dist) with adapters.

Some parts with adapters are the decoder's modules where the same model without adapters has Megatron's. Their rows are
in another order, and its files have one tensor for a parameter of all layers: a rank's part of a parameter is found by
the parameter's name alone, and written where Megatron's module would have it.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from torch import Tensor

from miles.backends.megatron.parallel_state import MegatronGroup
from miles.backends.megatron.param_mapping import ParamMapping, build_param_mappings
from miles.backends.megatron.torch_dist_keys import VOCABULARY, list_extra_states, list_keys

if TYPE_CHECKING:
    from miles.backends.megatron.model import MegatronModel


@dataclass(frozen=True, slots=True)
class ShardRun:
    """A part of this rank's part of a parameter that is in one piece in the files, there from ``start`` on.

    ``index`` are its rows or columns here, in the order of the files.
    """

    start: int
    index: Tensor


def find_runs(local: ParamMapping, stored: ParamMapping, group: MegatronGroup, size: int) -> list[ShardRun]:
    """Return where the files have this rank's part of a parameter, which is ``size`` long along its sharded dimension.

    ``local`` is the layout of this model's modules, ``stored`` that of the files. Padding and the zeros of other ranks
    are nowhere.
    """
    shard = local.tp_shard
    if shard.first_rank_only and group.rank:
        return []
    if not shard.segments:
        return [ShardRun(0, torch.arange(size))]
    # Numbers from 1 on are sharded like the rows or columns themselves; where a rank is padded there are zeros.
    numbers = torch.arange(1, local.shape[shard.dim] + 1)
    own = replace(shard, dim=0).shard(local.to_megatron(numbers), group.rank, group.world)
    place = torch.empty_like(numbers)
    place[stored.to_megatron(numbers) - 1] = torch.arange(len(numbers))
    index = own.nonzero().flatten()
    starts, order = place[own[index] - 1].sort()
    ends = ((starts.diff() != 1).nonzero().flatten() + 1).tolist()
    found = zip(starts.tensor_split(ends), index[order].tensor_split(ends), strict=True)
    return [ShardRun(int(first[0]), part) for first, part in found if len(part)]


def build_sharded_params(model: MegatronModel, gather_unit: Callable[[str], Tensor] | None) -> dict[str, ShardedBase]:
    """Shard the weights of ``model`` for a checkpoint, with the empty entries of Megatron's modules; all ranks call.

    They are its parameters, or the full tensors of ``gather_unit``, of which each rank copies its part to the host.
    """
    state: dict[str, ShardedBase] = {}
    for name, parameter in model.parameters().items():
        tensor = parameter.detach()
        if gather_unit is not None:
            tensor = model.shard(name, gather_unit(name)).to(tensor.dtype)
        if not model.is_main_replica(name):
            continue
        tensor = tensor if gather_unit is None else tensor.to("cpu", copy=True)
        dim = model.mappings[name].tp_shard.dim
        for run, sharded in _list_sharded_tensors(model, name, tensor):
            sharded.data = _select(tensor, dim, run.index).reshape(sharded.local_shape)
            for key in list_keys(model.spec, name)[0]:
                state[f"{key}/{name}/{run.start}"] = replace(sharded, key=key)
    if model.dp_group.is_lead:
        for each in list_extra_states(model.spec):
            state[f"{each.key}/{each.index}"] = ShardedObject(each.key, None, (each.count,), (each.index,))
    return state


def build_replicated(model: MegatronModel, tensors: Mapping[str, Tensor]) -> dict[str, ShardedTensor]:
    """Return tensors that every rank has, which one rank writes."""
    if not model.dp_group.is_lead:
        return {}
    return {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}


def build_empty_params(model: MegatronModel, stored: Collection[str]) -> dict[str, ShardedTensor]:
    """Return what this rank reads of a checkpoint with the keys ``stored``: its part of each parameter, no storage."""
    state: dict[str, ShardedTensor] = {}
    for name, parameter in model.parameters().items():
        if not model.has_param(name):
            continue
        keys, _ = list_keys(model.spec, name)
        key = next((key for key in keys if key in stored), keys[0])
        for run, sharded in _list_sharded_tensors(model, name, parameter):
            state[f"{name}/{run.start}"] = replace(sharded, key=key)
    return state


def join_params(model: MegatronModel, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of each parameter, on the host, from the tensors that were read."""
    out: dict[str, Tensor] = {}
    for name, parameter in model.parameters().items():
        if not model.has_param(name):
            continue
        shape, dim = parameter.shape, model.mappings[name].tp_shard.dim
        out[name] = torch.zeros(shape, dtype=parameter.dtype)
        for run in find_runs(*_layouts(model, name), shape[dim]):
            part = found[f"{name}/{run.start}"].reshape(*shape[:dim], len(run.index), *shape[dim + 1 :])
            out[name].index_copy_(dim, run.index, part)
    return out


def _list_sharded_tensors(model: MegatronModel, name: str, like: Tensor) -> Iterator[tuple[ShardRun, ShardedTensor]]:
    """List the pieces of this rank's part of a parameter, whose shape and dtype are those of ``like``, without data."""
    local, stored, group = _layouts(model, name)
    keys, layer = list_keys(model.spec, name)
    dim = local.tp_shard.dim
    first_expert = model.state.ep_group.rank * len(like) if local.expert else 0
    for run in find_runs(local, stored, group, like.shape[dim]):
        sizes = [(size, full, 0) for size, full in zip(like.shape, stored.shape, strict=True)]
        sizes[dim] = (len(run.index), stored.shape[dim], run.start)
        if local.expert:
            sizes[0] = (*sizes[0][:2], first_expert + sizes[0][2])
        if layer is not None:
            sizes.insert(0, (1, model.spec.num_layers, layer))
        part, full, offsets = zip(*sizes, strict=True)
        padded = name in VOCABULARY
        yield run, ShardedTensor(keys[0], None, like.dtype, part, full, offsets, None, allow_shape_mismatch=padded)


def _select(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return some rows or columns, without a copy where they are adjacent and whole."""
    if bool((index.diff() == 1).all()):
        return tensor.narrow(dim, int(index[0]), len(index)).contiguous()
    return tensor.index_select(dim, index.to(tensor.device))


def _layouts(model: MegatronModel, name: str) -> tuple[ParamMapping, ParamMapping, MegatronGroup]:
    """Return the layout of a parameter in this model and in the files, and the ranks that shard it."""
    local, state = model.mappings[name], model.state
    stored = build_param_mappings(model.spec, transformer_engine=False).get(name, local)
    return local, stored, state.etp_group if local.expert else state.tp_group
