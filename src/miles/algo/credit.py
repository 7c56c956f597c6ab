"""Credit: a scored group becomes training rows (numpy only, so the rollout side runs it without torch).

``_I``: one entry an attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from miles.algo.length import Overlong
from miles.core.errors import PlugError
from miles.core.protocols import Credit, Worth
from miles.core.types import Array, Author, Group, Sample, Span, Status, Trajectory

_TINY = 1e-6

Floats64 = NDArray[np.float64]


class Compare(Protocol):
    """Rewards and response lengths of attempts that are held against each other -> what each is worth."""

    def __call__(self, reward_I: Floats64, length_I: Floats64) -> Floats64: ...


# -- what an attempt is worth ---------------------------------------------------------------


def group_relative(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """GRPO: an attempt's reward less its siblings' mean, over their sample deviation + 1e-6.

    A group of one, or one whose rewards are all equal, teaches nothing: its advantages are 0.

    >>> group_relative(np.array([1.0, 0.0, 0.5]), np.ones(3)).round(3).tolist()
    [1.0, -1.0, 0.0]
    """
    return centred(reward_I, length_I) / (reward_I.std(ddof=1) + _TINY) if _differ(reward_I) else 0 * reward_I


def centred(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """Dr.GRPO: an attempt's reward less its siblings' mean, 0 in a group of one.

    Without the deviation, a prompt that is nearly always solved or nearly never weighs no more than another.

    >>> centred(np.array([1.0, 0.0]), np.ones(2)).tolist()
    [0.5, -0.5]
    """
    return reward_I - reward_I.mean() if _differ(reward_I) else 0 * reward_I


def leave_one_out(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """RLOO: an attempt's reward less the mean of the others', 0 in a group of one.

    The baseline of an attempt does not depend on that attempt, so the policy gradient has no bias.

    >>> leave_one_out(np.array([1.0, 0.0, 0.5]), np.ones(3)).tolist()
    [0.75, -0.75, 0.0]
    """
    return centred(reward_I, length_I) * (len(reward_I) / max(len(reward_I) - 1, 1))


def max_likelihood(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """MaxRL: an attempt's reward less its siblings' mean, over that mean; 0 where nobody earned anything.

    For rewards of 0 and 1 and n attempts the mean gradient is that of log(pass rate) expanded to n - 1 terms,
    -sum over k < n of (1 - pass rate)^k / k, which favours prompts that are seldom solved. Rewards are 0 or more.

    >>> max_likelihood(np.array([1.0, 0.0, 0.0, 0.0]), np.ones(4)).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    if (reward_I < 0).any():
        raise PlugError(
            f"--advantage-estimator maxrl divides by the mean reward of a group, and one reward is {reward_I.min():g}; "
            "give rewards of 0 or more, or choose another estimator."
        )
    if not _differ(reward_I):
        return 0 * reward_I
    share_I = reward_I / reward_I.max()  # the mean of the smallest numbers there are would be 0
    return centred(share_I, length_I) / share_I.mean()


def optimal_baseline(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """OPO: an attempt's reward less the mean of all in which each weighs as many times as it has tokens.

    Where the gradient of an attempt's log-probability grows with its length, this baseline gives the policy
    gradient its least variance.

    >>> optimal_baseline(np.array([1.0, 0.0]), np.array([30.0, 10.0])).tolist()
    [0.25, -0.75]
    """
    if not _differ(reward_I):
        return 0 * reward_I
    return reward_I - np.average(reward_I, weights=length_I if length_I.any() else None)


def as_earned(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """An attempt's reward itself, for estimators that take token returns of it in the trainer."""
    return reward_I


def unrewarded(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """0 whatever was earned, where a teacher alone is learned from.

    >>> unrewarded(np.array([1.0, 0.0]), np.ones(2)).tolist()
    [0.0, 0.0]
    """
    return 0 * reward_I


def _differ(reward_I: Floats64) -> bool:
    return len(reward_I) > 1 and bool(np.ptp(reward_I) > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Holds the attempts of a group against each other (see core.protocols.Worth).

    With ``role_key`` only those that have the same value under that key of their metadata, so that in self-play
    each side is measured by what its own side earned. Attempts that ended as one of ``masked`` are measured by nobody,
    and nobody by them: they are worth 0.
    """

    compare: Compare
    role_key: str | None = None
    masked: frozenset[Status] = frozenset()

    def __call__(self, group: Group) -> Sequence[float]:
        reward_I = np.array([_reward(group, t) for t in group.trajectories], np.float64)
        length_I = np.array([t.response_length for t in group.trajectories], np.float64)
        worth_I = np.zeros_like(reward_I)
        counts_I = np.array([t.status not in self.masked for t in group.trajectories], np.bool_)
        for side_I in self._sides(group):
            if (some_I := side_I & counts_I).any():
                worth_I[some_I] = self.compare(reward_I[some_I], length_I[some_I])
        return worth_I.tolist()

    def _sides(self, group: Group) -> Iterator[NDArray[np.bool_]]:
        """Which attempts are compared with each other, as a mask over the group for each set of them."""
        if self.role_key is None:
            yield np.ones(len(group.trajectories), np.bool_)
            return
        for trajectory in group.trajectories:
            if self.role_key not in trajectory.metadata:
                raise PlugError(
                    f"attempt {trajectory.index} at prompt {group.prompt.id} does not say its role; set "
                    f"metadata[{self.role_key!r}] in the generate function, or leave out --advantage-role-key."
                )
        roles = [str(t.metadata[self.role_key]) for t in group.trajectories]
        for role in dict.fromkeys(roles):
            yield np.array([r == role for r in roles])


# -- from a group to its rows ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Valued:
    """Every token of an attempt is worth what ``worth`` says of the attempt.

    ``penalty`` is added to the rewards before; rows keep the reward as it was earned. Attempts that ended as one of
    ``masked`` give rows in which nothing is trained.
    """

    worth: Worth
    penalty: Overlong | None = None
    masked: frozenset[Status] = frozenset()

    def __call__(self, group: Group) -> Sequence[Sample]:
        worths = self.worth(group if self.penalty is None else penalised(group, self.penalty))
        if len(worths) != len(group.trajectories):
            raise PlugError(
                f"{len(worths)} numbers were given for the {len(group.trajectories)} attempts at prompt "
                f"{group.prompt.id}; give one for each, in their order."
            )
        for trajectory, worth in zip(group.trajectories, worths, strict=True):
            if not np.isfinite(worth):
                raise PlugError(
                    f"attempt {trajectory.index} at prompt {group.prompt.id} was valued at {worth}; it must be finite."
                )
        return [
            row
            for trajectory, worth in zip(group.trajectories, worths, strict=True)
            for row in rows_of(
                group.prompt.id,
                trajectory,
                worth=worth,
                trained=None if trajectory.status in self.masked else Author.POLICY,
            )
        ]


class Supervised:
    """A demonstration: the data wrote in the policy's place, and every token of that is worth 1."""

    def __call__(self, group: Group) -> Sequence[Sample]:
        return [
            row
            for trajectory in group.trajectories
            for row in rows_of(group.prompt.id, trajectory, worth=1.0, trained=Author.POLICY)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A user's credit, refused by name where its rows are not those of the group's attempts."""

    credit: Credit

    def __call__(self, group: Group) -> Sequence[Sample]:
        rows = list(self.credit(group))
        found, start = 0, 0
        while start < len(rows):
            whole = rows[start : start + max(rows[start].share, 1)]
            if len({(s.prompt_id, s.trajectory, s.share) for s in whole}) != 1 or len(whole) != rows[start].share:
                raise PlugError(
                    f"the rows of attempt {rows[start].trajectory} at prompt {group.prompt.id} do not stand together; "
                    "the rows of one attempt follow each other, and each says in share how many they are."
                )
            found, start = found + 1, start + len(whole)
        if found != len(group.trajectories):
            raise PlugError(
                f"the credit of prompt {group.prompt.id} gave rows of {found} attempts for "
                f"{len(group.trajectories)}; an attempt not to be trained on gets a row with an empty mask."
            )
        return rows


def penalised(group: Group, penalty: Overlong) -> Group:
    """The group with each attempt's length penalty added to its reward."""
    trajectories = tuple(
        replace(t, reward=replace(t.reward, value=t.reward.value + penalty(t.response_length))) if t.reward else t
        for t in group.trajectories
    )
    return replace(group, trajectories=trajectories)


def rows_of(prompt_id: int, trajectory: Trajectory, *, worth: float, trained: Author | None) -> list[Sample]:
    """One row a branch. Tokens of ``trained`` authorship, if any is, are trained on, each with advantage ``worth``.

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


def _reward(group: Group, trajectory: Trajectory) -> float:
    value = None if trajectory.reward is None else trajectory.reward.value
    if value is None or not np.isfinite(value):
        raise PlugError(
            f"the reward of attempt {trajectory.index} at prompt {group.prompt.id} is {value}; "
            "the reward function must give every attempt a finite number"
        )
    return value


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


def newest_only(credit: Credit) -> Credit:
    """The same rows, trained only where the newest of the versions that wrote one has written."""

    def rows(group: Group) -> Sequence[Sample]:
        return [replace(row, mask=row.mask & (row.versions == row.versions.max())) for row in credit(group)]

    return rows
