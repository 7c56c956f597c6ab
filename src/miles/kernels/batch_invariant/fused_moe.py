"""Batch-invariant fused MoE: each token's rows through their experts, added in the order of its choices.

Shapes: T tokens, k experts per token, R = T * k rows, E experts, D features, I intermediate, F = 2I (I without gates).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from miles.kernels.batch_invariant.activation import gated_activation, ungated_activation
from miles.kernels.batch_invariant.expert_sort import sort_by_expert
from miles.kernels.batch_invariant.grouped_gemm import combine_rows, grouped_linear
from miles.kernels.fused.activation import ActivationKind
from miles.kernels.moe.grouped_gemm import ExpertExchange, RowAdapter, SortedRows, dispatch, scale_rows


class ExpertWeights(NamedTuple):
    """Stacked expert weights, the activation between the two GEMMs, and LoRA adapters in training."""

    first_EFD: Tensor
    down_EDI: Tensor
    first_bias_EF: Tensor | None
    down_bias_ED: Tensor | None
    activation: ActivationKind
    interleaved: bool
    first_adapter: RowAdapter | None = None
    down_adapter: RowAdapter | None = None

    def __call__(self, x_RD: Tensor, rows: SortedRows) -> Tensor:
        inner_RF = grouped_linear(x_RD, self.first_EFD, rows, self.first_bias_EF)
        if self.first_adapter is not None:
            inner_RF = self.first_adapter(inner_RF, x_RD, rows)
        if inner_RF.shape[1] == self.down_EDI.shape[2]:
            inner_RI = ungated_activation(inner_RF, self.activation)
        else:
            inner_RI = gated_activation(inner_RF, self.activation, interleaved=self.interleaved)
        out_RD = grouped_linear(inner_RI, self.down_EDI, rows, self.down_bias_ED)
        return out_RD if self.down_adapter is None else self.down_adapter(out_RD, inner_RI, rows)


def batch_invariant_moe(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    experts: ExpertWeights,
    *,
    weigh_input: bool,
    exchange: ExpertExchange | None,
) -> Tensor:
    """As ``moe.fused_moe.moe_forward``."""
    rows = sort_by_expert(experts_Tk, len(experts.first_EFD) * (1 if exchange is None else exchange.world))
    handle = None if exchange is None else exchange.open(rows)
    x_RD = dispatch(x_TD, rows)
    if weigh_input:
        x_RD = scale_rows(x_RD, weights_Tk, rows)
    out_RD = experts(x_RD, rows) if handle is None else handle(x_RD, experts)
    return combine_rows(out_RD, None if weigh_input else weights_Tk, rows)
