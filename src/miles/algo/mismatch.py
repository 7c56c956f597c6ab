"""How far two views of the same tokens are apart: the engine's, which drew them, and the trainer's.

Everything is a sum over tokens (or a largest value), so that the parts of micro-batches and ranks are
added up before anything is divided. Sums are reckoned in float64: most gaps are a rounding error, and
the divergences are their squares.

``_R``: one entry a trained token of this micro-batch. No suffix: a scalar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.algo.reduce import Layout

_FAR = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """A micro-batch's part of the mismatch: ``sums`` are added up, of ``most`` the largest is taken."""

    sums: Mapping[str, Tensor]
    most: Mapping[str, Tensor]


@torch.no_grad()
def gaps(engine_logp_R: Tensor, logp_R: Tensor, counted_R: Tensor, layout: Layout) -> Gaps:
    """Compare the tokens where ``counted_R`` is true; it is true for all tokens of a sample or for none."""
    gap_R = torch.where(counted_R, engine_logp_R - logp_R, 0.0).double()
    one_R = counted_R.double()
    log_ratio_R = (-gap_R).clamp(-_FAR, _FAR)
    ratio_R = log_ratio_R.exp() * one_R
    share_R = one_R / layout.sum_of_sample(torch.ones_like(gap_R))
    return Gaps(
        sums={
            "tokens": one_R.sum(),
            "samples": share_R.sum(),
            "abs": gap_R.abs().sum(),
            "k1": gap_R.sum(),
            "k3": (torch.expm1(log_ratio_R) - log_ratio_R).sum(),
            "ratio": ratio_R.sum(),
            "ratio_square": ratio_R.square().sum(),
            "ppl_ratio": (layout.mean_of_sample(gap_R).clamp(-_FAR, _FAR).exp() * share_R).sum(),
        },
        most={"max_abs": gap_R.abs().max() if len(gap_R) else gap_R.sum()},
    )


def mismatch(totals: Mapping[str, float]) -> dict[str, float]:
    """The metrics that follow from the sums and largest values of a whole batch; empty if no token was compared.

    Under the engine's tokens, with d = engine - trainer: ``k1`` (the mean of d) and ``k3`` (the mean of
    exp(-d) + d - 1) both estimate KL(engine, trainer), the second never below 0. ``ppl_ratio`` is the mean over
    samples of the trainer's perplexity over the engine's. ``ess`` is the share of the tokens that the
    unbounded weights exp(-d) leave in effect: (sum w)^2 / (n sum w^2).
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
        "ess": effective(totals["ratio"], totals["ratio_square"], tokens),
        "tokens": tokens,
    }


def effective(total: float, squares: float, mass: float) -> float:
    """(sum w)^2 / (n sum w^2): 1 when all weights are alike, 1/n when one has it all, 0 when none has any.

    >>> effective(total=2.0, squares=2.0, mass=4.0)
    0.5
    """
    return 0.0 if squares == 0 else total * total / (mass * squares)
