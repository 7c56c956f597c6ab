"""Log-probabilities and advantages -> a scalar loss.

How a batch is cut into micro-batches is hidden behind ``Layout``; nothing here knows of it.

``_R``: one entry a trained token of this micro-batch. No suffix: a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from miles.algo.reduce import Layout

Ratio = Callable[[Tensor, Tensor], Tensor]
Divergence = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """How far a ratio may leave 1 (``low`` below, ``high`` above); ``dual`` bounds the loss of bad tokens."""

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What an objective judges, one entry a trained token. Only ``logp_R`` and ``entropy_R`` carry gradients.

    ``ref_logp_R`` is there when there is a reference model.
    """

    logp_R: Tensor
    old_logp_R: Tensor
    advantage_R: Tensor
    entropy_R: Tensor
    ref_logp_R: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A micro-batch's part of the loss, and of every metric; parts are added up over a global batch."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


class Objective(Protocol):
    """What is minimised."""

    def __call__(self, evidence: Evidence, layout: Layout) -> Terms: ...


def clipped_surrogate(ratio_R: Tensor, advantage_R: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """The loss of each token, -min(r A, clip(r) A), and where a clip took hold (a boolean a token).

    With ``clip.dual`` = c, the loss of a token with a negative advantage is at most c |A|.
    """
    free_R = -ratio_R * advantage_R
    held_R = -ratio_R.clamp(1 - clip.low, 1 + clip.high) * advantage_R
    loss_R = free_R.maximum(held_R)
    clipped_R = held_R > free_R
    if clip.dual is not None:
        bound_R = -clip.dual * advantage_R
        bounded_R = (advantage_R < 0) & (loss_R > bound_R)
        loss_R = loss_R.where(~bounded_R, bound_R)
        clipped_R = clipped_R | bounded_R
    return loss_R, clipped_R


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The clipped policy gradient, with a KL term and an entropy bonus when weighted.

    loss = surrogate + kl_coef * KL(policy, reference) - entropy_coef * entropy. The KL and the entropy
    are measured whatever their weight, the KL where there is a reference.
    """

    ratio: Ratio
    clip: Clip
    divergence: Divergence
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __call__(self, evidence: Evidence, layout: Layout) -> Terms:
        ratio_R = self.ratio(evidence.logp_R, evidence.old_logp_R)
        loss_R, clipped_R = clipped_surrogate(ratio_R, evidence.advantage_R, self.clip)
        surrogate = loss = layout.reduce(loss_R)
        entropy = layout.reduce(evidence.entropy_R if self.entropy_coef else evidence.entropy_R.detach())
        if self.entropy_coef:
            loss = loss - self.entropy_coef * entropy
        metrics = {
            "pg_loss": surrogate.detach(),
            "pg_clipfrac": layout.reduce(clipped_R.to(loss_R.dtype)),
            "ratio": layout.reduce(ratio_R.detach()),
            "ppo_kl": layout.reduce(evidence.old_logp_R - evidence.logp_R.detach()),
            "entropy": entropy.detach(),
        }
        if evidence.ref_logp_R is not None:
            logp_R = evidence.logp_R if self.kl_coef else evidence.logp_R.detach()
            kl = layout.reduce(self.divergence(logp_R, evidence.ref_logp_R))
            metrics["kl"] = kl.detach()
            if self.kl_coef:
                loss = loss + self.kl_coef * kl
        return Terms(loss=loss, metrics=metrics | {"loss": loss.detach()})


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedLoss:
    """The negative log-likelihood of the trained tokens, each times its advantage (1 for a demonstration)."""

    def __call__(self, evidence: Evidence, layout: Layout) -> Terms:
        loss = layout.reduce(-evidence.logp_R * evidence.advantage_R)
        entropy = layout.reduce(evidence.entropy_R.detach())
        return Terms(loss=loss, metrics={"loss": loss.detach(), "entropy": entropy})
