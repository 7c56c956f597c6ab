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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamLayout:
    """Where this rank's part of a parameter is: ``local`` in this model's modules, ``stored`` in the files.

    ``group`` are the ranks that shard it, of which experts are further sharded over ``ep_group``; ``dtype`` is that of
    the files.
    """

    local: ParamMapping
    stored: ParamMapping
    group: MegatronGroup
    ep_group: MegatronGroup
    dtype: torch.dtype

    @property
    def dim(self) -> int:
        """The dimension along which tensor-parallel ranks shard it."""
        return self.local.tp_shard.dim

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return tuple(self.shard(torch.empty(self.local.shape, device="meta")).shape)

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's part of the full parameter."""
        if self.local.expert:
            full = full.chunk(self.ep_group.world)[self.ep_group.rank]
        return self.local.tp_shard.shard(self.local.to_megatron(full), self.group.rank, self.group.world)

    def find_runs(self) -> list[ShardRun]:
        """Return where the files have this rank's part; padding and the zeros of other ranks are nowhere."""
        shard = self.local.tp_shard
        if shard.first_rank_only and self.group.rank:
            return []
        if not shard.segments:
            return [ShardRun(0, torch.arange(self.shape[shard.dim]))]
        # Numbers from 1 on are sharded like the rows or columns themselves; where a rank is padded there are zeros.
        numbers = torch.arange(1, self.local.shape[shard.dim] + 1)
        own = replace(shard, dim=0).shard(self.local.to_megatron(numbers), self.group.rank, self.group.world)
        place = torch.empty_like(numbers)
        place[self.stored.to_megatron(numbers) - 1] = torch.arange(len(numbers))
        index = own.nonzero().flatten()
        starts, order = place[own[index] - 1].sort()
        ends = ((starts.diff() != 1).nonzero().flatten() + 1).tolist()
        found = zip(starts.tensor_split(ends), index[order].tensor_split(ends), strict=True)
        return [ShardRun(int(first[0]), part) for first, part in found if len(part)]


def list_layouts(model: MegatronModel) -> dict[str, ParamLayout]:
    """Return the layout of every parameter of the decoder, also of those that another stage has."""
    spec = replace(model.spec, quantization=None)
    config, state = model.tf_config, model.state
    local = build_param_mappings(
        spec,
        transformer_engine=config.transformer_engine,
        batch_invariant=config.numerics.batch_invariant,
        adapted=config.adapted,
    )
    stored, dtypes = build_param_mappings(spec, transformer_engine=False), model.save_plan().dtypes()
    return {
        name: ParamLayout(
            local=mapping,
            stored=stored[name],
            group=state.etp_group if mapping.expert else state.tp_group,
            ep_group=state.ep_group,
            dtype=dtypes[name],
        )
        for name, mapping in local.items()
    }


def build_sharded_params(model: MegatronModel, gather_unit: Callable[[str], Tensor] | None) -> dict[str, ShardedBase]:
    """Shard the weights of ``model`` for a checkpoint, with the empty entries of Megatron's modules; all ranks call.

    They are its parameters, or the full tensors of ``gather_unit``, of which each rank copies its part to the host.
    """
    state: dict[str, ShardedBase] = {}
    params = model.parameters()
    for name, layout in list_layouts(model).items():
        tensor = params[name].detach() if gather_unit is None else layout.shard(gather_unit(name))
        if not model.is_main_replica(name):
            continue
        tensor = tensor.to(layout.dtype)
        tensor = tensor if gather_unit is None else tensor.to("cpu", copy=True)
        for run, sharded in _list_sharded_tensors(model, name, layout):
            sharded.data = _select(tensor, layout.dim, run.index).reshape(sharded.local_shape)
            for key in list_keys(model.spec, name)[0]:
                state[f"{key}/{name}/{run.start}"] = replace(sharded, key=key)
    if model.dp_group.is_lead:
        for each in list_extra_states(replace(model.spec, quantization=None)):
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
    for name, layout in list_layouts(model).items():
        if not model.has_param(name):
            continue
        keys, _ = list_keys(model.spec, name)
        key = next((key for key in keys if key in stored), keys[0])
        for run, sharded in _list_sharded_tensors(model, name, layout):
            state[f"{name}/{run.start}"] = replace(sharded, key=key)
    return state


def join_params(model: MegatronModel, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of each parameter, on the host, from the tensors that were read."""
    out: dict[str, Tensor] = {}
    for name, layout in list_layouts(model).items():
        if not model.has_param(name):
            continue
        shape, dim = layout.shape, layout.dim
        out[name] = torch.zeros(shape, dtype=layout.dtype)
        for run in layout.find_runs():
            part = found[f"{name}/{run.start}"].reshape(*shape[:dim], len(run.index), *shape[dim + 1 :])
            out[name].index_copy_(dim, run.index, part)
    return out


def find_difference(
    model: MegatronModel, stored: Mapping[str, Tensor], gather_unit: Callable[[str], Tensor]
) -> str | None:
    """Return the first parameter that is ``stored`` with other values than the full tensors of ``gather_unit`` have.

    All ranks call, each with its parts, and return the same.
    """
    layouts = list_layouts(model)
    differs = torch.zeros(len(layouts), device=model.device)
    for number, (name, layout) in enumerate(layouts.items()):
        part = layout.shard(gather_unit(name))
        if name in stored:
            differs[number] = not torch.equal(part.to(layout.dtype).cpu(), stored[name])
    found = model.max_over_ranks(differs).nonzero().flatten().tolist()
    return list(layouts)[found[0]] if found else None


def _list_sharded_tensors(
    model: MegatronModel, name: str, layout: ParamLayout
) -> Iterator[tuple[ShardRun, ShardedTensor]]:
    """List the pieces of this rank's part of a parameter, without data."""
    keys, layer = list_keys(model.spec, name)
    local, full = layout.shape, layout.stored.shape
    for run in layout.find_runs():
        sizes = [(size, whole, 0) for size, whole in zip(local, full, strict=True)]
        sizes[layout.dim] = (len(run.index), full[layout.dim], run.start)
        if layout.local.expert:
            first_expert = layout.ep_group.rank * local[0]
            sizes[0] = (*sizes[0][:2], first_expert + sizes[0][2])
        if layer is not None:
            sizes.insert(0, (1, model.spec.num_layers, layer))
        part, shape, offsets = zip(*sizes, strict=True)
        padded = name in VOCABULARY
        yield run, ShardedTensor(keys[0], None, layout.dtype, part, shape, offsets, None, allow_shape_mismatch=padded)


def _select(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return some rows or columns, without a copy where they are adjacent and whole."""
    if bool((index.diff() == 1).all()):
        return tensor.narrow(dim, int(index[0]), len(index)).contiguous()
    return tensor.index_select(dim, index.to(tensor.device))
