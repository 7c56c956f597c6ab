"""Preference learning from pairs of responses: DPO for a policy, Bradley-Terry for a reward model.

A pair is one trajectory of two adjacent samples, the chosen one first. Advantages mark
them: +1 on each token of the chosen response, -1 on each of the rejected one.

``_R`` trained tokens, ``_B`` samples and ``_P`` pairs of a micro-batch, which holds whole pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from miles.algo.advantages import build_samples
from miles.algo.loss_aggregation import LossAggregator
from miles.algo.policy_loss import LossInputs, LossOutput
from miles.core.types import Author, Group, Sample


class PairEstimator:
    """Preference pairs: the first trajectory of a group is chosen (advantage 1), the second rejected (advantage -1).

    The two samples form one trajectory: they share a denominator and are trained in one micro-batch.
    """

    def __call__(self, group: Group) -> Sequence[Sample]:
        assert len(group.trajectories) == 2, (
            f"prompt {group.prompt.id} has {len(group.trajectories)} responses, not two"
        )
        return [
            replace(sample, trajectory=0, samples_per_trajectory=2)
            for trajectory, advantage in zip(group.trajectories, (1.0, -1.0), strict=True)
            for sample in build_samples(group.prompt.id, trajectory, advantage=advantage, trained_author=Author.POLICY)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOLoss:
    """DPO: -log sigmoid(margin) per pair, with margin = implicit reward of the chosen minus of the rejected response.

    The implicit reward is beta times the log-prob gain over the reference, summed over the response. With
    ``smoothing`` s (conservative DPO) the label is assumed to be wrong with probability s:
    -(1 - s) log sigmoid(margin) - s log sigmoid(-margin).
    """

    beta: float
    smoothing: float = 0.0

    def __call__(self, inputs: LossInputs, aggregator: LossAggregator) -> LossOutput:
        assert inputs.ref_logp_R is not None, "DPO needs a reference model"
        reward_R = self.beta * (inputs.logp_R - inputs.ref_logp_R)
        is_chosen_R = inputs.advantage_R > 0
        zero_R = torch.zeros_like(reward_R)
        chosen_R = aggregator.sum_of_pair(torch.where(is_chosen_R, reward_R, zero_R))
        rejected_R = aggregator.sum_of_pair(torch.where(is_chosen_R, zero_R, reward_R))
        margin_R = chosen_R - rejected_R
        loss = aggregator.reduce(self._compute_loss(margin_R))
        values = {
            "dpo_accuracy": (margin_R > 0).to(margin_R.dtype),
            "dpo_margin": margin_R,
            "dpo_chosen_reward": chosen_R,
            "dpo_rejected_reward": rejected_R,
            "entropy": inputs.entropy_R,
        }
        means = {name: aggregator.mean(x_R.detach()) for name, x_R in values.items()}
        return LossOutput(loss=loss, metrics={"loss": loss.detach(), **means})

    def _compute_loss(self, margin_R: Tensor) -> Tensor:
        """Return the loss of each token's pair."""
        loss_R = -logsigmoid(margin_R)
        if not self.smoothing:
            return loss_R
        return (1 - self.smoothing) * loss_R - self.smoothing * logsigmoid(-margin_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerryLoss:
    """Bradley-Terry loss of a reward model: -log sigmoid(score of the chosen minus score of the rejected response)."""

    def __call__(self, score_B: Tensor, pairs: int) -> LossOutput:
        """``score_B`` alternates chosen and rejected responses; ``pairs`` is the number in the whole global batch."""
        chosen_P, rejected_P = score_B.view(-1, 2).unbind(1)
        margin_P = chosen_P - rejected_P
        loss = -logsigmoid(margin_P).sum() / pairs
        values = {
            "rm_accuracy": (margin_P > 0).to(margin_P.dtype),
            "rm_margin": margin_P,
            "rm_chosen_score": chosen_P,
            "rm_rejected_score": rejected_P,
        }
        means = {name: x_P.detach().sum() / pairs for name, x_P in values.items()}
        return LossOutput(loss=loss, metrics={"loss": loss.detach(), **means})
