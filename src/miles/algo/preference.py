"""Learning from pairs of replies of which one is preferred: their credit, and what a policy or a reward model loses.

A pair is one trajectory of two samples that stand next to each other, the preferred one first. Advantages mark
them: +1 on each token of the chosen reply, -1 on each of the rejected one.

``_R`` trained tokens, ``_B`` samples and ``_P`` pairs of a micro-batch, which holds whole pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from miles.algo.credit import rows_of
from miles.algo.objective import Evidence, Terms
from miles.algo.reduce import Layout
from miles.core.types import Author, Group, Sample


class Paired:
    """A pair: the first attempt of a group is chosen and worth 1 a token, the second is rejected and worth -1.

    The two rows are one trajectory: they share a denominator and are trained in one micro-batch.
    """

    def __call__(self, group: Group) -> Sequence[Sample]:
        assert len(group.trajectories) == 2, f"prompt {group.prompt.id} has {len(group.trajectories)} replies, not two"
        return [
            replace(row, trajectory=0, share=2)
            for trajectory, worth in zip(group.trajectories, (1.0, -1.0), strict=True)
            for row in rows_of(group.prompt.id, trajectory, worth=worth, trained=Author.POLICY)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """DPO: -log sigmoid(margin) of each pair, with margin = reward of the chosen less reward of the rejected reply.

    A reply's reward is beta times the log-prob it gained over the reference, all its tokens together. With
    ``smoothing`` s a pair is taken to be the wrong way round with probability s (conservative DPO):
    -(1 - s) log sigmoid(margin) - s log sigmoid(-margin).
    """

    beta: float
    smoothing: float = 0.0

    def __call__(self, evidence: Evidence, layout: Layout) -> Terms:
        assert evidence.ref_logp_R is not None, "pairs are judged against a reference model"
        gained_R = self.beta * (evidence.logp_R - evidence.ref_logp_R)
        chosen_R = evidence.advantage_R > 0
        nothing_R = torch.zeros_like(gained_R)
        preferred_R = layout.sum_of_pair(torch.where(chosen_R, gained_R, nothing_R))
        refused_R = layout.sum_of_pair(torch.where(chosen_R, nothing_R, gained_R))
        margin_R = preferred_R - refused_R
        loss = layout.reduce(self._loss(margin_R))
        measured = {
            "dpo_accuracy": (margin_R > 0).to(margin_R.dtype),
            "dpo_margin": margin_R,
            "dpo_chosen_reward": preferred_R,
            "dpo_rejected_reward": refused_R,
            "entropy": evidence.entropy_R,
        }
        means = {name: layout.mean(x_R.detach()) for name, x_R in measured.items()}
        return Terms(loss=loss, metrics={"loss": loss.detach(), **means})

    def _loss(self, margin_R: Tensor) -> Tensor:
        """The loss of each token's pair."""
        loss_R = -logsigmoid(margin_R)
        if not self.smoothing:
            return loss_R
        return (1 - self.smoothing) * loss_R - self.smoothing * logsigmoid(-margin_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerry:
    """The loss of a reward model: -log sigmoid(score of the chosen less score of the rejected reply) of each pair."""

    def __call__(self, score_B: Tensor, pairs: int) -> Terms:
        """``score_B`` has a chosen and a rejected reply in turn; ``pairs`` is how many the whole global batch has."""
        chosen_P, rejected_P = score_B.view(-1, 2).unbind(1)
        margin_P = chosen_P - rejected_P
        loss = -logsigmoid(margin_P).sum() / pairs
        measured = {
            "rm_accuracy": (margin_P > 0).to(margin_P.dtype),
            "rm_margin": margin_P,
            "rm_chosen_score": chosen_P,
            "rm_rejected_score": rejected_P,
        }
        means = {name: x_P.detach().sum() / pairs for name, x_P in measured.items()}
        return Terms(loss=loss, metrics={"loss": loss.detach(), **means})
