"""The ranks of a Megatron trainer: its parallel state made from a layout, and the rings a rank talks in.

Megatron orders ranks as a layout does: tensor fastest, then context, then the parts of a batch, pipeline slowest.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch import distributed as dist

from miles.cluster.layout import Layout
from miles.core.errors import UsageError


class Ring:
    """Some of the ranks, seen from one of them; none of its sums is differentiable."""

    def __init__(self, group: Any) -> None:
        assert isinstance(group, dist.ProcessGroup)
        self.group, self.rank, self.world = group, group.rank(), group.size()

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def most(self, x: Tensor) -> Tensor:
        """The largest over all ranks, element by element."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def gather(self, x: Tensor) -> list[Tensor]:
        """What every rank has, all of one shape, in order."""
        if self.world == 1:
            return [x]
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(found, x, group=self.group)
        return found

    def from_rank(self, x: Tensor, rank: int) -> Tensor:
        """That rank's ``x``; that of the others is overwritten."""
        if self.world > 1:
            dist.broadcast(x, group=self.group, group_src=rank)
        return x

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum each over all ranks, in place and a few large messages at a time."""
        if self.world == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            dist.all_reduce(flat, group=self.group)
            for tensor, summed in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def _reduced(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world == 1:
            return x
        out = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, op, group=self.group)
        return out


_BUCKET = 1 << 26


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Runs of one dtype, each of about so many numbers."""
    out: list[list[Tensor]] = []
    used = 0
    for tensor in tensors:
        if not out or used > _BUCKET or out[-1][0].dtype != tensor.dtype:
            out.append([])
            used = 0
        out[-1].append(tensor)
        used += tensor.numel()
    return out


class Parts:
    """``train.peers.Peers`` of one rank: those of the same tokens, heads and layers with other parts of a batch."""

    def __init__(self, ring: Ring, context: int) -> None:
        self.part, self.parts, self.context, self.lead = ring.rank, ring.world, context, dist.get_rank() == 0
        self._ring = ring

    def sum(self, x: Tensor) -> Tensor:
        return self._ring.sum(x)

    def most(self, x: Tensor) -> Tensor:
        return self._ring.most(x)

    def names(self, own: Sequence[str]) -> list[str]:
        if self.parts == 1:
            return list(own)
        told: list[list[str]] = [[]] * self.parts
        dist.all_gather_object(told, list(own), group=self._ring.group)
        return list(dict.fromkeys(name for names in told for name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """Every ring of this rank. ``rows`` are all that have other rows or tokens, ``expert_rows`` those of them that have
    the same experts, ``ends`` the first and the last stage (None on stages between)."""

    tensor: Ring
    context: Ring
    pipeline: Ring
    rows: Ring
    expert: Ring
    expert_tensor: Ring
    expert_rows: Ring
    ends: Ring | None
    everyone: Ring
    peers: Parts


def join(layout: Layout, *, virtual: int | None = None, seed: int = 1234) -> Rings:
    """Make Megatron's parallel state for ``layout``, once a process; all ranks of the default group call it.

    ``virtual`` is how many runs of layers a pipeline rank has. A second call must be for the same sizes.
    """
    there = dist.get_world_size() if dist.is_initialized() else 0
    if layout.world != there:
        raise UsageError(f"the layout is for {layout.world} ranks, and {there} have joined.")
    sizes = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": virtual,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor or layout.tensor,
    }
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        # Megatron forks this randomness under sequence parallelism; nothing here draws from it.
        model_parallel_cuda_manual_seed(seed)
    found = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    assert found == sizes, f"Megatron's parallel state is of another layout: {found}, not {sizes}"
    return _rings()


def leave() -> None:
    """Forget Megatron's parallel state, so that another layout can be joined."""
    parallel_state.destroy_model_parallel()


def _rings() -> Rings:
    ends: Any = parallel_state.get_embedding_group(check_initialized=False)
    inside = ends is not None and dist.get_rank() in dist.get_process_group_ranks(ends)
    context = Ring(parallel_state.get_context_parallel_group())
    return Rings(
        tensor=Ring(parallel_state.get_tensor_model_parallel_group()),
        context=context,
        pipeline=Ring(parallel_state.get_pipeline_model_parallel_group()),
        rows=Ring(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        expert=Ring(parallel_state.get_expert_model_parallel_group()),
        expert_tensor=Ring(parallel_state.get_expert_tensor_parallel_group()),
        expert_rows=Ring(parallel_state.get_expert_data_parallel_group()),
        ends=Ring(ends) if inside else None,
        everyone=Ring(dist.group.WORLD),
        peers=Parts(Ring(parallel_state.get_data_parallel_group()), context.world),
    )
