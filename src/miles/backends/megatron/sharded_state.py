"""Sharded state dicts of the decoder's modules, for Megatron's distributed checkpoints (torch_dist).

A tensor is stored as in the decoder, whole: a rank writes and reads its runs of rows. Runs of one tensor differ in
length (the queries, keys and values of one projection), so that these tensors have no regular grid of shards.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

from miles.backends.megatron.parallel_state import MegatronGroup
from miles.backends.megatron.param_mapping import ParamMapping


def build_sharded_tensors(
    module: nn.Module, prefix: str, mappings: Mapping[str, ParamMapping]
) -> dict[str, ShardedTensorFactory]:
    """Shard the state of ``module``, whose tensors have their names in ``mappings``; ``prefix`` is that of keys."""
    return {
        f"{prefix}{name}": _build_factory(f"{prefix}{name}", tensor, mappings[name])
        for name, tensor in module.state_dict(keep_vars=True).items()
    }


def _build_factory(key: str, param: Tensor, mapping: ParamMapping) -> ShardedTensorFactory:
    tp_rank, tp_world = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    shard = mapping.tp_shard
    is_split = bool(shard.segments) and tp_world > 1
    runs = list(shard.runs(tp_rank, tp_world)) if is_split else [(0, 0, param.shape[shard.dim])]
    first_expert = parallel_state.get_expert_model_parallel_rank() * len(param) if mapping.expert else 0
    if mapping.expert:
        same = MegatronGroup(parallel_state.get_expert_data_parallel_group()).rank
    else:
        same = parallel_state.get_data_parallel_rank(with_context_parallel=True)

    def build(key: str, tensor: Tensor, replica_id: Any, _: slice | None) -> dict[str, ShardedTensor]:
        return {str(start): build_run(key, tensor, replica_id, there, start, count) for there, start, count in runs}

    def build_run(key: str, tensor: Tensor, replica_id: Any, there: int, start: int, count: int) -> ShardedTensor:
        part = tensor.narrow(shard.dim, start, count).contiguous()
        offsets = [0] * part.dim()
        offsets[shard.dim] = there
        offsets[0] += first_expert
        return ShardedTensor(
            key, part, part.dtype, tuple(part.shape), mapping.shape, tuple(offsets), None, replica_id=replica_id
        )

    def merge(parts: dict[str, Tensor]) -> Tensor:
        if shard.first_rank_only and tp_rank:
            return parts["0"].new_zeros(param.shape)
        if len(parts) == 1:
            (found,) = parts.values()
            if found.shape == param.shape:
                return found
        full = next(iter(parts.values())).new_zeros(param.shape)
        for _, start, count in runs:
            full.narrow(shard.dim, start, count).copy_(parts[str(start)])
        return full

    return ShardedTensorFactory(key, param, build, merge, replica_id=(0, 0 if is_split else tp_rank, same))
