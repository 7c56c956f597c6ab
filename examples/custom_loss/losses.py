"""A policy loss of one's own: SPO (Simple Policy Optimization), a quadratic penalty on the ratio instead of a clip.

``_R``: one entry per trained token of the micro-batch.
"""

from __future__ import annotations

from miles.algo.loss_aggregation import LossAggregator
from miles.algo.policy_loss import LossInputs, LossOutput

EPSILON = 0.2
"""How far from 1 the ratio is driven at most: there the penalty's gradient cancels that of the advantage."""


def spo(inputs: LossInputs, aggregator: LossAggregator) -> LossOutput:
    """An algo.policy_loss.LossFn: -(r A - |A| (r - 1)^2 / (2 epsilon)).

    Unlike that of a clipped loss, its gradient brings ratios back that are far from 1.
    """
    ratio_R = (inputs.logp_R - inputs.old_logp_R).exp()
    penalty_R = inputs.advantage_R.abs() * (ratio_R - 1).square() / (2 * EPSILON)
    loss = aggregator.reduce(penalty_R - ratio_R * inputs.advantage_R)
    metrics = {
        "loss": loss.detach(),
        "ratio": aggregator.mean(ratio_R.detach()),
        "penalty": aggregator.mean(penalty_R.detach()),
    }
    return LossOutput(loss=loss, metrics=metrics)
