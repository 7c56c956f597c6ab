"""Load balancing of Megatron's routers: auxiliary losses, the z-loss, and the expert-bias update without a loss.

The losses are means over the tokens of an optimizer step, whatever micro-batches and ranks have them; padding does not
count. They have gradients but are not part of the reported loss.

``_t`` slots of this rank, ``E`` experts, ``S`` sequences of a micro-batch.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import functional as F

from miles.core.errors import UsageError

AuxLossType = Literal["aux_loss", "seq_aux_loss"]
_FLAGS = ["moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_z_loss_coeff", "moe_router_bias_update_rate"]
FREEZE_GATE = "moe_router_freeze_gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBalance:
    """Coefficients of the auxiliary losses by type and of the z-loss, the rate of the expert-bias update, and whether
    the router's weight is frozen.

    ``aux_loss`` is over the tokens of a micro-batch, ``seq_aux_loss`` over those of each sequence.
    """

    aux_coeffs: Mapping[AuxLossType, float] = field(default_factory=dict[AuxLossType, float])
    z_coeff: float = 0.0
    bias_rate: float = 0.0
    frozen: bool = False

    @property
    def has_loss(self) -> bool:
        return bool(self.aux_coeffs) or self.z_coeff > 0

    @property
    def counts_tokens(self) -> bool:
        """Whether it depends on the tokens of each micro-batch."""
        return self.has_loss or self.bias_rate > 0


def split_balance(flags: Mapping[str, Any]) -> tuple[RouterBalance, dict[str, Any]]:
    """Return the load balancing that Megatron's flags ask for, and the other flags."""
    given = {name: flags[name] for name in (*_FLAGS, FREEZE_GATE) if name in flags}
    types, coeffs = (
        value if isinstance(value, list) else [value]
        for value in (given.get("moe_router_load_balancing_type", "aux_loss"), given.get("moe_aux_loss_coeff", 0.0))
    )
    if len(types) != len(coeffs) and any(coeffs):
        raise UsageError(
            "--megatron-moe-aux-loss-coeff needs one coefficient for each type of "
            "--megatron-moe-router-load-balancing-type; give as many."
        )
    used = {name: coeff for name, coeff in zip(types, coeffs, strict=False) if coeff and name != "none"}
    unknown = next((name for name in used if name not in ("aux_loss", "seq_aux_loss")), None)
    if unknown is not None or "sinkhorn" in types:
        raise UsageError(
            f"--megatron-moe-router-load-balancing-type {unknown or 'sinkhorn'} is not supported; use aux_loss or "
            "seq_aux_loss."
        )
    balance = RouterBalance(
        aux_coeffs=cast("dict[AuxLossType, float]", used),
        z_coeff=given.get("moe_z_loss_coeff") or 0.0,
        bias_rate=given.get("moe_router_bias_update_rate", 0.0),
        frozen=given.get(FREEZE_GATE, False),
    )
    return balance, {name: value for name, value in flags.items() if name not in given}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoss:
    """The losses of the routers in one micro-batch of this rank.

    ``real_t`` are the slots that hold a token, ``sequence_t`` the sequence of each slot of ``sequences``.
    ``per_token`` is a token's weight in the mean. ``share`` sums over the ranks that have other tokens of the
    micro-batch.
    """

    balance: RouterBalance
    real_t: Tensor
    sequence_t: Tensor
    sequences: int
    per_token: float
    share: Callable[[Tensor], Tensor]

    def compute(self, logits_tE: Tensor, *, topk: int, score: str) -> Tensor:
        """Return this rank's part of the losses of one layer."""
        logits_tE = logits_tE.to(torch.promote_types(logits_tE.dtype, torch.float32))
        loss = self.balance.z_coeff * logits_tE.logsumexp(-1)[self.real_t].square().sum()
        if self.balance.aux_coeffs:
            scores_tE = _compute_scores(logits_tE, score)
            chosen_tE = torch.zeros_like(scores_tE).scatter_(1, scores_tE.detach().topk(topk).indices, 1.0)
            chosen_tE = chosen_tE * self.real_t[:, None]
            for kind, coeff in self.balance.aux_coeffs.items():
                group_t = self.sequence_t if kind == "seq_aux_loss" else torch.zeros_like(self.sequence_t)
                share_tE = self._expert_shares(chosen_tE, group_t, topk)[group_t]
                loss = loss + coeff * logits_tE.shape[1] * (share_tE * scores_tE)[self.real_t].sum()
        return self.per_token * loss

    def _expert_shares(self, chosen_tE: Tensor, group_t: Tensor, topk: int) -> Tensor:
        """Return the share of each expert in the selections of each group of tokens, [S, E]."""
        count_SE = chosen_tE.new_zeros(self.sequences, chosen_tE.shape[1]).index_add_(0, group_t, chosen_tE)
        count_SE = self.share(count_SE)
        return count_SE / count_SE.sum(1, keepdim=True).clamp(min=topk)


def _compute_scores(logits_tE: Tensor, score: str) -> Tensor:
    """Return each token's scores, whose sum is one."""
    if score == "softmax":
        return logits_tE.softmax(-1)
    scores_tE = F.softplus(logits_tE).sqrt() if score == "sqrtsoftplus" else logits_tE.sigmoid()
    return scores_tE / (scores_tE.sum(-1, keepdim=True) + 1e-20)


class BalancedRouter(TopKRouter):
    """Megatron's router with the losses of ``RouterLoss``, which is set before each forward."""

    router_loss: RouterLoss | None = None

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probs, routing_map = super().routing(logits, *args, **kwargs)
        return self.attach_losses(probs, logits.view(-1, logits.shape[-1])), routing_map

    def attach_losses(self, probs: Tensor, logits_tE: Tensor) -> Tensor:
        """Return ``probs``, whose backward pass is also that of the losses of this micro-batch, if there are any."""
        if self.router_loss is None or not self.training or not torch.is_grad_enabled():
            return probs
        return attach_loss(probs, self.router_loss.compute(logits_tE, topk=self.topk, score=self.score_function))


def attach_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return ``x``, whose backward pass is also that of ``loss``."""
    return _AttachLoss.apply(x, loss)  # pyright: ignore[reportReturnType]


class _AttachLoss(torch.autograd.Function):
    """Identity of ``x``; its backward pass is also that of ``loss``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def update_expert_bias(bias_E: Tensor, count_E: Tensor, rate: float) -> None:
    """Raise the bias of experts with fewer tokens than the mean by ``rate``, and lower that of the others."""
    count_E = count_E.to(bias_E.dtype)
    bias_E.add_(rate * torch.sign(count_E.mean() - count_E))
