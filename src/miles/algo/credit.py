"""Credit: a scored group becomes training rows (numpy only, so the rollout side runs it without torch)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from miles.core.errors import PlugError
from miles.core.types import Array, Author, Group, Sample, Span, Trajectory

_TINY = 1e-6


class GroupRelative:
    """GRPO: an attempt is worth its reward minus its siblings' mean, optionally over their sample std.

    A group of one, or one whose rewards are all equal, teaches nothing: its advantages are 0.
    """

    def __init__(self, *, normalize_std: bool) -> None:
        self._normalize_std = normalize_std

    def __call__(self, group: Group) -> Sequence[Sample]:
        worths = group_relative(_rewards(group), normalize_std=self._normalize_std)
        return [
            row
            for trajectory, worth in zip(group.trajectories, worths.tolist(), strict=True)
            for row in rows_of(group.prompt.id, trajectory, worth=worth, trained=Author.POLICY)
        ]


class Supervised:
    """A demonstration: the data wrote the reply (its ENV spans), and every token of it is worth 1."""

    def __call__(self, group: Group) -> Sequence[Sample]:
        return [
            row
            for trajectory in group.trajectories
            for row in rows_of(group.prompt.id, trajectory, worth=1.0, trained=Author.ENV)
        ]


def group_relative(rewards: NDArray[np.float64], *, normalize_std: bool) -> NDArray[np.float64]:
    """Rewards of one group -> advantages: centred, and over (sample std + 1e-6) when asked.

    >>> group_relative(np.array([1.0, 0.0]), normalize_std=False).tolist()
    [0.5, -0.5]
    """
    if len(rewards) < 2 or np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + _TINY) if normalize_std else centred


def rows_of(prompt_id: int, trajectory: Trajectory, *, worth: float, trained: Author) -> list[Sample]:
    """One row a branch. Tokens of ``trained`` authorship are trained on, each with advantage ``worth``.

    A branch without such a token still gives a row, so that the number of trajectories in a batch
    stays what the configuration says; it adds nothing to the loss and counts in its denominator.
    """
    reward = trajectory.reward.value if trajectory.reward is not None else 0.0
    samples: list[Sample] = []
    for branch in trajectory.branches:
        sizes = [len(s) for s in branch]
        mask = np.repeat([s.author is trained for s in branch], sizes)
        samples.append(
            Sample(
                prompt_id=prompt_id,
                trajectory=trajectory.index,
                tokens=np.concatenate([s.tokens for s in branch]),
                mask=mask,
                logprobs=_logprobs(branch),
                advantages=np.where(mask, np.float32(worth), np.float32(0)),
                versions=np.repeat([_number(s) for s in branch], sizes).astype(np.int32),
                policy=next((s.version.policy for s in branch if s.version is not None), "actor"),
                share=len(trajectory.branches),
                reward=reward,
                extras=_extras(branch),
            )
        )
    return samples


def _rewards(group: Group) -> NDArray[np.float64]:
    values: list[float] = []
    for number, trajectory in enumerate(group.trajectories):
        value = None if trajectory.reward is None else trajectory.reward.value
        if value is None or not np.isfinite(value):
            raise PlugError(
                f"the reward of attempt {number} at prompt {group.prompt.id} is {value}; "
                "the reward function must give every attempt a finite number"
            )
        values.append(value)
    return np.array(values, np.float64)


def _number(span: Span) -> int:
    return -1 if span.version is None else span.version.number


def _logprobs(branch: Sequence[Span]) -> NDArray[np.float32]:
    return np.concatenate([np.zeros(len(s), np.float32) if s.logprobs is None else s.logprobs for s in branch])


def _extras(branch: Sequence[Span]) -> dict[str, Array]:
    """Each named array joined over the branch, "none" (see ``nothing_like``) where a span lacks it."""
    patterns = {name: values for s in branch for name, values in s.extras.items()}
    return {
        name: np.concatenate([s.extras[name] if name in s.extras else nothing_like(values, len(s)) for s in branch])
        for name, values in patterns.items()
    }


def nothing_like(values: Array, length: int) -> Array:
    """``length`` entries that mean "none": the largest integer of the type, or NaN for floats."""
    empty = np.iinfo(values.dtype).max if np.issubdtype(values.dtype, np.integer) else np.nan
    return np.full((length, *values.shape[1:]), empty, values.dtype)
