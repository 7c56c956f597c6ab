"""A rank's experts computed together: Megatron's own modules hold them, one product runs all of them.

Shapes: R rows sorted by expert, D features, I channels of this rank, E experts of this rank.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from miles.backends.megatron.shape import Shape
from miles.kernels.gated import gated
from miles.kernels.grouped import Rows, grouped_linear


class Experts(SequentialMLP):
    """Megatron's experts without Transformer Engine, but not one after the other."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        config: Any = self.config
        assert isinstance(config, Shape) and config.decoder.moe is not None
        if config.moe_apply_probs_on_input:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        x_RD, experts = permuted_local_hidden_states, list(self.local_experts)
        ends_E = tokens_per_expert.cumsum(0).to(device=x_RD.device, dtype=torch.int32)
        none = ends_E[:0]  # rows come sorted, and nothing is added to them
        rows = Rows(order_R=none, place_R=none, group_R=none, ends_E=ends_E, per_token=1)
        first: list[Any] = [expert.get_submodule("linear_fc1").weight for expert in experts]
        down: list[Any] = [expert.get_submodule("linear_fc2").weight for expert in experts]
        inner_R2I = grouped_linear(x_RD, torch.stack(first), rows)
        out_RI = gated(inner_R2I, config.decoder.moe.activation) * permuted_probs.unsqueeze(-1)
        return grouped_linear(out_RI.to(x_RD.dtype), torch.stack(down), rows), None
