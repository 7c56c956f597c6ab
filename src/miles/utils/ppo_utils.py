"""Upstream's functions of policy losses: KL estimates and the clipped surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from miles.algo.policy_loss import compute_log_ratio, k1, k2, k3, low_var_kl

_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl}


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """A KL estimate per token."""
    return _ESTIMATORS[kl_loss_type](log_probs, log_probs_base, importance_ratio)


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate per token, and 1 where it was clipped; ``ppo_kl`` is the old log-prob minus the new."""
    ratio = compute_log_ratio(torch.zeros_like(ppo_kl), ppo_kl).clamp(-20.0, 20.0).exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    losses = unclipped.maximum(clipped)
    if eps_clip_c is not None:
        losses = torch.where(advantages < 0, losses.minimum(-eps_clip_c * advantages), losses)
    return losses, (clipped > unclipped).to(losses.dtype)
