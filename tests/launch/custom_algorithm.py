"""A user's own advantage, train data, loss and reduction."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from miles.algo.advantages import build_samples
from miles.algo.loss_aggregation import LossAggregator
from miles.algo.policy_loss import LossInputs, LossOutput
from miles.core.types import Author, Group, Sample


def best_of_all(group: Group) -> list[float]:
    """Only the best trajectories are learned from."""
    best = max(group.rewards)
    return [float(reward == best) for reward in group.rewards]


def first_token_only(group: Group) -> list[Sample]:
    """Rows in which only the first token a trajectory wrote is trained on."""
    rows = []
    for trajectory, reward in zip(group.trajectories, group.rewards, strict=True):
        (row,) = build_samples(group.prompt.id, trajectory, advantage=reward, trained_author=Author.POLICY)
        rows.append(replace(row, mask=row.mask & (np.cumsum(row.mask) == 1)))
    return rows


def likelihood(evidence: LossInputs, layout: LossAggregator) -> LossOutput:
    """A plain policy gradient."""
    loss = layout.reduce(-evidence.advantage_R * evidence.logp_R)
    return LossOutput(loss=loss, metrics={"loss": loss.detach()})


def by_length(counts_N: Sequence[int]) -> NDArray[np.float64]:
    """A trajectory weighs as the root of its length."""
    return np.array([1 / (max(n, 1) ** 0.5 * len(counts_N)) for n in counts_N])
