"""Device mesh and process groups of the FSDP trainer, over torch's default process group.

Ranks with a device each communicate over NCCL (RCCL on ROCm), ranks on a CPU over gloo; if several ranks share one
device the default group is gloo, and tensors are staged through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError
from miles.kernels.batch_invariant.elementwise import sum_in_rank_order
from miles.kernels.numerics import FAST, Numerics

# Torch 2.13 renamed these two.
all_gather = dist.all_gather_single if "all_gather_single" in vars(dist) else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if "reduce_scatter_single" in vars(dist) else dist.reduce_scatter_tensor


class CommGroup:
    """A process group as one rank sees it. All ranks make the same calls in the same order.

    None of these is differentiable (see ``autograd_collectives``). A group of one rank has no process group. With
    batch-invariant ``numerics`` sums are made in rank order.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, numerics: Numerics) -> None:
        self.process_group = group
        self.device = device
        self._numerics = numerics
        self.rank = 0 if group is None else group.rank()
        self.world = 1 if group is None else group.size()
        self._staged = group is not None and device.type != "cpu" and dist.get_backend(group) == "gloo"

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce: the sum over all ranks, bitwise equal on each; ``x`` may be overwritten."""
        if self._numerics.batch_invariant and self.world > 1:
            return sum_in_rank_order(self.gather(x))
        return self._all_reduce(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        """All-reduce: the elementwise maximum over all ranks; ``x`` may be overwritten."""
        return self._all_reduce(x, dist.ReduceOp.MAX)

    def all_gather(self, x: Tensor) -> Tensor:
        """All-gather [n, ...] of every rank into [world * n, ...], in rank order."""
        if self.world == 1:
            return x
        sent = self._stage(x)
        if x.element_size() == 1:  # packed weights: gloo has no FP8
            sent = sent.view(torch.uint8)
        out = sent.new_empty((self.world * len(sent), *sent.shape[1:]))
        all_gather(out, sent, group=self.process_group)
        return out.view(x.dtype).to(x.device)

    def gather(self, x: Tensor) -> list[Tensor]:
        """All-gather tensors of one shape into a list, in rank order."""
        return list(self.all_gather(x[None]).unbind())

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum [world * n, ...] over all ranks and return this rank's n rows."""
        if self.world == 1:
            return x
        if self._numerics.batch_invariant:
            return sum_in_rank_order([part.chunk(self.world)[self.rank] for part in self.gather(x)])
        sent = self._stage(x)
        out = sent.new_empty((len(sent) // self.world, *sent.shape[1:]))
        reduce_scatter(out, sent, group=self.process_group)
        return out.to(x.device)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows: ``sent[i]`` rows of ``x`` go to rank i, ``received[i]`` come from it."""
        if self.world == 1:
            return x
        own = self._stage(x)
        out = own.new_empty((sum(received), *own.shape[1:]))
        dist.all_to_all_single(out, own, list(received), list(sent), group=self.process_group)
        return out.to(x.device)

    def send(self, x: Tensor, rank: int) -> None:
        """Send ``x`` to a rank, which receives it."""
        dist.send(self._stage(x), group=self.process_group, group_dst=rank)

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Return what a rank sends, of the shape and type of ``like``."""
        out = torch.empty_like(self._stage(like))
        dist.recv(out, group=self.process_group, group_src=rank)
        return out.to(like.device)

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's ``x``; that of the others may be overwritten."""
        if self.world == 1:
            return x
        out = self._stage(x)
        dist.broadcast(out, group=self.process_group, group_src=0)
        return out.to(x.device)

    def _all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world == 1:
            return x
        out = self._stage(x)
        dist.all_reduce(out, op, group=self.process_group)
        return out.to(x.device)

    def _stage(self, x: Tensor) -> Tensor:
        # Parameters offloaded to the host are still sent over the devices' group.
        device = torch.device("cpu") if self._staged else self.device
        return x.detach().to(device).contiguous()


class FsdpDpGroup:
    """``train.dp_group.DataParallelGroup`` of one rank."""

    def __init__(self, layout: ParallelDims, rank: int, group: CommGroup, world_group: CommGroup) -> None:
        self.dp_rank = layout.data_parallel_rank(rank)
        self.dp_size = layout.data_parallel_size
        self.cp_size = layout.context
        self.world_size = layout.world
        self.is_lead = rank == 0
        self._group = group
        self._world_group = world_group

    def sum(self, x: Tensor) -> Tensor:
        return self._group.sum(x.clone())

    def max(self, x: Tensor) -> Tensor:
        return self._group.max(x.clone())

    def union_names(self, own: Sequence[str]) -> list[str]:
        if self._group.world == 1:
            return list(own)
        gathered: list[list[str]] = [[]] * self._group.world
        dist.all_gather_object(gathered, list(own), group=self._group.process_group)
        return list(dict.fromkeys(name for names in gathered for name in names))

    def sum_world(self, x: Tensor) -> Tensor:
        return self._world_group.sum(x.clone())


class FsdpMesh:
    """All process groups of this rank in ``layout``; all ranks of the default group create theirs together.

    ``shard_group`` are the ranks over which FSDP shards parameters (shard and context together), ``replica_group``
    those with the same shard, ``dp_cp_group`` all with other samples or tokens, ``ep_group`` those that share the
    experts and ``expert_shard_group`` those that shard the same experts. ``shard_mesh`` is the mesh for FSDP, None if
    parameters are not sharded; ``expert_shard_mesh`` is the mesh for expert-parallel experts, None without expert
    parallelism. ``numerics`` are those of the models and of all sums over ranks.
    """

    def __init__(self, layout: ParallelDims, device: torch.device, *, numerics: Numerics = FAST) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if layout.world != world:
            raise UsageError(f"the parallel layout needs {layout.world} ranks, but {world} have joined.")
        if layout.pipeline > 1:
            raise UsageError("the fsdp backend has no pipeline parallelism: leave it out, or use the megatron backend.")
        if layout.expert_tensor not in (None, layout.tensor):
            raise UsageError(
                f"the fsdp backend shards experts over all {layout.tensor} tensor-parallel ranks: leave expert tensor "
                "parallelism out, or use the megatron backend."
            )
        self.layout = layout
        self.device = device
        self.numerics = numerics
        # Ranks that share a device cannot use NCCL.
        self.staged = world > 1 and device.type != "cpu" and dist.get_backend() == "gloo"
        self.rank = dist.get_rank() if world > 1 else 0
        self.coords = layout.coords(self.rank)
        self._groups: dict[tuple[tuple[int, ...], ...], CommGroup] = {}
        self.tp_group = self._build_group("tensor")
        self.cp_group = self._build_group("context")
        self.shard_group = self._build_group("shard", "context")
        self.replica_group = self._build_group("replicate")
        self.dp_cp_group = self._build_group("replicate", "shard", "context")
        self.ep_group = self._build_group("expert")
        self.expert_shard_group = self._build_group("expert_data") if layout.expert > 1 else self.shard_group
        self.world_group = self._build_group("replicate", "shard", "context", "tensor")
        self.dp_group = FsdpDpGroup(layout, self.rank, self._build_group("replicate", "shard"), self.world_group)
        self.shard_mesh = self._device_mesh(self.replica_group, self.shard_group)
        self.expert_shard_mesh = (
            self._device_mesh(self.replica_group, self.expert_shard_group, always=True) if layout.expert > 1 else None
        )

    def _build_group(self, *along: str) -> CommGroup:
        groups = self.layout.groups(*along)
        key = tuple(tuple(group) for group in groups)
        if key not in self._groups:
            process_group = _create_process_group(groups) if len(groups[0]) > 1 else None
            self._groups[key] = CommGroup(process_group, self.device, numerics=self.numerics)
        return self._groups[key]

    def _device_mesh(self, replica: CommGroup, shard: CommGroup, *, always: bool = False) -> DeviceMesh | None:
        """Build the DeviceMesh for FSDP from existing groups: one dimension, or two with replicas (HSDP)."""
        if replica.world == 1 and shard.world == 1 and not always:
            return None
        group = shard.process_group
        if group is None:  # the dimension must exist although it has one rank
            group = _create_process_group([[rank] for rank in range(self.layout.world)])
        kind = self.device.type
        if replica.process_group is None:
            return DeviceMesh.from_group(group, kind, mesh_dim_names=("shard",))
        # The ranks of the mesh, from this rank's row and column: both groups ascend evenly.
        column, row = dist.get_process_group_ranks(replica.process_group), dist.get_process_group_ranks(group)
        grid = [[a + b - self.rank for b in row] for a in column]
        return DeviceMesh.from_group([replica.process_group, group], kind, grid, mesh_dim_names=("replicate", "shard"))


def _create_process_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """Create all ``groups`` on every rank and return this rank's."""
    group, _ = dist.new_subgroups_by_enumeration(groups)
    assert isinstance(group, dist.ProcessGroup)
    return group
