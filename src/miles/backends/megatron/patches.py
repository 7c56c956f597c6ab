"""Mends of Megatron-Core where it is broken: each by name, with its reason and the version it ends at, when asked."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

# A name that Megatron-Core 0.16 binds only where Transformer Engine is installed, and reads everywhere.
_GEMM = "te_general_gemm"


def router_without_transformer_engine() -> None:
    """Let routers run without Transformer Engine.

    ``moe_utils.router_gating_linear`` asks whether ``te_general_gemm`` is None, but without Transformer Engine the name
    does not exist and every forward of a router is a NameError, on a GPU as on a CPU. Seen in megatron-core 0.16.0 and
    0.16.1; to be removed with the first release that binds the name itself.
    """
    if not hasattr(moe_utils, _GEMM):
        setattr(moe_utils, _GEMM, None)


def latent_without_transformer_engine() -> None:
    """Let latent attention be built without Transformer Engine.

    ``multi_latent_attention`` takes Transformer Engine to be there when Megatron's own wrappers of it can be imported,
    which they always can; without it they are no types, and asking whether a layer is one of them is a TypeError. Seen
    in megatron-core 0.16.1; to be removed with the first release that asks for the package itself.
    """
    if find_spec("transformer_engine") is None:
        multi_latent_attention.HAVE_TE = False


def optimizer_without_transformer_engine() -> None:
    """Let a distributed optimizer be read from a checkpoint without Transformer Engine and Apex.

    Torch's Adam then stands in, which keeps a count with the moments of every tensor.
    ``DistributedOptimizer._set_main_param_and_optimizer_states`` looks for it among the tensors of a checkpoint, where
    it is not (KeyError), and writes into float32 weights that require a gradient (RuntimeError). Seen in megatron-core
    0.16.1; to be removed with the first release that leaves the count out and writes without a gradient.
    """
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    setattr(distrib_optimizer.DistributedOptimizer, "_set_main_param_and_optimizer_states", _set_states)  # noqa: B010


@torch.no_grad()
def _set_states(self: Any, model_param: Tensor, tensors: Mapping[str, Tensor]) -> None:
    group, place = self.model_param_group_index_map[model_param]
    master = self.optimizer.param_groups[group]["params"][place]
    for key, kept in {"param": master, **self.optimizer.state[master]}.items():
        if key != "step":
            kept.copy_(tensors[key])


def buckets_without_gaps(wrapped: Sequence[Any]) -> None:
    """Let a distributed optimizer's checkpoint find what lies behind the first bucket of a buffer.

    A tied embedding has a bucket of its own, and buckets are padded to multiples of 128. The reshardable format of
    ``DistributedOptimizer`` puts the buckets together without that padding, then looks parameters up where they are
    with it, and stores shifted numbers with a warning. Here the padding counts as part of a bucket. Seen in
    megatron-core 0.16.1; to be removed with the first release that puts both into the same places.
    """
    for each in wrapped:
        for buffer in [*each.buffers, *each.expert_parallel_buffers]:
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()
