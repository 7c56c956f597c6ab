"""A rank's decoder given to FSDP: every layer by itself, and what stands around the layers together.

Gradients are plain sums over the ranks: a token's weight in the loss is already that in the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from miles.backends.fsdp import expert
from miles.backends.fsdp.mesh import Mesh, all_gather, reduce_scatter
from miles.models.decoder import Decoder, Layer


def wrapped(decoder: Decoder, mesh: Mesh, *, dtype: torch.dtype | None, cpu_offload: bool) -> frozenset[str]:
    """Cut ``decoder``'s parameters over the mesh, to be brought together in ``dtype``; gives those that stay whole.

    The decoder may have no storage yet. Embedding, last norm and head stay together after a forward, because what
    comes after it needs the head.
    """
    if mesh.shard is None:
        return frozenset(name for name, _ in decoder.named_parameters())
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu") if cpu_offload else OffloadPolicy()
    kept = {name: parameter for name, parameter in decoder.named_parameters() if _short(name)}
    dealt = expert.ignored(decoder) if mesh.expert_shard is not None else set[nn.Parameter]()
    ignored = {*kept.values(), *dealt}
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        fully_shard(layer, mesh=mesh.shard, mp_policy=policy, offload_policy=offload, ignored_params=ignored)
        register_fsdp_forward_method(layer, "pending")
        if layer.moe is not None and mesh.expert_shard is not None:
            expert.shard(layer.moe, mesh.expert_shard, policy=policy, offload=offload)
    fully_shard(
        decoder,
        mesh=mesh.shard,
        reshard_after_forward=False,
        mp_policy=policy,
        offload_policy=offload,
        ignored_params=ignored,
    )
    if mesh.expert_shard is not None:
        expert.prefetch([layer for layer in decoder.layers if isinstance(layer, Layer)])
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if mesh.staged:
                module.set_custom_all_gather(StagedGather())
                module.set_custom_reduce_scatter(StagedReduce())
    return frozenset(kept)


def _short(name: str) -> bool:
    """Is it a few numbers that lose their meaning when rounded?"""
    return name.endswith(".moe.correction")


class StagedGather(AllGather):
    """By way of the host, for ranks that share a device and so cannot use its own ways."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        out = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        all_gather(out, input_tensor.cpu(), group=group)
        output_tensor.copy_(out)


class StagedReduce(ReduceScatter):
    """By way of the host, too."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        out = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        reduce_scatter(out, input_tensor.cpu(), op=op, group=group)  # pyright: ignore[reportArgumentType]
        output_tensor.copy_(out)
