"""Losses of the policy and the critic: PPO clip, GSPO, CISPO, KL penalty (k1, k2, k3), OPSM, SFT, clipped value loss.

Sums over tokens go through ``LossAggregator``, which hides how a batch is split into micro-batches.

``_R``: one entry per trained token of this micro-batch. No suffix: a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from miles.algo.loss_aggregation import LossAggregator

_MAX_LOG_RATIO = 20.0
_MAX_KL = 10.0

RatioFn = Callable[[Tensor, LossAggregator], Tensor]
"""Log-ratios of the trained tokens -> their ratios."""


class KLEstimator(Protocol):
    """Log-probs of the trained tokens under the policy and under the reference -> a KL estimate per token.

    The estimate is multiplied by ``weight_R``, if given, before it is bounded.
    """

    def __call__(self, logp_R: Tensor, ref_logp_R: Tensor, weight_R: Tensor | None = None, /) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """Clip range of the ratio: ``low`` below 1, ``high`` above 1; ``dual`` bounds the loss at negative advantages."""

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of a loss, one entry per trained token. Only ``logp_R`` and ``entropy_R`` carry gradients.

    ``old_logp_R`` is the denominator of the ratio, ``engine_logp_R`` the engine's log-prob at sampling time; the two
    may be the same. ``ref_logp_R`` is set if there is a reference model. ``sample_R`` ascends and gives the sample (of
    ``samples`` in the micro-batch) of each token.
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
class LossOutput:
    """A micro-batch's part of the loss and of every metric; parts are summed over a global batch."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


class LossFn(Protocol):
    """A loss to minimise."""

    def __call__(self, inputs: LossInputs, aggregator: LossAggregator) -> LossOutput: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """``weight_R`` multiplies each token's surrogate loss and carries no gradient; 0 masks a token.

    ``metrics`` are this micro-batch's parts, already aggregated; parts are summed over a global batch.
    """

    weight_R: Tensor
    metrics: Mapping[str, Tensor]


class Correction(Protocol):
    """Off-policy correction: a weight per token."""

    def __call__(self, inputs: LossInputs, aggregator: LossAggregator) -> TokenWeights: ...


class SurrogateFn(Protocol):
    """Map token ratios to token losses, and to a boolean per token that says whether it was clipped."""

    def __call__(self, ratio_R: Tensor, inputs: LossInputs, clip: ClipRange) -> tuple[Tensor, Tensor]: ...


# -- ratios -----------------------------------------------------------------------------------


def compute_log_ratio(logp_R: Tensor, other_R: Tensor) -> Tensor:
    """Log-ratio of two log-probs; 0, without a gradient, where it is not a number (as for two that are -inf)."""
    log_ratio_R = logp_R - other_R
    return log_ratio_R.masked_fill(log_ratio_R.isnan(), 0.0)


def token_ratio(log_ratio_R: Tensor, aggregator: LossAggregator) -> Tensor:
    """Token-level ratio of PPO and GRPO: exp(logp - old).

    The log-ratio is clamped to +-20 (a factor of 5e8): beyond it exp would overflow and the
    product of an infinite ratio and a clipped, zero gradient would be NaN.
    """
    return log_ratio_R.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def gspo_ratio(log_ratio_R: Tensor, aggregator: LossAggregator) -> Tensor:
    """GSPO: sequence-level ratio, the geometric mean over a sample's tokens: exp(mean(logp - old)).

    The value is the sample's, the gradient each token's own: a token's ratio is sg[s] * exp(logp - sg[logp]).
    If all tokens of a sample have the same advantage and weight, this equals the gradient of the plain form, and
    it needs no gradient through other tokens. The exponent is clamped to +-20.
    """
    own_R = log_ratio_R - log_ratio_R.detach()
    log_sequence_ratio_R = aggregator.mean_of_sample(log_ratio_R.detach()) + own_R
    return log_sequence_ratio_R.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


# -- KL estimators, one value per sampled token -----------------------------------------------


def k1(logp_R: Tensor, ref_logp_R: Tensor, weight_R: Tensor | None = None) -> Tensor:
    """KL estimator k1, logp - ref: unbiased, high variance; may be negative for a single token."""
    return _multiply(compute_log_ratio(logp_R, ref_logp_R), weight_R)


def k2(logp_R: Tensor, ref_logp_R: Tensor, weight_R: Tensor | None = None) -> Tensor:
    """KL estimator k2, half the squared log-ratio: biased, never negative; its gradient is that of the true KL."""
    return _multiply(0.5 * compute_log_ratio(logp_R, ref_logp_R).square(), weight_R)


def k3(logp_R: Tensor, ref_logp_R: Tensor, weight_R: Tensor | None = None) -> Tensor:
    """KL estimator k3, exp(ref - logp) - (ref - logp) - 1: unbiased, never negative, low variance."""
    log_ratio_R = compute_log_ratio(ref_logp_R, logp_R)
    return _multiply(log_ratio_R.exp() - log_ratio_R - 1, weight_R)


def low_var_kl(logp_R: Tensor, ref_logp_R: Tensor, weight_R: Tensor | None = None) -> Tensor:
    """KL estimator k3, with its weight, clamped to +-10, so that a single outlier token cannot dominate a step."""
    # A log-ratio beyond 20 exceeds 10 either way; clamping it first keeps 0 * inf out of the gradient.
    log_ratio_R = compute_log_ratio(ref_logp_R, logp_R).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return _multiply(log_ratio_R.exp() - log_ratio_R - 1, weight_R).clamp(-_MAX_KL, _MAX_KL)


def _multiply(kl_R: Tensor, weight_R: Tensor | None) -> Tensor:
    return kl_R if weight_R is None else kl_R * weight_R


# -- policy losses ----------------------------------------------------------------------------


def ppo_clip_loss(ratio_R: Tensor, inputs: LossInputs, clip: ClipRange) -> tuple[Tensor, Tensor]:
    """PPO clipped surrogate: -min(r A, clip(r) A) per token; a clipped token has no gradient.

    With ``clip.dual`` = c (dual clip), the loss of a token with a negative advantage is at most c |A|.
    """
    advantage_R = inputs.advantage_R
    unclipped_R = -ratio_R * advantage_R
    clamped_R = -ratio_R.clamp(1 - clip.low, 1 + clip.high) * advantage_R
    loss_R = unclipped_R.maximum(clamped_R)
    clipped_R = clamped_R > unclipped_R
    if clip.dual is not None:
        bound_R = -clip.dual * advantage_R
        bounded_R = (advantage_R < 0) & (loss_R > bound_R)
        loss_R = loss_R.where(~bounded_R, bound_R)
        clipped_R = clipped_R | bounded_R
    return loss_R, clipped_R


def cispo_loss(ratio_R: Tensor, inputs: LossInputs, clip: ClipRange) -> tuple[Tensor, Tensor]:
    """CISPO: -sg[clip(r)] A logp per token; clipping bounds a token's weight but never stops its gradient."""
    ratio_R = ratio_R.detach()
    weight_R = ratio_R.clamp(1 - clip.low, 1 + clip.high)
    return -weight_R * inputs.advantage_R * inputs.logp_R, weight_R != ratio_R


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicySequenceMask:
    """OPSM, off-policy sequence masking: drops negative samples that the policy has moved away from.

    A token's weight is 0 if its advantage is negative and its sample's mean of (engine - logp), an estimate of the KL
    from the policy that sampled it, is above ``delta``; else 1.
    """

    delta: float

    def __call__(self, inputs: LossInputs, aggregator: LossAggregator) -> TokenWeights:
        logp_R = inputs.logp_R.detach()
        sequence_kl_R = aggregator.mean_of_sample(compute_log_ratio(inputs.engine_logp_R, logp_R))
        masked_R = (inputs.advantage_R < 0) & (sequence_kl_R > self.delta)
        masked_fraction = aggregator.mean(masked_R.to(logp_R.dtype))
        return TokenWeights(weight_R=(~masked_R).to(logp_R.dtype), metrics={"opsm_clipfrac": masked_fraction})


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Policy-gradient loss with a clipped ratio, a KL penalty and an entropy bonus.

    loss = surrogate + kl_coef * KL(policy, reference) - entropy_coef * entropy. KL (if there is a reference) and
    entropy are measured even if their coefficient is 0. With ``unbiased_kl`` each token's KL is multiplied by its
    ratio: the mean over tokens of older versions is then that of the current policy, and so is its gradient.
    ``correction`` and ``mask`` weight each token's surrogate.
    """

    clip: ClipRange
    kl_estimator: KLEstimator
    ratio: RatioFn = token_ratio
    surrogate: SurrogateFn = ppo_clip_loss
    kl_coef: float = 0.0
    unbiased_kl: bool = False
    entropy_coef: float = 0.0
    correction: Correction | None = None
    mask: Correction | None = None

    def __call__(self, inputs: LossInputs, aggregator: LossAggregator) -> LossOutput:
        log_ratio_R = compute_log_ratio(inputs.logp_R, inputs.old_logp_R)
        ratio_R = self.ratio(log_ratio_R, aggregator)
        loss_R, clipped_R = self.surrogate(ratio_R, inputs, self.clip)
        metrics = {
            "pg_clipfrac": aggregator.mean(clipped_R.to(loss_R.dtype)),
            "ratio": aggregator.mean(ratio_R.detach()),
            "ppo_kl": aggregator.mean(-log_ratio_R.detach()),
            "entropy": aggregator.mean(inputs.entropy_R.detach()),
        }
        for correction in (self.correction, self.mask):
            if correction is not None:
                weights = correction(inputs, aggregator)
                loss_R = loss_R * weights.weight_R
                metrics |= weights.metrics
        loss = aggregator.reduce(loss_R)
        metrics["pg_loss"] = loss.detach()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * aggregator.reduce(inputs.entropy_R)
        if inputs.ref_logp_R is not None:
            kl_R = self._compute_kl(inputs, inputs.ref_logp_R, aggregator)
            metrics["kl"] = aggregator.mean(kl_R.detach())
            if self.kl_coef:
                loss = loss + self.kl_coef * aggregator.reduce(kl_R)
        return LossOutput(loss=loss, metrics=metrics | {"loss": loss.detach()})

    def _compute_kl(self, inputs: LossInputs, ref_logp_R: Tensor, aggregator: LossAggregator) -> Tensor:
        logp_R = inputs.logp_R if self.kl_coef else inputs.logp_R.detach()
        log_ratio_R = compute_log_ratio(logp_R, inputs.old_logp_R)
        weight_R = token_ratio(log_ratio_R, aggregator) if self.unbiased_kl else None
        return self.kl_estimator(logp_R, ref_logp_R, weight_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTLoss:
    """Negative log-likelihood of the trained tokens, each times its advantage (1 for a demonstration)."""

    def __call__(self, inputs: LossInputs, aggregator: LossAggregator) -> LossOutput:
        loss = aggregator.reduce(-inputs.logp_R * inputs.advantage_R)
        entropy = aggregator.mean(inputs.entropy_R.detach())
        return LossOutput(loss=loss, metrics={"loss": loss.detach(), "entropy": entropy})


# -- critic loss ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """PPO's clipped value loss: the larger of the squared errors of the value and of the clipped value.

    ``max((V - G)^2, (old + clip(V - old, -clip, clip) - G)^2)``: a value that moved more than ``clip`` towards its
    return within one batch has no gradient.
    """

    clip: float

    def __call__(
        self, value_R: Tensor, old_value_R: Tensor, return_R: Tensor, aggregator: LossAggregator
    ) -> LossOutput:
        change_R = value_R - old_value_R
        unclipped_R = (value_R - return_R).square()
        clamped_R = (old_value_R + change_R.clamp(-self.clip, self.clip) - return_R).square()
        loss = aggregator.reduce(unclipped_R.maximum(clamped_R))
        clipped_R = (change_R.detach().abs() > self.clip).to(value_R.dtype)
        clip_fraction = aggregator.reduce(clipped_R).detach()
        return LossOutput(loss=loss, metrics={"value_loss": loss.detach(), "value_clipfrac": clip_fraction})
