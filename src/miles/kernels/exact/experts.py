"""A mixture of experts, of each token for itself: its rows through their experts, added in the order of its choices.

Shapes: T tokens, k experts a token, R = T * k rows, E experts, D features, I intermediate, F = 2I (I without gates).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from miles.kernels.exact.gate import activated, gate
from miles.kernels.exact.grouped import collect, grouped_linear
from miles.kernels.exact.order import ordered
from miles.kernels.gated import Kind
from miles.kernels.grouped import Exchange, Rows, dispatch, weigh


class Experts(NamedTuple):
    """The weights of experts, stacked, and what lies between their two products."""

    first_EFD: Tensor
    down_EDI: Tensor
    first_bias_EF: Tensor | None
    down_bias_ED: Tensor | None
    activation: Kind
    interleaved: bool

    def __call__(self, x_RD: Tensor, rows: Rows) -> Tensor:
        inner_RF = grouped_linear(x_RD, self.first_EFD, rows, self.first_bias_EF)
        if inner_RF.shape[1] == self.down_EDI.shape[2]:
            inner_RI = activated(inner_RF, self.activation)
        else:
            inner_RI = gate(inner_RF, self.activation, interleaved=self.interleaved)
        return grouped_linear(inner_RI, self.down_EDI, rows, self.down_bias_ED)


def exact_experts(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    experts: Experts,
    *,
    weigh_input: bool,
    exchange: Exchange | None,
) -> Tensor:
    """As ``kernels.experts.moe_forward``."""
    rows = ordered(experts_Tk, len(experts.first_EFD) * (1 if exchange is None else exchange.world))
    trip = None if exchange is None else exchange.open(rows)
    x_RD = dispatch(x_TD, rows)
    if weigh_input:
        x_RD = weigh(x_RD, weights_Tk, rows)
    out_RD = experts(x_RD, rows) if trip is None else trip(x_RD, experts)
    return collect(out_RD, None if weigh_input else weights_Tk, rows)
