"""FSDP2 wrapping of a rank's decoder: every layer and the vision tower by themselves, and embedding, final norm and
head together.

Gradients are plain sums over the ranks: the loss is already weighted for the whole batch. The vision tower is gathered
when a micro-batch is encoded; ranks without images in it take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from torch.utils._pytree import register_dataclass

from miles.backends.fsdp import expert_parallel
from miles.backends.fsdp.device_mesh import FsdpMesh, all_gather, reduce_scatter
from miles.core.media import ImageInput
from miles.models.decoder import CheckpointFn, Decoder, DecoderLayer
from miles.models.vision.inputs import VisionFeatures
from miles.models.vision.tower import VisionTower

# FSDP looks for tensors in a module's output, to gather the weights again before its backward.
register_dataclass(VisionFeatures)


def apply_fully_shard(
    decoder: Decoder, mesh: FsdpMesh, *, dtype: torch.dtype | None, cpu_offload: bool
) -> frozenset[str]:
    """Shard ``decoder``'s parameters over the mesh, to be all-gathered in ``dtype``; returns the names that stay
    replicated.

    The decoder may have no storage yet. Embedding, final norm and head stay gathered after a forward, because the loss
    needs the head.
    """
    if mesh.shard_mesh is None:
        return frozenset(name for name, _ in decoder.named_parameters())
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu") if cpu_offload else OffloadPolicy()
    replicated = {name: p for name, p in decoder.named_parameters() if _must_stay_replicated(name, p)}
    experts = expert_parallel.expert_params(decoder) if mesh.expert_shard_mesh is not None else set[nn.Parameter]()
    ignored = {*replicated.values(), *experts}
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        fully_shard(layer, mesh=mesh.shard_mesh, mp_policy=policy, offload_policy=offload, ignored_params=ignored)
        register_fsdp_forward_method(layer, "forward_deferred")
        if layer.moe is not None and mesh.expert_shard_mesh is not None:
            expert_parallel.fully_shard_experts(layer.moe, mesh.expert_shard_mesh, policy=policy, offload=offload)
    if decoder.vision is not None:
        fully_shard(
            decoder.vision, mesh=mesh.shard_mesh, mp_policy=policy, offload_policy=offload, ignored_params=ignored
        )
    fully_shard(
        decoder,
        mesh=mesh.shard_mesh,
        reshard_after_forward=False,
        mp_policy=policy,
        offload_policy=offload,
        ignored_params=ignored,
    )
    if mesh.expert_shard_mesh is not None:
        expert_parallel.set_expert_prefetch([layer for layer in decoder.layers if isinstance(layer, DecoderLayer)])
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if mesh.staged:
                module.set_custom_all_gather(HostAllGather())
                module.set_custom_reduce_scatter(HostReduceScatter())
    return frozenset(replicated)


def _must_stay_replicated(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is small and must not be rounded, or is a scalar, such as the scale of a packed weight."""
    return name.endswith(".moe.correction") or not parameter.dim() or not parameter.is_floating_point()


def accept_no_images(tower: VisionTower, width: int, num_deepstack: int, is_adapted: Callable[[], bool]) -> None:
    """Let ``tower`` encode no images: no features, from which its trained parameters get gradients of zero.

    A rank without images in a micro-batch thus gathers and reduces as the others do. If the tower ``is_adapted``, all
    features require a gradient: of a frozen tower, those of other ranks' images may.
    """
    encode = tower.forward

    def forward(images: Sequence[ImageInput], checkpoint_fn: CheckpointFn | None = None) -> VisionFeatures:
        features = encode(images, checkpoint_fn) if images else encode_none()
        if torch.is_grad_enabled() and is_adapted():
            for each in (features.embeds_FD, *features.deepstack):
                each.requires_grad_()
        return features

    def encode_none() -> VisionFeatures:
        parameters = list(tower.parameters())
        trained = [parameter.reshape(-1)[0] for parameter in parameters if parameter.requires_grad]
        zero = torch.stack(trained).sum() if trained else parameters[0].new_zeros(())
        return VisionFeatures(
            embeds_FD=zero.expand(1, width)[:0],
            deepstack=tuple(zero.expand(1, width)[:0] for _ in range(num_deepstack)),
        )

    tower.forward = forward


class HostAllGather(AllGather):
    """All-gather through host memory, for ranks that share a device and cannot use NCCL."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        out = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        all_gather(out, input_tensor.cpu(), group=group)
        output_tensor.copy_(out)


class HostReduceScatter(ReduceScatter):
    """Reduce-scatter through host memory."""

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
