"""Patches of Megatron-Core bugs: each with its reason and the version it ends at, applied when called."""

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

# A name that Megatron-Core 0.16 defines only with Transformer Engine, but always reads.
_GEMM = "te_general_gemm"


def patch_router_without_te() -> None:
    """Let routers run without Transformer Engine.

    ``moe_utils.router_gating_linear`` tests whether ``te_general_gemm`` is None, but without Transformer Engine the
    name does not exist and every forward of a router raises a NameError. Seen in megatron-core 0.16.0 and 0.16.1; to be
    removed with the first release that defines the name.
    """
    if not hasattr(moe_utils, _GEMM):
        setattr(moe_utils, _GEMM, None)


def patch_mla_without_te() -> None:
    """Let MLA be built without Transformer Engine.

    ``multi_latent_attention`` assumes Transformer Engine is installed if Megatron's own wrappers can be imported, which
    is always true; without it they are not types, and isinstance raises a TypeError. Seen in megatron-core 0.16.1; to
    be removed with the first release that checks for the package.
    """
    if find_spec("transformer_engine") is None:
        multi_latent_attention.HAVE_TE = False


def patch_optimizer_without_te() -> None:
    """Let a distributed optimizer be loaded from a checkpoint without Transformer Engine and Apex.

    torch's Adam is then used, which keeps a step count per tensor.
    ``DistributedOptimizer._set_main_param_and_optimizer_states`` looks for it among the checkpoint's tensors, where it
    is missing (KeyError), and writes into float32 weights that require a gradient (RuntimeError). Seen in megatron-core
    0.16.1; to be removed with the first release that skips the count and writes without gradient.
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


def patch_mixed_dtype_groups(inner: Any) -> None:
    """Let the masters of a distributed optimizer be found where float32 parameters are among low-precision ones.

    ``DistributedOptimizer`` puts the float32 shards of a parameter group first, but looks parameters up at their place
    in the group before that: the states of a critic in bfloat16, whose head is float32, are those of other parameters.
    Seen in megatron-core 0.16.1; to be removed with the first release that counts the places after it.
    """
    for each in inner.chained_optimizers:
        for number, groups in enumerate(zip(each.model_fp32_groups, each.model_float16_groups, strict=True)):
            for place, parameter in enumerate(p for group in groups for p in group):
                each.model_param_group_index_map[parameter] = (number, place)


def patch_bucket_padding(ddp_chunks: Sequence[Any]) -> None:
    """Let a distributed optimizer's checkpoint find parameters after the first bucket of a buffer.

    A tied embedding has a bucket of its own, and buckets are padded to multiples of 128. The reshardable format of
    ``DistributedOptimizer`` concatenates the buckets without that padding, then looks parameters up with it, and stores
    shifted values with a warning. Here the padding counts as part of a bucket. Seen in megatron-core 0.16.1; to be
    removed with the first release that uses the same offsets in both.
    """
    for each in ddp_chunks:
        for buffer in [*each.buffers, *each.expert_parallel_buffers]:
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()
