"""Tokens the engine drew, weighed as if the trainer had drawn them.

The engine's probability of a token is not quite the trainer's, even of the same weights. The ratio of
the two, trainer over engine, makes up for it: as a weight of the token's loss (importance sampling),
or as the reason to leave the token or its whole sample out. A weight carries no gradient, and is
exactly 1 where the two agree.

``_R``: one entry a trained token of this micro-batch. ``_2``: a pair. No suffix: a scalar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles.algo.config import AlgoConfig
from miles.algo.ladder import Bounds, Mode, bounds_of
from miles.algo.mismatch import effective
from miles.algo.objective import Corrected, Correction, Evidence
from miles.algo.reduce import Layout

_FAR = 20.0

Level = Callable[[Tensor, Layout], Tensor]
Bounding = Callable[[Tensor, Bounds], tuple[Tensor, Tensor]]


# -- whose ratio ----------------------------------------------------------------------------


def token(log_ratio_R: Tensor, layout: Layout) -> Tensor:
    """Each token's own ratio: of low variance; what came before a token is taken as the engine drew it."""
    return log_ratio_R


def sequence(log_ratio_R: Tensor, layout: Layout) -> Tensor:
    """The product of the ratios of a sample's tokens, for each of them: without bias, but wilder with every token."""
    return layout.sum_of_sample(log_ratio_R)


def geometric(log_ratio_R: Tensor, layout: Layout) -> Tensor:
    """The geometric mean of the ratios of a sample's tokens, for each of them: the same scale whatever the length."""
    return layout.mean_of_sample(log_ratio_R)


# -- what becomes of it ---------------------------------------------------------------------


def truncate(ratio_R: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """TIS: a ratio beyond a bound weighs as much as the bound; gives the weights and where that happened."""
    beyond_R = (ratio_R < bounds.low) | (ratio_R > bounds.high)
    return ratio_R.clamp(bounds.low, bounds.high), beyond_R


def mask(ratio_R: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """MIS: a ratio beyond a bound weighs nothing, others are the weight; gives the weights and what was dropped."""
    within_R = (ratio_R >= bounds.low) & (ratio_R <= bounds.high)
    return ratio_R.where(within_R, 0.0), ~within_R


def icepop(ratio_R: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """IcePop: masking of single tokens on both sides, from half as likely to five times as likely unless told."""
    return mask(ratio_R, bounds)


LEVELS: Mapping[str, Level] = {"token": token, "sequence": sequence, "geometric": geometric}
BOUNDINGS: Mapping[Mode, Bounding] = {"truncate": truncate, "mask": mask, "icepop": icepop}


# -- the correction -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """Importance sampling: whose ratio is the weight, and what becomes of it beyond its bounds."""

    mode: Mode
    level: Level
    bounds: Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Leaving out: whose ratio decides, and between which bounds it is kept."""

    level: Level
    bounds: Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Weighs, rejects, vetoes, normalises: what is None or False is not done.

    ``normalize`` divides by the weights' mean over the global batch, which no micro-batch knows. The trainer
    adds up the ``parts`` of all micro-batches (and ranks) before the first loss, and computes the loss with what
    ``over`` makes of the total.
    """

    weighing: Weighing | None = None
    rejection: Rejection | None = None
    veto: float | None = None
    normalize: bool = False
    mean: Tensor | None = None

    def __call__(self, evidence: Evidence, layout: Layout) -> Corrected:
        assert self.mean is not None or not self.normalize, "the mean weight of the global batch is not known yet"
        weight_R, metrics = self._weigh(evidence.engine_logp_R, evidence.old_logp_R, layout)
        if self.mean is not None:
            weight_R = weight_R / self.mean.to(weight_R.dtype)
        return Corrected(weight_R=weight_R, metrics=metrics)

    def parts(self, engine_logp_R: Tensor, old_logp_R: Tensor, layout: Layout) -> Tensor:
        """A micro-batch's part of the sum of weights, as the loss adds tokens up, and of what it were if all were 1."""
        weight_R, _ = self._weigh(engine_logp_R, old_logp_R, layout)
        return torch.stack([layout.reduce(weight_R), layout.reduce(torch.ones_like(weight_R))]).double()

    def over(self, total_2: Tensor) -> Importance:
        """The same with the mean of a global batch whose parts add up to ``total_2``; nothing divides by no weight."""
        mean = total_2[0] / total_2[1].where(total_2[1] > 0, 1.0)
        return replace(self, mean=mean.where(mean > 0, 1.0))

    @torch.no_grad()
    def _weigh(self, engine_logp_R: Tensor, old_logp_R: Tensor, layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
        """The weights before normalisation, and this micro-batch's part of every metric."""
        log_ratio_R = old_logp_R - engine_logp_R
        weight_R = torch.ones_like(log_ratio_R)
        metrics: dict[str, Tensor] = {"tis_mass": layout.mean(weight_R)}

        def share(where_R: Tensor) -> Tensor:
            return layout.mean(where_R.to(weight_R.dtype))

        if self.weighing is not None:
            ratio_R = _ratio(log_ratio_R, self.weighing.level, layout)
            weight_R, beyond_R = BOUNDINGS[self.weighing.mode](ratio_R, self.weighing.bounds)
            metrics["tis"] = layout.mean(ratio_R)
            metrics["tis_clipfrac" if self.weighing.mode == "truncate" else "tis_maskfrac"] = share(beyond_R)
        if self.rejection is not None:
            ratio_R = _ratio(log_ratio_R, self.rejection.level, layout)
            _, rejected_R = mask(ratio_R, self.rejection.bounds)
            metrics["rs_maskfrac"] = share(rejected_R)
            weight_R = weight_R.where(~rejected_R, 0.0)
        if self.veto is not None:
            below_R = (log_ratio_R < math.log(self.veto)).to(weight_R.dtype)
            vetoed_R = layout.sum_of_sample(below_R) > 0
            metrics["rs_vetofrac"] = share(vetoed_R)
            weight_R = weight_R.where(~vetoed_R, 0.0)
        metrics |= {"tis_weight": layout.mean(weight_R), "tis_square": layout.mean(weight_R.square())}
        return weight_R, metrics


def _ratio(log_ratio_R: Tensor, level: Level, layout: Layout) -> Tensor:
    """Trainer over engine at a level; held within exp(+-20), where exp does not overflow."""
    return level(log_ratio_R, layout).clamp(-_FAR, _FAR).exp()


def finished(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a whole global batch with the effective sample size of its weights in place of its parts."""
    out = dict(metrics)
    if "tis_square" in out and "tis_mass" in out and "tis_weight" in out:
        out["tis_ess"] = effective(out["tis_weight"], out.pop("tis_square"), out.pop("tis_mass"))
    return out


def correction_of(config: AlgoConfig, mode: Mode | None = None) -> Correction | None:
    """What the config asks for; with ``auto`` it is whatever ``mode`` the parity called for, None for no weighing."""
    if config.use_tis and config.tis_mode != "auto":
        mode = config.tis_mode
    assert mode is None or config.use_tis, f"weights by {mode} of a run that weighs nothing"
    weighing = None
    if mode is not None:
        weighing = Weighing(mode=mode, level=LEVELS[config.tis_level], bounds=bounds_of(config, mode))
    rejection = None
    if config.use_rs:
        rejection = Rejection(
            level=LEVELS[config.rs_level], bounds=Bounds(low=config.rs_lower_bound, high=config.rs_upper_bound)
        )
    if weighing is None and rejection is None and config.rs_veto_threshold is None:
        return None
    return Importance(
        weighing=weighing,
        rejection=rejection,
        veto=config.rs_veto_threshold,
        normalize=config.tis_batch_normalize,
    )
