"""Parameter shards: a rank's part of a full parameter, and the mapping between full and local tensors.

full --tensor parallel--> heads, channels, vocabulary --expert parallel--> experts --FSDP--> rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles.backends.fsdp import expert_parallel
from miles.backends.fsdp.device_mesh import CommGroup, FsdpMesh
from miles.backends.fsdp.tensor_parallel import iter_replicated_rows
from miles.models.checkpoint.load import shard_bounds
from miles.models.lora.adapters import ParamPart
from miles.models.parallel.tp_sharding import TpShard


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamShard:
    """One parameter: its full shape, and its shape on a rank before FSDP shards dimension ``dim`` over ``shard_group``.

    Under expert parallelism a stacked part is that of the rank's own experts. ``counts`` is false if an earlier rank
    has the same values. ``pack`` columns of the weight are one of a packed parameter.
    """

    tp_shard: TpShard
    full_shape: torch.Size
    rank_shape: torch.Size
    tp_group: CommGroup
    ep_group: CommGroup | None
    shard_group: CommGroup | None
    counts: bool
    dim: int = 0
    pack: int = 1

    @property
    def bounds(self) -> tuple[int, int]:
        """The rows of its part whose values this rank has, along ``dim``."""
        if self.shard_group is None:
            return 0, self.rank_shape[self.dim] if self.rank_shape else 0
        return shard_bounds(self.rank_shape[self.dim], self.shard_group.rank, self.shard_group.world)

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's shard of ``full``, a copy unless it is all of it."""
        part = self.tp_shard.shard(full, self.tp_group.rank, self.tp_group.world)
        if self.ep_group is not None:
            part = expert_parallel.slice_experts(part, self.ep_group.rank, self.ep_group.world)
        first, last = self.bounds
        if self.shard_group is not None:
            part = part.narrow(self.dim, first, last - first)
        return part if part is full else part.clone(memory_format=torch.contiguous_format)

    def find_rank_part(self) -> ParamPart:
        """Return which part of the full weight this rank computes with, before FSDP shards it."""
        experts = None
        if self.ep_group is not None:
            count = self.full_shape[0] // self.ep_group.world
            experts = (self.ep_group.rank * count, (self.ep_group.rank + 1) * count)
        if not self.tp_shard.segments or self.tp_group.world == 1:
            return ParamPart(experts)
        # Numbers from 1 on are sharded like the rows or columns themselves; where a rank is padded there are zeros.
        numbers = torch.arange(1, self.full_shape[self.tp_shard.dim] + 1)
        index = replace(self.tp_shard, dim=0).shard(numbers, self.tp_group.rank, self.tp_group.world) - 1
        if self.tp_shard.dim == len(self.full_shape) - 2:
            return ParamPart(experts, index)
        columns = (index.unsqueeze(1) * self.pack + torch.arange(self.pack)).flatten()
        return ParamPart(experts, None, columns)

    def find_local_part(self) -> ParamPart:
        """Return which part of the full weight this rank's shard is."""
        return self.find_rank_part().narrow(self.dim, *self.bounds, self.rank_shape)

    def gather(self, local: Tensor) -> Tensor:
        """Gather the full tensor from every rank's shard."""
        part = (
            local
            if self.shard_group is None
            else _gather_rows(local, self.rank_shape[self.dim], self.dim, self.shard_group)
        )
        if self.ep_group is not None:
            part = self.ep_group.all_gather(part)
        if self.tp_group.world == 1:
            return part
        if self.tp_shard.segments:
            return self.tp_shard.gather(self.tp_group.gather(part))
        return self.tp_group.broadcast(part.clone()) if self.tp_shard.first_rank_only else part

    def squares(self, local: Tensor) -> Tensor:
        """Compute the sum of squares of the values that no earlier rank has."""
        fp32 = torch.promote_types(local.dtype, torch.float32)
        if not self.counts or not local.numel():
            return torch.zeros((), dtype=torch.float64, device=local.device)
        total = torch.linalg.vector_norm(local, dtype=fp32).to(torch.float64).square()
        if self.dim == 0:
            for rows, run in iter_replicated_rows(self.tp_shard, self.bounds[0], len(local), self.tp_group):
                if not run.first:
                    total = total - torch.linalg.vector_norm(local[rows], dtype=fp32).to(torch.float64).square()
        return total


def _gather_rows(local: Tensor, size: int, dim: int, group: CommGroup) -> Tensor:
    """Gather shards along ``dim``; the last may be smaller than the others, or empty."""
    each = -(-size // group.world)
    if dim == 0 and len(local) == each and each * group.world == size:
        return group.all_gather(local)
    padded = local.new_zeros((*local.shape[:dim], each, *local.shape[dim + 1 :]))
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    return torch.cat(group.gather(padded), dim).narrow(dim, 0, size)


def build_param_shards(
    tp_shards: Mapping[str, TpShard],
    full_shapes: Mapping[str, Sequence[int]],
    rank_shapes: Mapping[str, Sequence[int]],
    mesh: FsdpMesh,
    *,
    unmanaged: frozenset[str],
    packs: Mapping[str, int],
) -> dict[str, ParamShard]:
    """Describe how each parameter is sharded; those in ``unmanaged`` are not managed by FSDP and replicated.

    ``packs`` are the columns of a weight that one column of a packed parameter has, where these are several.
    """
    out: dict[str, ParamShard] = {}
    for name, shape in rank_shapes.items():
        tp_shard = tp_shards[name]
        expert_parallel_param = tp_shard.stacked and mesh.ep_group.world > 1
        shard_group = mesh.expert_shard_group if expert_parallel_param else mesh.shard_group
        sized, unsharded = torch.Size(shape), name in unmanaged or shard_group.world == 1
        first = mesh.replica_group.rank == 0 and (bool(tp_shard.segments) or mesh.tp_group.rank == 0)
        out[name] = ParamShard(
            tp_shard=tp_shard,
            full_shape=torch.Size(full_shapes[name]),
            rank_shape=sized,
            tp_group=mesh.tp_group,
            ep_group=mesh.ep_group if expert_parallel_param else None,
            shard_group=None if unsharded else shard_group,
            counts=first and (expert_parallel_param or not unsharded or mesh.shard_group.rank == 0),
            dim=expert_parallel.choose_shard_dim(sized, shard_group.world) if expert_parallel_param else 0,
            pack=packs.get(name, 1),
        )
    return out
