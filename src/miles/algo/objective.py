"""Log-probabilities and advantages -> a scalar loss.

How a batch is cut into micro-batches is hidden behind ``Layout``; nothing here knows of it.

``_R``: one entry a trained token of this micro-batch. No suffix: a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from miles.algo.ratio import token_ratio
from miles.algo.reduce import Layout

Ratio = Callable[[Tensor, Layout], Tensor]
"""Log-ratios of the trained tokens -> their ratios."""
Divergence = Callable[[Tensor, Tensor], Tensor]
"""Log-probs of the trained tokens under the policy and under the reference -> a divergence a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """How far a ratio may leave 1 (``low`` below, ``high`` above); ``dual`` bounds the loss of bad tokens."""

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What an objective judges, one entry a trained token. Only ``logp_R`` and ``entropy_R`` carry gradients.

    ``old_logp_R`` is what the ratio compares with, ``engine_logp_R`` what the engine said when it drew the token;
    the two may be the same. ``ref_logp_R`` is there when there is a reference model. ``sample_R`` ascends and says
    which of the micro-batch's ``samples`` a token is of.
    """

    logp_R: Tensor
    old_logp_R: Tensor
    engine_logp_R: Tensor
    advantage_R: Tensor
    entropy_R: Tensor
    sample_R: Tensor
    samples: int
    ref_logp_R: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A micro-batch's part of the loss, and of every metric; parts are added up over a global batch."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


class Objective(Protocol):
    """What is minimised."""

    def __call__(self, evidence: Evidence, layout: Layout) -> Terms: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """``weight_R`` multiplies each token's surrogate loss, without a gradient of its own; 0 masks a token out.

    ``metrics`` are this micro-batch's parts of them, reduced already; parts are added up over a global batch.
    """

    weight_R: Tensor
    metrics: Mapping[str, Tensor]


class Correction(Protocol):
    """How much each token may be believed, given who wrote it."""

    def __call__(self, evidence: Evidence, layout: Layout) -> Corrected: ...


class Surrogate(Protocol):
    """A ratio a token -> the loss of each token, and where a clip took hold (a boolean a token)."""

    def __call__(self, ratio_R: Tensor, evidence: Evidence, clip: Clip) -> tuple[Tensor, Tensor]: ...


def clipped_surrogate(ratio_R: Tensor, evidence: Evidence, clip: Clip) -> tuple[Tensor, Tensor]:
    """PPO: -min(r A, clip(r) A) of each token; a token that a clip holds has no gradient.

    With ``clip.dual`` = c, the loss of a token with a negative advantage is at most c |A|.
    """
    advantage_R = evidence.advantage_R
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


def weighted_likelihood(ratio_R: Tensor, evidence: Evidence, clip: Clip) -> tuple[Tensor, Tensor]:
    """CISPO: -sg[clip(r)] A logp of each token; a clip bounds a token's weight and never stops its gradient."""
    ratio_R = ratio_R.detach()
    weight_R = ratio_R.clamp(1 - clip.low, 1 + clip.high)
    return -weight_R * evidence.advantage_R * evidence.logp_R, weight_R != ratio_R


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A policy gradient with its ratio held in bounds, and with a KL term and an entropy bonus when weighted.

    loss = surrogate + kl_coef * KL(policy, reference) - entropy_coef * entropy. The KL and the entropy are
    measured whatever their weight, the KL where there is a reference. With ``unbiased_kl`` each token's KL is
    multiplied by its ratio: the mean over what older weights wrote is then that of the policy now, and so is its
    gradient. ``correction`` and ``mask`` weigh each token's surrogate.
    """

    clip: Clip
    divergence: Divergence
    ratio: Ratio = token_ratio
    surrogate: Surrogate = clipped_surrogate
    kl_coef: float = 0.0
    unbiased_kl: bool = False
    entropy_coef: float = 0.0
    correction: Correction | None = None
    mask: Correction | None = None

    def __call__(self, evidence: Evidence, layout: Layout) -> Terms:
        log_ratio_R = evidence.logp_R - evidence.old_logp_R
        ratio_R = self.ratio(log_ratio_R, layout)
        loss_R, clipped_R = self.surrogate(ratio_R, evidence, self.clip)
        metrics = {
            "pg_clipfrac": layout.mean(clipped_R.to(loss_R.dtype)),
            "ratio": layout.mean(ratio_R.detach()),
            "ppo_kl": layout.mean(-log_ratio_R.detach()),
            "entropy": layout.mean(evidence.entropy_R.detach()),
        }
        for weigh in (self.correction, self.mask):
            if weigh is not None:
                corrected = weigh(evidence, layout)
                loss_R = loss_R * corrected.weight_R
                metrics |= corrected.metrics
        loss = layout.reduce(loss_R)
        metrics["pg_loss"] = loss.detach()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * layout.reduce(evidence.entropy_R)
        if evidence.ref_logp_R is not None:
            kl_R = self._kl(evidence, evidence.ref_logp_R, layout)
            metrics["kl"] = layout.mean(kl_R.detach())
            if self.kl_coef:
                loss = loss + self.kl_coef * layout.reduce(kl_R)
        return Terms(loss=loss, metrics=metrics | {"loss": loss.detach()})

    def _kl(self, evidence: Evidence, ref_logp_R: Tensor, layout: Layout) -> Tensor:
        logp_R = evidence.logp_R if self.kl_coef else evidence.logp_R.detach()
        kl_R = self.divergence(logp_R, ref_logp_R)
        return kl_R * token_ratio(logp_R - evidence.old_logp_R, layout) if self.unbiased_kl else kl_R


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedLoss:
    """The negative log-likelihood of the trained tokens, each times its advantage (1 for a demonstration)."""

    def __call__(self, evidence: Evidence, layout: Layout) -> Terms:
        loss = layout.reduce(-evidence.logp_R * evidence.advantage_R)
        entropy = layout.mean(evidence.entropy_R.detach())
        return Terms(loss=loss, metrics={"loss": loss.detach(), "entropy": entropy})
