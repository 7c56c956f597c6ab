"""Grouped experts of Megatron's MoE layers without Transformer Engine.

Shapes: R rows sorted by expert, D features, I channels and E experts of this rank.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from miles.backends.megatron.transformer_config import DecoderTransformerConfig
from miles.kernels.fused.activation import gated_activation_inference
from miles.kernels.moe.grouped_gemm import SortedRows, grouped_linear


class GroupedExperts(SequentialMLP):
    """Megatron's experts without Transformer Engine, computed by one grouped GEMM."""

    def stack_weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights of this rank's experts, [E, 2I, D] and [E, D, I]."""
        experts = list(self.local_experts)
        first: list[Any] = [expert.get_submodule("linear_fc1").weight for expert in experts]
        down: list[Any] = [expert.get_submodule("linear_fc2").weight for expert in experts]
        return torch.stack(first), torch.stack(down)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        config: Any = self.config
        assert isinstance(config, DecoderTransformerConfig)
        moe = config.modules.moe
        assert moe is not None, "only layers of this spec have Megatron's experts"
        if config.moe_apply_probs_on_input:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        x_RD = permuted_local_hidden_states
        ends_E = tokens_per_expert.cumsum(0).to(device=x_RD.device, dtype=torch.int32)
        none = ends_E[:0]  # rows are already sorted
        rows = SortedRows(order_R=none, place_R=none, group_R=none, ends_E=ends_E, per_token=1)
        first_EFD, down_EDI = self.stack_weights()
        inner_R2I = grouped_linear(x_RD, first_EFD, rows)
        out_RI = gated_activation_inference(inner_R2I, moe.activation) * permuted_probs.unsqueeze(-1)
        return grouped_linear(out_RI.to(x_RD.dtype), down_EDI, rows), None
