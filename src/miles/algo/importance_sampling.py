"""Importance-sampling corrections of the train/inference mismatch: TIS, MIS, IcePop, rejection sampling.

The engine's probability of a token differs slightly from the trainer's, even with the same weights. The ratio
trainer / engine corrects for it: as a weight of the token's loss (importance sampling), or as a criterion to drop the
token or its whole sample (rejection sampling). A weight carries no gradient and is exactly 1 where the two agree.

``_R``: one entry per trained token of this micro-batch. ``_2``: a pair. No suffix: a scalar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles.algo.config import AlgoConfig
from miles.algo.correction_schedule import CorrectionMode, RatioBounds, resolve_bounds
from miles.algo.logprob_mismatch import effective_sample_size
from miles.algo.loss_aggregation import LossAggregator
from miles.algo.policy_loss import Correction, LossInputs, TokenWeights, compute_log_ratio

_MAX_LOG_RATIO = 20.0

RatioLevel = Callable[[Tensor, LossAggregator], Tensor]
WeightBounding = Callable[[Tensor, RatioBounds], tuple[Tensor, Tensor]]


# -- ratio levels -----------------------------------------------------------------------------


def token_level(log_ratio_R: Tensor, aggregator: LossAggregator) -> Tensor:
    """Token level: each token's own ratio; low variance, but ignores the mismatch of the prefix."""
    return log_ratio_R


def sequence_level(log_ratio_R: Tensor, aggregator: LossAggregator) -> Tensor:
    """Sequence level: product of the ratios of a sample's tokens; unbiased, but variance grows with length."""
    return aggregator.sum_of_sample(log_ratio_R)


def geometric_level(log_ratio_R: Tensor, aggregator: LossAggregator) -> Tensor:
    """Geometric mean of the ratios of a sample's tokens; the scale does not depend on the length."""
    return aggregator.mean_of_sample(log_ratio_R)


# -- bounding of weights ----------------------------------------------------------------------


def truncate_weights(ratio_R: Tensor, bounds: RatioBounds) -> tuple[Tensor, Tensor]:
    """TIS, truncated importance sampling: clamp the ratio to the bounds; returns weights and where it was clamped."""
    outside_R = (ratio_R < bounds.low) | (ratio_R > bounds.high)
    return ratio_R.clamp(bounds.low, bounds.high), outside_R


def mask_weights(ratio_R: Tensor, bounds: RatioBounds) -> tuple[Tensor, Tensor]:
    """MIS, masked importance sampling: weight 0 outside the bounds; returns weights and what was masked."""
    within_R = (ratio_R >= bounds.low) & (ratio_R <= bounds.high)
    return ratio_R.where(within_R, 0.0), ~within_R


def icepop_weights(ratio_R: Tensor, bounds: RatioBounds) -> tuple[Tensor, Tensor]:
    """IcePop: two-sided masking of single tokens, by default outside [0.5, 5]."""
    return mask_weights(ratio_R, bounds)


LEVELS: Mapping[str, RatioLevel] = {
    "token": token_level,
    "sequence": sequence_level,
    "geometric": geometric_level,
}
WEIGHT_BOUNDINGS: Mapping[CorrectionMode, WeightBounding] = {
    "truncate": truncate_weights,
    "mask": mask_weights,
    "icepop": icepop_weights,
}


# -- the correction ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceWeighting:
    """Importance weights: level of the ratio, and how it is bounded."""

    mode: CorrectionMode
    level: RatioLevel
    bounds: RatioBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionSampling:
    """Rejection: level of the ratio, and the bounds within which tokens are kept."""

    level: RatioLevel
    bounds: RatioBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSampling:
    """A Correction that weights, rejects, vetoes and normalises; None or False disables each part.

    ``normalize`` divides by the mean weight of the global batch, which no micro-batch knows: the trainer sums the
    ``partial_sums`` of all micro-batches (and ranks) before the first loss, and uses ``with_batch_mean`` of the total.
    """

    weighting: ImportanceWeighting | None = None
    rejection: RejectionSampling | None = None
    veto: float | None = None
    normalize: bool = False
    mean: Tensor | None = None

    def __call__(self, inputs: LossInputs, aggregator: LossAggregator) -> TokenWeights:
        assert self.mean is not None or not self.normalize, "the mean weight of the global batch is not known yet"
        weight_R, metrics = self._compute_weights(inputs.engine_logp_R, inputs.old_logp_R, aggregator)
        if self.mean is not None:
            weight_R = weight_R / self.mean.to(weight_R.dtype)
        return TokenWeights(weight_R=weight_R, metrics=metrics)

    def partial_sums(self, engine_logp_R: Tensor, old_logp_R: Tensor, aggregator: LossAggregator) -> Tensor:
        """Return a micro-batch's part of the sum of weights, and of the sum if all weights were 1."""
        weight_R, _ = self._compute_weights(engine_logp_R, old_logp_R, aggregator)
        return torch.stack([aggregator.reduce(weight_R), aggregator.reduce(torch.ones_like(weight_R))]).double()

    def with_batch_mean(self, total_2: Tensor) -> ImportanceSampling:
        """Return a copy with the mean weight of a global batch whose partial sums add up to ``total_2``."""
        mean = total_2[0] / total_2[1].where(total_2[1] > 0, 1.0)
        return replace(self, mean=mean.where(mean > 0, 1.0))

    @torch.no_grad()
    def _compute_weights(
        self, engine_logp_R: Tensor, old_logp_R: Tensor, aggregator: LossAggregator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weights before normalisation, and this micro-batch's part of every metric."""
        log_ratio_R = compute_log_ratio(old_logp_R, engine_logp_R)
        weight_R = torch.ones_like(log_ratio_R)
        metrics: dict[str, Tensor] = {"tis_mass": aggregator.mean(weight_R)}

        def fraction(where_R: Tensor) -> Tensor:
            return aggregator.mean(where_R.to(weight_R.dtype))

        if self.weighting is not None:
            ratio_R = _compute_ratio(log_ratio_R, self.weighting.level, aggregator)
            weight_R, outside_R = WEIGHT_BOUNDINGS[self.weighting.mode](ratio_R, self.weighting.bounds)
            metrics["tis"] = aggregator.mean(ratio_R)
            metrics["tis_clipfrac" if self.weighting.mode == "truncate" else "tis_maskfrac"] = fraction(outside_R)
        if self.rejection is not None:
            ratio_R = _compute_ratio(log_ratio_R, self.rejection.level, aggregator)
            _, rejected_R = mask_weights(ratio_R, self.rejection.bounds)
            metrics["rs_maskfrac"] = fraction(rejected_R)
            weight_R = weight_R.where(~rejected_R, 0.0)
        if self.veto is not None:
            below_R = (log_ratio_R < math.log(self.veto)).to(weight_R.dtype)
            vetoed_R = aggregator.sum_of_sample(below_R) > 0
            metrics["rs_vetofrac"] = fraction(vetoed_R)
            weight_R = weight_R.where(~vetoed_R, 0.0)
        metrics |= {"tis_weight": aggregator.mean(weight_R), "tis_square": aggregator.mean(weight_R.square())}
        return weight_R, metrics


def _compute_ratio(log_ratio_R: Tensor, level: RatioLevel, aggregator: LossAggregator) -> Tensor:
    """Return trainer / engine at a level, clamped to exp(+-20), where exp does not overflow."""
    return level(log_ratio_R, aggregator).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def finalize_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace the partial sums in a global batch's metrics by the effective sample size of its weights."""
    out = dict(metrics)
    if "tis_square" in out and "tis_mass" in out and "tis_weight" in out:
        out["tis_ess"] = effective_sample_size(out["tis_weight"], out.pop("tis_square"), out.pop("tis_mass"))
    return out


def build_correction(config: AlgoConfig, mode: CorrectionMode | None = None) -> Correction | None:
    """Build the configured correction; with ``auto``, ``mode`` is what the parity selected (None: no weights)."""
    if config.use_tis and config.tis_mode != "auto":
        mode = config.tis_mode
    assert mode is None or config.use_tis, f"correction mode {mode} without --use-tis"
    weighting = None
    if mode is not None:
        weighting = ImportanceWeighting(mode=mode, level=LEVELS[config.tis_level], bounds=resolve_bounds(config, mode))
    rejection = None
    if config.use_rs:
        bounds = RatioBounds(low=config.rs_lower_bound, high=config.rs_upper_bound)
        rejection = RejectionSampling(level=LEVELS[config.rs_level], bounds=bounds)
    if weighting is None and rejection is None and config.rs_veto_threshold is None:
        return None
    return ImportanceSampling(
        weighting=weighting,
        rejection=rejection,
        veto=config.rs_veto_threshold,
        normalize=config.tis_batch_normalize,
    )
