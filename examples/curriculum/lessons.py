"""A curriculum: small piles first, larger ones when the smaller are won."""

from __future__ import annotations

from statistics import fmean

from miles.core.protocols import CurriculumState

READY = 0.8
"""The mean reward of a part from which on the next one is read too."""
REVIEW = 0.2
"""The weight of a part that is done, so that it is not forgotten."""


def harder_when_ready(state: CurriculumState) -> dict[str, float]:
    """A core.protocols.Curriculum: the first part that is not done has weight 1, those after it have none."""
    weights: dict[str, float] = {}
    for part in state.parts:
        rewards = [state.stats[prompt.id].last for prompt in part.prompts if prompt.id in state.stats]
        weights[part.name] = REVIEW
        if not rewards or fmean(rewards) < READY:
            weights[part.name] = 1.0
            break
    return weights
