"""Mixture of experts: route in float32, run each expert on its own rows, and remember or replay who went where.

Shapes: T tokens, D hidden, I intermediate, E experts, k experts a token, R = T * k rows, L layers with experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels.grouped import collect, dispatch, grouped_linear, order_rows
from miles.models.linear import Linear
from miles.models.spec import MoeSpec


@dataclass(slots=True, kw_only=True)
class Routing:
    """The experts of one forward. Make a new one for each forward.

    ``replay_TLk`` holds experts to use instead of the router's own choice, L counting the layers that
    have experts, ascending; a token with a negative entry in a layer's row keeps the router's choice
    there. With ``record``, ``recorded`` receives one integer tensor [T, k] per such layer, in order.
    """

    replay_TLk: Tensor | None = None
    record: bool = False
    recorded: list[Tensor] = field(default_factory=list)

    def choose(self, slot: int, own_Tk: Tensor) -> Tensor:
        """The experts to use in the ``slot``-th layer that has any, given the router's own choice."""
        experts_Tk = own_Tk
        if self.replay_TLk is not None:
            replayed_Tk = self.replay_TLk[:, slot].to(own_Tk.dtype)
            experts_Tk = torch.where((replayed_Tk >= 0).all(-1, keepdim=True), replayed_Tk, own_Tk)
        # A checkpointed layer runs a second time in backward, when its slot is filled already.
        if self.record and len(self.recorded) == slot:
            self.recorded.append(experts_Tk.detach())
        return experts_Tk


class MoeMlp(nn.Module):
    """A router and its experts, stacked: ``gate_up`` [E, 2I, D] and ``down`` [E, D, I]."""

    def __init__(
        self, hidden_size: int, moe: MoeSpec, slot: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.slot = slot
        self.experts_per_token = moe.experts_per_token
        self.norm_topk_prob = moe.norm_topk_prob
        made = {"device": device, "dtype": dtype}
        inner, count = moe.intermediate_size, moe.num_experts
        self.router = Linear(hidden_size, count, bias=False, **made)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, hidden_size, **made))
        self.down = nn.Parameter(torch.empty(count, hidden_size, inner, **made))

    def route(self, x_TD: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor]:
        """Which experts each token goes to and with what weights; gradients flow through the weights."""
        probs_TE = F.softmax(self.router(x_TD), dim=-1, dtype=torch.float32)
        weights_Tk, experts_Tk = probs_TE.topk(self.experts_per_token, dim=-1)
        if routing is not None:
            experts_Tk = routing.choose(self.slot, experts_Tk)
            if routing.replay_TLk is not None:
                weights_Tk = probs_TE.gather(-1, experts_Tk)
        if self.norm_topk_prob:
            weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
        return weights_Tk.to(x_TD.dtype), experts_Tk

    def forward(self, x_TD: Tensor, routing: Routing | None) -> Tensor:
        weights_Tk, experts_Tk = self.route(x_TD, routing)
        rows = order_rows(experts_Tk, len(self.gate_up))
        gate_RI, up_RI = grouped_linear(dispatch(x_TD, rows), self.gate_up, rows).chunk(2, dim=-1)
        out_RD = grouped_linear(F.silu(gate_RI) * up_RI, self.down, rows)
        return collect(out_RD, weights_Tk, rows)
