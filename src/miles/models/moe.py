"""Mixture of experts: route in float32, run each expert on its own rows, and remember or replay who went where.

Shapes: T tokens, D hidden, I intermediate, E experts, k experts a token, R = T * k rows, L layers with experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels.arithmetic import exact
from miles.kernels.device_code import ready
from miles.kernels.exact import route as exact_routes
from miles.kernels.exact.gate import sigmoid
from miles.kernels.experts import moe_forward
from miles.kernels.grouped import Exchange
from miles.kernels.route import route
from miles.kernels.slim import linear
from miles.models.linear import Linear
from miles.models.mlp import Mlp
from miles.models.spec import MoeSpec

# Keeps the weights of replayed experts that the router would never choose from becoming 0 / 0.
_TINY = 1e-20


def _best(scores: Tensor, count: int) -> Tensor:
    return scores.topk(count, dim=-1).indices


@dataclass(slots=True, kw_only=True)
class Routing:
    """The experts of one forward. Make a new one for each forward.

    ``replay_TLk`` holds experts to use instead of the router's own choice, L counting the layers that
    have experts, ascending; a token with a negative entry in a layer's row keeps the router's choice
    there. With ``record``, ``recorded`` receives one integer tensor [T, k] per such layer, in order. ``load_LE``, where
    it is given, is added to: how many of the tokens' choices fell on each expert.
    """

    replay_TLk: Tensor | None = None
    record: bool = False
    recorded: list[Tensor] = field(default_factory=list)
    load_LE: Tensor | None = None
    counted: set[int] = field(default_factory=set)

    def choose(self, slot: int, own_Tk: Tensor) -> Tensor:
        """The experts to use in the ``slot``-th layer that has any, given the router's own choice."""
        experts_Tk = own_Tk
        if self.replay_TLk is not None:
            replayed_Tk = self.replay_TLk[:, slot].to(own_Tk.dtype)
            experts_Tk = torch.where((replayed_Tk >= 0).all(-1, keepdim=True), replayed_Tk, own_Tk)
        # A checkpointed layer runs a second time in backward, when its slot is filled already.
        if self.record and len(self.recorded) == slot:
            self.recorded.append(experts_Tk.detach())
        if self.load_LE is not None and slot not in self.counted:
            self.counted.add(slot)
            choices_R = experts_Tk.flatten()
            self.load_LE[slot].scatter_add_(0, choices_R, torch.ones_like(choices_R))
        return experts_Tk


def imbalance(load_LE: Tensor) -> Tensor:
    """How often the busiest expert is chosen against the mean expert, averaged over the layers; 1 is even.

    ``load_LE`` is what ``Routing.load_LE`` was given, added up over all ranks that had tokens.
    """
    load_LE = load_LE.to(torch.float64)
    return (load_LE.amax(1) / load_LE.mean(1).clamp(min=torch.finfo(load_LE.dtype).tiny)).mean()


class MoeMlp(nn.Module):
    """A router and its experts, stacked: ``gate_up`` [E, 2I, D] (``up`` [E, I, D] without gates), ``down`` [E, D, I].

    ``slot`` is which of the layers with experts this is. With an ``exchange``, E in the stacked tensors is the number
    of this rank's experts; the router knows all ranks'.
    """

    def __init__(self, width: int, spec: MoeSpec, slot: int, *, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.slot, self.spec = slot, spec
        self.exchange: Exchange | None = None
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        inner, count = spec.latent or width, spec.num_experts
        rows = 2 * spec.size if spec.gated else spec.size
        self.router = Linear(width, count, bias=spec.router_bias, **made)
        self.correction: nn.Parameter | None = None
        if spec.correction:
            # It moves with the load of the experts, not with a gradient, and loses its meaning when rounded.
            self.correction = nn.Parameter(torch.empty(count, device=device, dtype=torch.float32), requires_grad=False)
        # Experts are the likeliest of a softmax, and nothing else is asked: one kernel does it.
        self._plain = spec.score == "softmax" and not (spec.wide_router or spec.correction) and spec.groups == 1
        first = nn.Parameter(torch.empty(count, rows, inner, **made))
        self.gate_up, self.up = (first, None) if spec.gated else (None, first)
        self.down = nn.Parameter(torch.empty(count, inner, spec.size, **made))
        assert spec.gated or not spec.expert_bias, "experts without a gate have no bias"
        self.gate_up_bias = nn.Parameter(torch.empty(count, rows, **made)) if spec.expert_bias else None
        self.down_bias = nn.Parameter(torch.empty(count, inner, **made)) if spec.expert_bias else None
        self.into = Linear(width, inner, bias=spec.latent_bias, **made) if spec.latent else None
        self.outof = Linear(inner, width, bias=spec.latent_bias, **made) if spec.latent else None
        self.shared = Mlp(width, spec.shared, **made) if spec.shared else None
        self.shared_gate = Linear(width, 1, bias=False, **made) if spec.shared_gate else None

    def route(self, x_TD: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor]:
        """The weights of each token's experts, [T, k], and which they are; gradients flow through the weights."""
        spec = self.spec
        if exact():
            return self._exact_route(x_TD, routing)
        if self._plain and ready(x_TD) and (routing is None or routing.replay_TLk is None):
            weights_Tk, experts_Tk = route(
                self.router(x_TD),
                spec.experts_per_token,
                normalise=spec.norm_topk_prob,
                scale=spec.scale,
                dtype=x_TD.dtype,
            )
            return weights_Tk, experts_Tk if routing is None else routing.choose(self.slot, experts_Tk)
        logits_TE, scores_TE = self._score(x_TD)
        experts_Tk = self._choose(logits_TE.detach(), scores_TE.detach())
        if routing is not None:
            experts_Tk = routing.choose(self.slot, experts_Tk)
        weights_Tk = scores_TE.gather(-1, experts_Tk)
        if spec.norm_topk_prob:
            weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + _TINY)
        if spec.scale != 1.0:
            weights_Tk = weights_Tk * spec.scale
        return weights_Tk.to(x_TD.dtype), experts_Tk

    def _exact_route(self, x_TD: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor]:
        """``route``, of each token for itself: the same in both planes to the last bit."""
        spec = self.spec
        how: dict[str, Any] = {"normalise": spec.norm_topk_prob, "scale": spec.scale, "dtype": x_TD.dtype}
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        if self._plain or (spec.score == "softmax" and not spec.wide_router):
            logits_TE = self.router(x_TD)
        else:
            bias_E = None if self.router.bias is None else self.router.bias.to(wide)
            logits_TE = linear(x_TD.to(wide), self.router.weight.to(wide), bias_E)
        if self._plain and exact_routes.on_card(logits_TE):
            weights_Tk, own_Tk = exact_routes.route(logits_TE, spec.experts_per_token, **how)
            experts_Tk = own_Tk if routing is None else routing.choose(self.slot, own_Tk)
            if routing is not None and routing.replay_TLk is not None:
                weights_Tk, _ = exact_routes.route(logits_TE, spec.experts_per_token, **how, experts_Tk=experts_Tk)
            return weights_Tk, experts_Tk
        scores_TE = exact_routes.scores_of(logits_TE, spec.score)
        experts_Tk = self._choose(logits_TE.detach(), scores_TE.detach(), top=exact_routes.best)
        if routing is not None:
            experts_Tk = routing.choose(self.slot, experts_Tk)
        return exact_routes.weights_of(scores_TE, experts_Tk, **how), experts_Tk

    def _score(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """What the router gives, and the scores that makes, in float32 at least."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        if self.spec.score == "softmax" and not self.spec.wide_router:
            logits_TE = self.router(x_TD)
            return logits_TE, F.softmax(logits_TE, dim=-1, dtype=wide)
        bias_E = None if self.router.bias is None else self.router.bias.to(wide)
        logits_TE = F.linear(x_TD.to(wide), self.router.weight.to(wide), bias_E)
        return logits_TE, logits_TE.softmax(-1) if self.spec.score == "softmax" else logits_TE.sigmoid()

    def _choose(self, logits_TE: Tensor, scores_TE: Tensor, top: Callable[[Tensor, int], Tensor] = _best) -> Tensor:
        spec = self.spec
        if self.correction is None and spec.groups == 1:
            # The same order as that of the scores, but told apart even where those are too near to 1 or 0.
            return top(logits_TE, spec.experts_per_token)
        if self.correction is not None:
            scores_TE = scores_TE + self.correction
        if spec.groups > 1:
            groups_TgE = scores_TE.unflatten(-1, (spec.groups, -1))
            tops = groups_TgE.gather(-1, top(groups_TgE, spec.group_top)).unbind(-1)
            best_Tg = sum(tops[1:], start=tops[0])
            kept_Tg = torch.zeros_like(best_Tg, dtype=torch.bool)
            kept_Tg.scatter_(-1, top(best_Tg, spec.kept_groups), True)
            scores_TE = groups_TgE.masked_fill(~kept_Tg.unsqueeze(-1), -torch.inf).flatten(-2)
        return top(scores_TE, spec.experts_per_token)

    def forward(self, x_TD: Tensor, routing: Routing | None) -> Tensor:
        spec, first = self.spec, self.up if self.gate_up is None else self.gate_up
        assert first is not None
        weights_Tk, experts_Tk = self.route(x_TD, routing)
        out_TD = moe_forward(
            x_TD if self.into is None else self.into(x_TD),
            weights_Tk,
            experts_Tk,
            first,
            self.down,
            activation=spec.activation,
            interleaved=spec.interleaved,
            first_bias_EF=self.gate_up_bias,
            down_bias_ED=self.down_bias,
            weigh_input=spec.weigh_input,
            exchange=self.exchange,
        )
        if self.outof is not None:
            out_TD = self.outof(out_TD)
        if self.shared is None:
            return out_TD
        shared_TD = self.shared(x_TD)
        if self.shared_gate is not None:
            gate_T1 = self.shared_gate(x_TD)
            shared_TD = shared_TD * (sigmoid(gate_T1) if exact() else gate_T1.sigmoid())
        return out_TD + shared_TD
