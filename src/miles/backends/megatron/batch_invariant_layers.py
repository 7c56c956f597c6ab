"""Batch-invariant modules for Megatron's layer specs (``--parity exact``): linear layers, MLP and self-attention.

Megatron has the parameters, in its own layout, and the structure; the kernels are those of the engine, called with the
tensors that an engine of as many tensor-parallel ranks has. Partial results are summed over ranks in rank order.

Shapes: ``t`` slots of this rank, ``s`` those of them that are its own under sequence parallelism, 1 Megatron's batch
dimension, K in, N out, H query heads, G key-value heads, d channels of a head.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from miles.backends.megatron.packed_batch import PackedParams
from miles.backends.megatron.parallel_state import MegatronGroup
from miles.backends.megatron.param_mapping import ParamMapping
from miles.backends.megatron.transformer_config import DecoderTransformerConfig
from miles.kernels.batch_invariant import qk_norm_rope as invariant_qk
from miles.kernels.batch_invariant.activation import gated_activation
from miles.kernels.batch_invariant.elementwise import sum_in_rank_order
from miles.kernels.batch_invariant.linear import linear
from miles.kernels.fused.qk_norm_rope import QKVShape
from miles.kernels.moe.grouped_gemm import permute
from miles.kernels.runtime.triton_compat import use_triton
from miles.models.layers.rope import Positions, apply_rotary
from miles.models.parallel.tp_sharding import TpShard
from miles.models.spec import Activation, AttentionSpec

# -- sums over tensor-parallel ranks --------------------------------------------------------


def reduce_in_rank_order(part: Tensor, group: MegatronGroup, *, sequence: bool) -> Tensor:
    """Sum the ranks' partial results in rank order: of all slots, or under ``sequence`` parallelism of this rank's."""
    if group.world == 1:
        return part
    return (_ReduceScatter if sequence else _AllReduce).apply(part, group)  # pyright: ignore[reportReturnType]


class _AllReduce(torch.autograd.Function):
    """Every rank continues with the same sum, so the gradient is passed through."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: MegatronGroup) -> Tensor:
        return sum_in_rank_order(group.gather(part))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _ReduceScatter(torch.autograd.Function):
    """The gradient of each rank's slots is all-gathered."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: MegatronGroup) -> Tensor:
        ctx.group = group
        sizes = [len(part) // group.world] * group.world
        return sum_in_rank_order(group.all_to_all(part, sizes, sizes).chunk(group.world))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.cat(ctx.group.gather(grad)), None


# -- linear layers --------------------------------------------------------------------------


class BatchInvariantColumnLinear(ColumnParallelLinear):
    """A ColumnParallelLinear, which adds its bias before it rounds."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        assert weight is None and not runtime_gather_output and not self.gather_output
        return self.project(self._enter(input_)), None

    def project(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return linear(x, self.weight, self.bias)

    def _enter(self, x: Tensor) -> Tensor:
        """Return all slots; each rank computes some of the outputs, so the gradient is summed over the ranks."""
        if self.explicit_expert_comm or self.output_size_per_partition == self.output_size:
            return x
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(x, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(x, group=self.tp_group)


class BatchInvariantQKVLinear(BatchInvariantColumnLinear):
    """The projection to queries, keys and values, which Megatron orders by key-value head.

    On a CPU the bits of an output may depend on its place among the outputs: they are computed in the decoder's order.
    """

    def __init__(self, *args: Any, config: DecoderTransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        ranks, groups = self.output_size // self.output_size_per_partition, config.num_query_groups
        assert groups is not None and groups % ranks == 0, "a rule refuses more ranks than key-value heads"
        assert config.kv_channels is not None, "set with the heads"
        heads = (config.num_attention_heads // ranks, groups // ranks, config.kv_channels)
        mapping = ParamMapping(shape=(self.output_size_per_partition,), tp_shard=TpShard(), heads=heads)
        place_N = mapping.to_megatron(torch.arange(self.output_size_per_partition, device="cpu"))
        self._place_N, self._order_N = place_N, place_N.argsort()

    def project(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        if use_triton(x):
            return linear(x, self.weight, self.bias)
        place_N, order_N = (index.to(x.device) for index in (self._place_N, self._order_N))
        bias_N = None if self.bias is None else permute(self.bias, order_N, place_N)
        return linear(x, permute(self.weight, order_N, place_N), bias_N).index_select(-1, place_N)


class BatchInvariantRowLinear(RowParallelLinear):
    """A RowParallelLinear; as in an engine the first rank adds the bias before it rounds."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        assert self.input_is_parallel
        group = MegatronGroup(self.tp_group)
        part = linear(input_, self.weight, self.bias if group.rank == 0 else None)
        if self.explicit_expert_comm:
            return part, None
        if self.bias is not None and group.rank and not self.sequence_parallel:
            # The bias is replicated, and so must be its gradient.
            part = _AddNothing.apply(part, self.bias)
        return reduce_in_rank_order(part, group, sequence=self.sequence_parallel and group.world > 1), None


class _AddNothing(torch.autograd.Function):
    """Identity of ``x``, with the gradient of ``x + bias``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_N: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, grad.reshape(-1, grad.shape[-1]).sum(0)


class BatchInvariantLinear(nn.Module):
    """A linear layer that every tensor-parallel rank has in full: the down-projections of MLA."""

    def __init__(self, config: DecoderTransformerConfig, size_in: int, size_out: int) -> None:
        super().__init__()
        empty = torch.empty(size_out, size_in, dtype=config.params_dtype, device=config.param_device)
        self.weight = nn.Parameter(empty)
        # Megatron reads this attribute.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return linear(x, self.weight), None

    def get_extra_state(self) -> None:
        """Return None, as Megatron's linear layers do, whose checkpoints have an entry for it."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore it."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Describe the weight for Megatron's distributed checkpoints."""
        tensors = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(tensors, prefix, {}, sharded_offsets)


# -- MLP ------------------------------------------------------------------------------------


def find_mlp_activation(config: DecoderTransformerConfig) -> Activation:
    """Return the activation of Megatron's dense layers, which all have the same."""
    mlp = config.modules.mlp
    assert mlp is not None, "only layers of this spec have Megatron's MLP"
    return mlp.activation


class BatchInvariantMLP(MLP):
    """A gated MLP."""

    def __init__(self, config: DecoderTransformerConfig) -> None:
        group = get_tensor_model_parallel_group()
        assert isinstance(group, ProcessGroup), "this rank is in one"
        super().__init__(config, MLP_SUBMODULES, ffn_hidden_size=config.ffn_hidden_size, tp_group=group)
        self.activation: Activation = find_mlp_activation(config)

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> Any:
        assert per_token_scale is None
        inner, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(gated_activation(inner, self.activation))


MLP_SUBMODULES = MLPSubmodules(linear_fc1=BatchInvariantColumnLinear, linear_fc2=BatchInvariantRowLinear)


# -- attention ------------------------------------------------------------------------------


class BatchInvariantSelfAttention(SelfAttention):
    """Self-attention whose QK-norm and RoPE are those of the engine, fused where its are.

    What follows is Megatron's: core attention and the output projection.
    """

    _positions: Positions | None = None

    def __init__(self, config: DecoderTransformerConfig, *args: Any, layer_number: int, **kwargs: Any) -> None:
        super().__init__(config, *args, layer_number=layer_number, **kwargs)
        mixer = config.decoder_spec.layers[layer_number - 1].mixer
        assert isinstance(mixer, AttentionSpec)
        self.spec = mixer
        self._norm_offset = config.decoder_spec.norm_offset

    def forward(self, *args: Any, packed_seq_params: PackedParams | None = None, **kwargs: Any) -> Any:
        assert packed_seq_params is not None
        self._positions = packed_seq_params.positions
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values after QK-norm and RoPE, [t, 1, heads, d]."""
        assert key_value_states is None and split_qkv and not output_gate
        assert isinstance(self.linear_qkv, BatchInvariantQKVLinear)
        qkv, _ = self.linear_qkv(hidden_states)
        each = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        by_group = qkv.squeeze(1).unflatten(-1, (self.num_query_groups_per_partition, each + 2, -1))
        q_tHd, k_tGd, v_tGd = (part.flatten(1, 2) for part in by_group.split((each, 1, 1), dim=2))
        if self.spec.temperature is None and use_triton(q_tHd):
            q_tHd, k_tGd, v_tGd = self._norm_and_rotate_fused(q_tHd, k_tGd, v_tGd)
        else:
            q_tHd, k_tGd = self._norm_and_rotate(q_tHd, k_tGd)
        return q_tHd.unsqueeze(1), k_tGd.unsqueeze(1), v_tGd.unsqueeze(1)

    def _norm_and_rotate(self, q_tHd: Tensor, k_tGd: Tensor) -> tuple[Tensor, Tensor]:
        spec, positions = self.spec, self._positions
        norms = (self.q_layernorm, self.k_layernorm)
        assert positions is not None
        q_tHd, k_tGd = (
            x if norm is None else norm(x.contiguous()) for norm, x in zip(norms, (q_tHd, k_tGd), strict=True)
        )
        if spec.rope is not None:
            cos_sin = positions.cos_sin(spec.rope, spec.head_dim)
            q_tHd, k_tGd = (
                apply_rotary(x, cos_sin, interleaved=spec.rope.interleaved, numerics=positions.numerics)
                for x in (q_tHd, k_tGd)
            )
        if spec.temperature is not None:
            q_tHd = (q_tHd * positions.temperature(*spec.temperature)).to(q_tHd.dtype)
        return q_tHd, k_tGd

    def _norm_and_rotate_fused(self, q_tHd: Tensor, k_tGd: Tensor, v_tGd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec, positions = self.spec, self._positions
        assert positions is not None
        shape = QKVShape(
            heads=q_tHd.shape[1],
            kv_heads=k_tGd.shape[1],
            head_dim=spec.head_dim,
            interleaved=spec.rope is not None and spec.rope.interleaved,
            eps=self.config.layernorm_epsilon,
            offset=self._norm_offset,
        )
        qkv_tN = torch.cat((q_tHd, k_tGd, v_tGd), 1).flatten(1)
        q_weight_d, k_weight_d = (
            _get_weight(norm) if spec.qk_norm == "head" else None for norm in (self.q_layernorm, self.k_layernorm)
        )
        cos_sin = positions.cos_sin_table(spec.rope, spec.head_dim)
        return invariant_qk.qk_norm_rope(qkv_tN, *cos_sin, q_weight_d, k_weight_d, shape)


def _get_weight(norm: object) -> Tensor:
    assert isinstance(norm, nn.Module)
    return norm.get_parameter("weight")
