"""Train/inference mismatch: the gap between the engine's and the trainer's log-probs of the same tokens.

All statistics are sums over tokens (or maxima), so that parts of micro-batches and ranks are
combined before anything is divided. Sums are in float64: most gaps are rounding errors, and
the KL estimates are their squares.

``_R``: one entry per trained token of this micro-batch. No suffix: a scalar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.algo.loss_aggregation import LossAggregator

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchSums:
    """A micro-batch's part of the mismatch: ``sums`` are added over parts, ``maxima`` are maximised."""

    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


@torch.no_grad()
def sum_mismatch(engine_logp_R: Tensor, logp_R: Tensor, counted_R: Tensor, aggregator: LossAggregator) -> MismatchSums:
    """Compare the tokens where ``counted_R`` is true; it is true for all tokens of a sample or for none."""
    gap_R = torch.where(counted_R, engine_logp_R - logp_R, 0.0).double()
    counted_R = counted_R.double()
    log_ratio_R = (-gap_R).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio_R = log_ratio_R.exp() * counted_R
    share_R = counted_R / aggregator.sum_of_sample(torch.ones_like(gap_R))
    sample_gap_R = aggregator.mean_of_sample(gap_R).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return MismatchSums(
        sums={
            "tokens": counted_R.sum(),
            "samples": share_R.sum(),
            "abs": gap_R.abs().sum(),
            "k1": gap_R.sum(),
            "k3": (torch.expm1(log_ratio_R) - log_ratio_R).sum(),
            "ratio": ratio_R.sum(),
            "ratio_square": ratio_R.square().sum(),
            "ppl_ratio": (sample_gap_R.exp() * share_R).sum(),
        },
        maxima={"max_abs": gap_R.abs().max() if len(gap_R) else gap_R.sum()},
    )


def mismatch_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Compute the metrics of a whole batch from its sums and maxima; empty if no token was compared.

    Under the engine's tokens, with d = engine - trainer: ``k1`` (the mean of d) and ``k3`` (the mean of
    exp(-d) + d - 1) both estimate KL(engine, trainer), the second never below 0. ``ppl_ratio`` is the mean over
    samples of the trainer's perplexity over the engine's. ``ess`` is the effective sample size, as a fraction of the
    tokens, of the unbounded weights exp(-d): (sum w)^2 / (n sum w^2).
    """
    tokens = totals.get("tokens", 0.0)
    if not tokens:
        return {}
    return {
        "mean_abs": totals["abs"] / tokens,
        "max_abs": totals["max_abs"],
        "k1": totals["k1"] / tokens,
        "k3": totals["k3"] / tokens,
        "ppl_ratio": totals["ppl_ratio"] / totals["samples"],
        "ess": effective_sample_size(totals["ratio"], totals["ratio_square"], tokens),
        "tokens": tokens,
    }


def effective_sample_size(total: float, squares: float, mass: float) -> float:
    """(sum w)^2 / (n sum w^2): 1 if all weights are equal, 1/n if one token has all the weight, 0 if all are 0.

    >>> effective_sample_size(total=2.0, squares=2.0, mass=4.0)
    0.5
    """
    return 0.0 if squares == 0 else total * total / (mass * squares)
