"""Expert parallelism with FSDP2: each rank has some experts of every layer, of which it may have a shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from miles.core.errors import UsageError
from miles.models.decoder import Decoder, DecoderLayer
from miles.models.layers.moe import MoeMlp
from miles.models.parallel.expert_dispatch import AllToAllDispatcher, AllToAllGroup
from miles.models.spec import DecoderSpec, MoeSpec

__all__ = [
    "AllToAllDispatcher",
    "AllToAllGroup",
    "check_ep_size",
    "choose_shard_dim",
    "expert_param_names",
    "expert_params",
    "fully_shard_experts",
    "gather_experts",
    "set_expert_prefetch",
    "shard_experts",
    "slice_experts",
]


# -- sharding -------------------------------------------------------------------------------


def expert_param_names(spec: DecoderSpec) -> frozenset[str]:
    """Return the names of the decoder's parameters that are sharded over expert-parallel ranks, along dimension 0."""
    return frozenset(
        f"layers.{i}.moe.{name}"
        for i, layer in enumerate(spec.layers)
        if isinstance(layer.ffn, MoeSpec)
        for name in _stacked_names(layer.ffn)
    )


def _stacked_names(spec: MoeSpec) -> tuple[str, ...]:
    biases = ("gate_up_bias", "down_bias") if spec.expert_bias else ()
    return ("gate_up" if spec.gated else "up", "down", *biases)


def _list_stacked(moe: MoeMlp) -> list[str]:
    """List the stacked parameters of a module; of packed weights, all tensors that these consist of."""
    packed = {name: param.suffixes for name, param in moe.quantized.items() if param.packed}
    return [f"{name}{suffix}" for name in _stacked_names(moe.spec) for suffix in packed.get(name, ("",))]


def check_ep_size(spec: DecoderSpec, world: int) -> str | None:
    """Return why ``world`` ranks cannot share the experts (the end of a sentence), or None if they can."""
    if world == 1:
        return None
    if not spec.moe_layers:
        return "it has no experts"
    counts = ((i, layer.ffn.num_experts) for i, layer in enumerate(spec.layers) if isinstance(layer.ffn, MoeSpec))
    return next((f"layer {i} has {count} experts" for i, count in counts if count % world), None)


def slice_experts(stacked: Tensor, rank: int, world: int) -> Tensor:
    """Return a rank's experts of a stacked tensor: a view."""
    assert len(stacked) % world == 0
    return stacked.narrow(0, rank * (len(stacked) // world), len(stacked) // world)


def gather_experts(parts: Sequence[Tensor]) -> Tensor:
    """Return the stacked tensor from the ranks' parts, in order."""
    return torch.cat(list(parts))


def _moe_modules(decoder: nn.Module) -> Iterable[MoeMlp]:
    """Iterate over the MoE modules, in order."""
    return (module for module in decoder.modules() if isinstance(module, MoeMlp))


def shard_experts(decoder: Decoder, group: AllToAllGroup) -> None:
    """Keep only this rank's experts in ``decoder`` and connect it to the other ranks.

    On a decoder without storage only the parameter shapes shrink. Otherwise the tensors are copied, so that the other
    ranks' experts are freed.
    """
    problem = check_ep_size(decoder.spec, group.world)
    if problem is not None:
        raise UsageError(
            f"the model's experts cannot be divided evenly among {group.world} ranks: {problem}; "
            "choose an --expert-model-parallel-size that divides the number of experts."
        )
    if group.world == 1:
        return
    exchange = AllToAllDispatcher(group)
    for moe in _moe_modules(decoder):
        for name in _list_stacked(moe):
            old = moe.get_parameter(name)
            own = slice_experts(old.detach(), group.rank, group.world).clone()
            moe.register_parameter(name, nn.Parameter(own, requires_grad=old.requires_grad))
        moe.exchange = exchange


# -- FSDP of a rank's experts ---------------------------------------------------------------


def expert_params(decoder: nn.Module) -> set[nn.Parameter]:
    """Return the expert parameters that ``fully_shard`` of a layer must leave to ``fully_shard_experts``."""
    return {moe.get_parameter(name) for moe in _moe_modules(decoder) for name in _list_stacked(moe)}


def fully_shard_experts(moe: MoeMlp, mesh: DeviceMesh, *, policy: MixedPrecisionPolicy, offload: OffloadPolicy) -> None:
    """Shard the experts, and nothing else of ``moe``, over ``mesh``: the ranks that have the same experts.

    The surrounding layer must be sharded first, with these among its ``ignored_params``, because FSDP does not look
    into modules that are already sharded.
    """
    own = expert_params(moe)
    world = mesh.size(-1)

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(choose_shard_dim(parameter.shape, world))

    rest = {parameter for parameter in moe.parameters() if parameter not in own}
    fully_shard(moe, mesh=mesh, mp_policy=policy, offload_policy=offload, ignored_params=rest, shard_placement_fn=place)


def choose_shard_dim(shape: Sequence[int], world: int) -> int:
    """Choose the dimension along which ``world`` ranks shard a rank's experts: whole experts, or their rows if those
    divide evenly and the experts do not.
    """
    return 1 if shape[0] % world and shape[1] % world == 0 else 0


def set_expert_prefetch(layers: Sequence[DecoderLayer]) -> None:
    """Let FSDP prefetch the next layer's parameters during the all-to-all; call it after all layers are sharded.

    FSDP's implicit prefetch needs a host that runs ahead of the device, which waiting for counts prevents; and for the
    experts, nearly last in a layer's forward and nearly first in its backward, it would always be too late.

    A recomputed layer must not gather its experts itself: selective recomputation refuses an all-gather that its
    forward pass, whose experts were prefetched, did not have. So the layer's backward gathers them first.
    """
    for layer in layers:
        if layer.moe is not None:
            layer_module, experts_module = _fsdp_modules(layer)
            layer_module.set_modules_to_backward_prefetch([experts_module])
    for layer, next_layer in pairwise(layers):
        _select_forward_prefetcher(layer).set_modules_to_forward_prefetch(_fsdp_modules(next_layer))
        _last(next_layer).set_modules_to_backward_prefetch(_fsdp_modules(layer))


def _select_forward_prefetcher(layer: DecoderLayer) -> FSDPModule:
    """Return the module whose forward prefetches the next layer: the experts, unless other operations follow them.

    Backward then needs the activations of those operations first, and recomputes the experts before FSDP knows of
    their backward: they would prefetch parameters that are already used. FSDP knows of the layer's in time.
    """
    follow = (layer.mlp_post_norm, layer.mlp_hyper, layer.per_layer, layer.output_scale)
    beside_mlp = layer.moe is not None and layer.moe.spec.beside_mlp
    has_following = beside_mlp or any(part is not None for part in follow)
    return _fsdp_modules(layer)[0] if has_following else _last(layer)


def _fsdp_modules(layer: DecoderLayer) -> list[FSDPModule]:
    """Return the modules of a layer that FSDP shards, in forward order."""
    return [module for module in (layer, layer.moe) if isinstance(module, FSDPModule)]


def _last(layer: DecoderLayer) -> FSDPModule:
    return _fsdp_modules(layer)[-1]
