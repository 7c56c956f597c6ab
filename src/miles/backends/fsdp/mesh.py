"""The ranks of a trainer over torch's default process group: who has which part, and the rings they talk in.

Ranks with a device each talk over NCCL (RCCL on ROCm), ranks on a CPU over gloo; where several share one device the
default group is gloo's, and what is sent goes by way of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from miles.cluster.layout import Layout
from miles.core.errors import UsageError
from miles.kernels.arithmetic import exact
from miles.kernels.exact.elements import in_order

# Torch 2.13 calls these two by new names.
all_gather = dist.all_gather_single if "all_gather_single" in vars(dist) else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if "reduce_scatter_single" in vars(dist) else dist.reduce_scatter_tensor


class Ring:
    """Some of the ranks, seen from one of them. All make the same calls in the same order.

    None of these is differentiable: see ``collective``. A ring of one needs no group.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = 0 if group is None else group.rank()
        self.world = 1 if group is None else group.size()
        self._staged = group is not None and device.type != "cpu" and dist.get_backend(group) == "gloo"

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; ``x`` may be overwritten."""
        if exact() and self.world > 1:
            return in_order(self.gather(x))
        return self._reduced(x, dist.ReduceOp.SUM)

    def most(self, x: Tensor) -> Tensor:
        """The largest over all ranks, element by element; ``x`` may be overwritten."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def all_gather(self, x: Tensor) -> Tensor:
        """What every rank has, [n, ...] each, in order: [world * n, ...]."""
        if self.world == 1:
            return x
        sent = self._sent(x)
        out = sent.new_empty((self.world * len(sent), *sent.shape[1:]))
        all_gather(out, sent, group=self.group)
        return out.to(x.device)

    def gather(self, x: Tensor) -> list[Tensor]:
        """What every rank has, all of one shape, in order."""
        return list(self.all_gather(x[None]).unbind())

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Of the sum over all ranks, [world * n, ...], this rank's n rows."""
        if self.world == 1:
            return x
        if exact():
            return in_order([part.chunk(self.world)[self.rank] for part in self.gather(x)])
        sent = self._sent(x)
        out = sent.new_empty((len(sent) // self.world, *sent.shape[1:]))
        reduce_scatter(out, sent, group=self.group)
        return out.to(x.device)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows to everyone and from everyone: ``sent[i]`` rows of ``x`` go to rank i, ``received[i]`` come from it."""
        if self.world == 1:
            return x
        own = self._sent(x)
        out = own.new_empty((sum(received), *own.shape[1:]))
        dist.all_to_all_single(out, own, list(received), list(sent), group=self.group)
        return out.to(x.device)

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's ``x``; that of the others is overwritten."""
        if self.world == 1:
            return x
        out = self._sent(x)
        dist.broadcast(out, group=self.group, group_src=0)
        return out.to(x.device)

    def _reduced(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world == 1:
            return x
        out = self._sent(x)
        dist.all_reduce(out, op, group=self.group)
        return out.to(x.device)

    def _sent(self, x: Tensor) -> Tensor:
        # Parameters that sleep on the host still travel over the devices' group.
        home = torch.device("cpu") if self._staged else self.device
        return x.detach().to(home).contiguous()


class Parts:
    """``train.peers.Peers`` of one rank: those of the same tokens and heads who have the other parts of a batch."""

    def __init__(self, layout: Layout, rank: int, ring: Ring) -> None:
        self.part, self.parts, self.lead = layout.part(rank), layout.parts, rank == 0
        self.context = layout.context
        self._ring = ring

    def sum(self, x: Tensor) -> Tensor:
        return self._ring.sum(x.clone())

    def most(self, x: Tensor) -> Tensor:
        return self._ring.most(x.clone())

    def names(self, own: Sequence[str]) -> list[str]:
        if self._ring.world == 1:
            return list(own)
        told: list[list[str]] = [[]] * self._ring.world
        dist.all_gather_object(told, list(own), group=self._ring.group)
        return list(dict.fromkeys(name for names in told for name in names))


class Mesh:
    """Every ring of this rank in ``layout``; all ranks of the default group make theirs at once.

    ``pieces`` are the ranks over which parameters are cut (shard and context together), ``copies`` those that hold
    the same piece, ``rows`` all that have other rows or tokens, ``expert`` those who have all experts together and
    ``apart`` those who cut the same experts. ``shard`` is what FSDP takes, None where a parameter is whole on one rank;
    ``expert_shard`` is what it takes for experts that are dealt out, None where they are not.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        there = dist.get_world_size() if dist.is_initialized() else 1
        if layout.world != there:
            raise UsageError(f"the layout is for {layout.world} ranks, and {there} have joined.")
        if layout.pipeline > 1:
            raise UsageError("this backend has no pipeline: leave pipeline parallel out, or use the megatron backend.")
        if layout.expert_tensor not in (None, layout.tensor):
            raise UsageError(
                f"this backend cuts the channels of experts over all {layout.tensor} tensor ranks: leave expert tensor "
                "parallel out, or use the megatron backend."
            )
        self.layout, self.device = layout, device
        # Ranks that share a device cannot use its own ways of talking.
        self.staged = there > 1 and device.type != "cpu" and dist.get_backend() == "gloo"
        self.rank = dist.get_rank() if there > 1 else 0
        self.place = layout.place(self.rank)
        self._rings: dict[tuple[tuple[int, ...], ...], Ring] = {}
        self.tensor = self._ring("tensor")
        self.context = self._ring("context")
        self.pieces = self._ring("shard", "context")
        self.copies = self._ring("replicate")
        self.rows = self._ring("replicate", "shard", "context")
        self.expert = self._ring("expert")
        self.apart = self._ring("apart") if layout.expert > 1 else self.pieces
        self.everyone = self._ring("replicate", "shard", "context", "tensor")
        self.peers = Parts(layout, self.rank, self._ring("replicate", "shard"))
        self.shard = self._device_mesh(self.copies, self.pieces)
        self.expert_shard = self._device_mesh(self.copies, self.apart, always=True) if layout.expert > 1 else None

    def _ring(self, *along: str) -> Ring:
        groups = self.layout.groups(*along)
        key = tuple(tuple(group) for group in groups)
        if key not in self._rings:
            self._rings[key] = Ring(_group(groups) if len(groups[0]) > 1 else None, self.device)
        return self._rings[key]

    def _device_mesh(self, copies: Ring, pieces: Ring, *, always: bool = False) -> DeviceMesh | None:
        """What FSDP takes, over groups that are there already: one dimension, or two where pieces are held twice."""
        if copies.world == 1 and pieces.world == 1 and not always:
            return None
        group = pieces.group
        if group is None:  # the dimension must be there although it has one rank
            group = _group([[rank] for rank in range(self.layout.world)])
        kind = self.device.type
        if copies.group is None:
            return DeviceMesh.from_group(group, kind, mesh_dim_names=("shard",))
        # The ranks of the grid, out of this rank's own row and column: both groups ascend evenly.
        column, row = dist.get_process_group_ranks(copies.group), dist.get_process_group_ranks(group)
        grid = [[a + b - self.rank for b in row] for a in column]
        return DeviceMesh.from_group([copies.group, group], kind, grid, mesh_dim_names=("replicate", "shard"))


def _group(groups: list[list[int]]) -> dist.ProcessGroup:
    """This rank's of the ``groups``; every rank makes all of them."""
    group, _ = dist.new_subgroups_by_enumeration(groups)
    assert isinstance(group, dist.ProcessGroup)
    return group
