"""Batch-invariant mixture of experts for Megatron's layer specs (``--parity exact``).

Megatron has the parameters. Router, experts and the sum over a token's experts are the engine's, and so is the token
dispatch of the FSDP trainer, which keeps the order of a token's choices.

Shapes: ``t`` slots of this rank, ``s`` those of them that are its own under sequence parallelism, 1 Megatron's batch
dimension, D features, E experts, k of them per token.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from miles.backends.megatron.batch_invariant_layers import MLP_SUBMODULES, reduce_in_rank_order
from miles.backends.megatron.experts import GroupedExperts
from miles.backends.megatron.packed_batch import LayerRoutingReplay
from miles.backends.megatron.parallel_state import MegatronGroup
from miles.backends.megatron.router import BalancedRouter
from miles.backends.megatron.transformer_config import DecoderTransformerConfig
from miles.kernels.batch_invariant.activation import gated_activation, sigmoid
from miles.kernels.batch_invariant.fused_moe import ExpertWeights, batch_invariant_moe
from miles.kernels.batch_invariant.linear import linear
from miles.models.layers.moe import route_batch_invariant, select_experts
from miles.models.parallel.expert_dispatch import AllToAllDispatcher
from miles.models.spec import Activation, MoeSpec


def _moe_spec(config: Any) -> MoeSpec:
    assert isinstance(config, DecoderTransformerConfig)
    moe = config.modules.moe
    assert moe is not None, "only layers of this spec have Megatron's experts"
    return moe


class BatchInvariantRouter(BalancedRouter):
    """A router that returns the weights and indices of each token's experts, [s, k], in the order of its choices."""

    router_replay: LayerRoutingReplay | None

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits of all experts."""
        spec, dtype = _moe_spec(self.config), input.dtype
        if spec.wide_router or spec.score != "softmax":
            dtype = torch.promote_types(dtype, torch.float32)
        return linear(input.to(dtype), self.weight.to(dtype))

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert padding_mask is None
        spec, replay = _moe_spec(self.config), self.router_replay
        logits_sE = self.gating(input.flatten(0, -2))
        weights_sk, experts_sk = route_batch_invariant(
            spec,
            logits_sE,
            partial(select_experts, spec, self.expert_bias),
            dtype=input.dtype,
            choose=None if replay is None else replay.choose,
            replays=replay is not None and replay.replays,
        )
        return self.attach_losses(weights_sk, logits_sE), experts_sk


class BatchInvariantSharedExperts(SharedExpertMLP):
    """The shared experts: this tensor-parallel rank's part of a sum over all of them."""

    def __init__(self, config: DecoderTransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        shared = _moe_spec(config).shared
        assert shared is not None
        self.activation: Activation = shared.activation
        for module in (self.linear_fc1, self.linear_fc2):
            assert isinstance(module, ColumnParallelLinear | RowParallelLinear)
            module.explicit_expert_comm = True  # the layer communicates

    def forward(self, hidden_states: Tensor) -> Tensor:
        inner, _ = self.linear_fc1(hidden_states)
        out_tD, _ = self.linear_fc2(gated_activation(inner, self.activation))
        if self.gate_weight is None:
            return out_tD
        return out_tD * sigmoid(linear(hidden_states, self.gate_weight))


class BatchInvariantMoeLayer(MoELayer):
    """A MoELayer whose experts have the tensor-parallel layout of the other layers, as in an engine."""

    router: BatchInvariantRouter

    def __init__(self, config: DecoderTransformerConfig, **kwargs: Any) -> None:
        super().__init__(config, _SUBMODULES, **kwargs)
        ep_group = MegatronGroup(self.ep_group)
        self._exchange = AllToAllDispatcher(ep_group) if ep_group.world > 1 else None

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        assert intermediate_tensors is None and padding_mask is None
        group, sequence = MegatronGroup(self.tp_group), bool(self.config.sequence_parallel)
        x_tD = hidden_states.flatten(0, -2)
        weights_tk, experts_tk = self.router(hidden_states)
        if group.world > 1:
            assert sequence, "a rule refuses experts and tensor parallelism without sequence parallelism"
            # Every rank has some channels of the experts, so these gradients are summed over the ranks.
            x_tD, weights_tk = (
                gather_from_sequence_parallel_region(x, group=self.tp_group) for x in (x_tD, weights_tk)
            )
            experts_tk = torch.cat(group.gather(experts_tk))
        out_tD = batch_invariant_moe(
            x_tD, weights_tk, experts_tk, self._weights(), weigh_input=False, exchange=self._exchange
        )
        if self.shared_experts is not None:
            out_tD = out_tD + self.shared_experts(x_tD)
        out_sD = reduce_in_rank_order(out_tD, group, sequence=sequence)
        return out_sD.view(hidden_states.shape), None

    def _weights(self) -> ExpertWeights:
        experts, spec = self.experts, _moe_spec(self.config)
        assert isinstance(experts, GroupedExperts)
        first_EFD, down_EDI = experts.stack_weights()
        return ExpertWeights(first_EFD, down_EDI, None, None, spec.activation, False)


_SUBMODULES = MoESubmodules(
    router=BatchInvariantRouter,
    experts=ModuleSpec(module=GroupedExperts, submodules=MLP_SUBMODULES),
    shared_experts=ModuleSpec(module=BatchInvariantSharedExperts, submodules=MLP_SUBMODULES),
)
