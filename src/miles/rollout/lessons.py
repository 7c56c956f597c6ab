"""The built-in curricula (see core.protocols.Curriculum): which prompts next, or how much of each part."""

from __future__ import annotations

from statistics import fmean

import numpy as np

from miles.core.protocols import Lesson, Portion
from miles.rollout.seeds import mix_each

_FLOOR = 0.05
"""What is left of a part's share when nothing can be learned from it, so that it is noticed if that changes."""


def learnable_parts(lesson: Lesson) -> dict[str, float]:
    """Weigh each part by its own weight and by how far its prompts are from always and never solved.

    A prompt whose last group had a mean reward of r counts 4r(1 - r), one that was not attempted counts 1.
    """
    return {
        portion.name: portion.weight * (_FLOOR + (1 - _FLOOR) * _learnable(portion, lesson))
        for portion in lesson.portions
    }


def unsolved_first(lesson: Lesson) -> list[int]:
    """The prompts whose last group did not earn 1 on average, in an order drawn anew; all, once none is left."""
    ids = np.array([prompt.id for portion in lesson.portions for prompt in portion.prompts], np.int64)
    shuffled: list[int] = ids[np.argsort(mix_each((lesson.seed,), ids), kind="stable")].tolist()
    left = [index for index in shuffled if index not in lesson.past or lesson.past[index].last < 1]
    return left or shuffled


def _learnable(portion: Portion, lesson: Lesson) -> float:
    rewards = [min(max(lesson.past[p.id].last, 0.0), 1.0) for p in portion.prompts if p.id in lesson.past]
    unseen = len(portion.prompts) - len(rewards)
    return fmean([*(4 * reward * (1 - reward) for reward in rewards), *[1.0] * unseen])
