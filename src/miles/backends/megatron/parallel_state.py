"""Megatron's parallel state built from a parallel layout, and the process groups of a rank.

Megatron orders ranks as the layout does: tensor fastest, then context, then data parallel, pipeline slowest.
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

from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError


class MegatronGroup:
    """A process group as one rank sees it; its operations are not differentiable."""

    def __init__(self, group: Any) -> None:
        assert isinstance(group, dist.ProcessGroup)
        self.process_group = group
        self.rank = group.rank()
        self.world = group.size()

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce: the sum over all ranks, bitwise equal on each."""
        return self._all_reduce(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        """All-reduce: the elementwise maximum over all ranks."""
        return self._all_reduce(x, dist.ReduceOp.MAX)

    def gather(self, x: Tensor) -> list[Tensor]:
        """All-gather tensors of one shape into a list, in rank order."""
        if self.world == 1:
            return [x]
        sent = _view_sendable(x.contiguous())
        found = [torch.empty_like(sent) for _ in range(self.world)]
        dist.all_gather(found, sent, group=self.process_group)
        return [each.view(x.dtype) for each in found]

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows: ``sent[i]`` rows of ``x`` go to rank i, ``received[i]`` come from it."""
        if self.world == 1:
            return x
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=self.process_group)
        return out

    def send(self, x: Tensor, rank: int) -> None:
        """Send ``x`` to a rank, which receives it."""
        dist.send(x.detach().contiguous(), group=self.process_group, group_dst=rank)

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Return what a rank sends, of the shape and type of ``like``."""
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(out, group=self.process_group, group_src=rank)
        return out

    def broadcast(self, x: Tensor, rank: int) -> Tensor:
        """Broadcast that rank's ``x``; that of the others is overwritten."""
        if self.world > 1:
            dist.broadcast(_view_sendable(x), group=self.process_group, group_src=rank)
        return x

    def all_reduce_bucketed(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all ranks, in place, in a few large all-reduces."""
        if self.world == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            dist.all_reduce(flat, group=self.process_group)
            for tensor, summed in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def _all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world == 1:
            return x
        out = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, op, group=self.process_group)
        return out


def _view_sendable(x: Tensor) -> Tensor:
    """Return a view in a dtype that every backend sends: there is none of FP8 in gloo."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


_BUCKET = 1 << 26


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors of one dtype into buckets of limited size."""
    out: list[list[Tensor]] = []
    used = 0
    for tensor in tensors:
        if not out or used > _BUCKET or out[-1][0].dtype != tensor.dtype:
            out.append([])
            used = 0
        out[-1].append(tensor)
        used += tensor.numel()
    return out


class MegatronDpGroup:
    """The data-parallel group of one rank: the same tokens, heads and layers, other samples."""

    def __init__(self, group: MegatronGroup, context: int) -> None:
        self.dp_rank = group.rank
        self.dp_size = group.world
        self.cp_size = context
        self.world_size = dist.get_world_size()
        self.is_lead = dist.get_rank() == 0
        self._group = group

    def sum(self, x: Tensor) -> Tensor:
        return self._group.sum(x)

    def max(self, x: Tensor) -> Tensor:
        return self._group.max(x)

    def union_names(self, own: Sequence[str]) -> list[str]:
        if self.dp_size == 1:
            return list(own)
        gathered: list[list[str]] = [[]] * self.dp_size
        dist.all_gather_object(gathered, list(own), group=self._group.process_group)
        return list(dict.fromkeys(name for names in gathered for name in names))

    def sum_world(self, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelState:
    """All process groups of this rank. ``dp_cp_group`` are all with other samples or tokens, ``expert_dp_group`` those
    of them with the same experts, ``embedding_group`` the first and the last stage (None on other stages).
    """

    tp_group: MegatronGroup
    cp_group: MegatronGroup
    pp_group: MegatronGroup
    dp_cp_group: MegatronGroup
    ep_group: MegatronGroup
    etp_group: MegatronGroup
    expert_dp_group: MegatronGroup
    embedding_group: MegatronGroup | None
    world_group: MegatronGroup
    dp_group: MegatronDpGroup


def initialize_parallel_state(layout: ParallelDims, *, virtual: int | None = None, seed: int = 1234) -> ParallelState:
    """Initialize Megatron's parallel state for ``layout``, once per process; all ranks of the default group call it.

    ``virtual`` is the number of virtual stages per pipeline rank. A second call must use the same sizes.
    """
    world = dist.get_world_size() if dist.is_initialized() else 0
    if layout.world != world:
        raise UsageError(f"the parallel layout needs {layout.world} ranks, but {world} have joined.")
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
        # Megatron forks this RNG under sequence parallelism; nothing here samples from it.
        model_parallel_cuda_manual_seed(seed)
    found = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    assert found == sizes, f"Megatron's parallel state has another layout: {found}, not {sizes}"
    return _collect_groups()


def destroy_parallel_state() -> None:
    """Destroy Megatron's parallel state, so that another layout can be initialized."""
    parallel_state.destroy_model_parallel()


def _collect_groups() -> ParallelState:
    ends: Any = parallel_state.get_embedding_group(check_initialized=False)
    in_group = ends is not None and dist.get_rank() in dist.get_process_group_ranks(ends)
    context = MegatronGroup(parallel_state.get_context_parallel_group())
    return ParallelState(
        tp_group=MegatronGroup(parallel_state.get_tensor_model_parallel_group()),
        cp_group=context,
        pp_group=MegatronGroup(parallel_state.get_pipeline_model_parallel_group()),
        dp_cp_group=MegatronGroup(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        ep_group=MegatronGroup(parallel_state.get_expert_model_parallel_group()),
        etp_group=MegatronGroup(parallel_state.get_expert_tensor_parallel_group()),
        expert_dp_group=MegatronGroup(parallel_state.get_expert_data_parallel_group()),
        embedding_group=MegatronGroup(ends) if in_group else None,
        world_group=MegatronGroup(dist.group.WORLD),
        dp_group=MegatronDpGroup(MegatronGroup(parallel_state.get_data_parallel_group()), context.world),
    )
