"""Advantage estimation per prompt group: GRPO, Dr.GRPO, RLOO, MaxRL, OPO; a scored group becomes training samples.

NumPy only, so the rollout side runs it without torch. ``_I``: one entry per trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from miles.core.agents import select_role_part
from miles.core.errors import HookError
from miles.core.media import join_images
from miles.core.protocols import AdvantageEstimator, AdvantageFn
from miles.core.types import UNSCORED, Array, Author, Group, Sample, Span, Status, Tokens, Trajectory

_EPSILON = 1e-6

Floats64 = NDArray[np.float64]


class GroupAdvantageFn(Protocol):
    """Map rewards and response lengths of a group of trajectories to their advantages."""

    def __call__(self, reward_I: Floats64, length_I: Floats64) -> Floats64: ...


# -- advantages of a group --------------------------------------------------------------------


def grpo_advantages(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """GRPO: reward minus the group mean, divided by the sample standard deviation + 1e-6.

    Advantages are 0 in a group of one and where all rewards are equal.

    >>> grpo_advantages(np.array([1.0, 0.0, 0.5]), np.ones(3)).round(3).tolist()
    [1.0, -1.0, 0.0]
    """
    if not _differ(reward_I):
        return 0 * reward_I
    return dr_grpo_advantages(reward_I, length_I) / (reward_I.std(ddof=1) + _EPSILON)


def raw_advantages(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """The rewards themselves: REINFORCE without a baseline."""
    return reward_I


def dr_grpo_advantages(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """Dr.GRPO: reward minus the group mean, 0 in a group of one.

    Without the division by the standard deviation, prompts that are almost always or almost never solved get no
    larger weight than others.

    >>> dr_grpo_advantages(np.array([1.0, 0.0]), np.ones(2)).tolist()
    [0.5, -0.5]
    """
    return reward_I - reward_I.mean() if _differ(reward_I) else 0 * reward_I


def rloo_advantages(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """RLOO: reward minus the mean of the other trajectories' rewards (leave-one-out), 0 in a group of one.

    A trajectory's baseline does not depend on that trajectory, so the policy gradient is unbiased.

    >>> rloo_advantages(np.array([1.0, 0.0, 0.5]), np.ones(3)).tolist()
    [0.75, -0.75, 0.0]
    """
    return dr_grpo_advantages(reward_I, length_I) * (len(reward_I) / max(len(reward_I) - 1, 1))


def maxrl_advantages(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """MaxRL: reward minus the group mean, divided by that mean; 0 if all rewards are 0.

    For rewards of 0 and 1 and n trajectories the expected gradient is that of log(pass rate) expanded to n - 1 terms,
    -sum over k < n of (1 - pass rate)^k / k, which favours prompts with a low pass rate. Rewards must not be negative.

    >>> maxrl_advantages(np.array([1.0, 0.0, 0.0, 0.0]), np.ones(4)).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    if (reward_I < 0).any():
        raise HookError(
            f"--advantage-estimator maxrl divides by the mean reward of a group, but one reward is {reward_I.min():g}; "
            "use rewards of 0 or more, or another estimator."
        )
    if not _differ(reward_I):
        return 0 * reward_I
    scaled_I = reward_I / reward_I.max()  # the mean of denormal rewards would underflow to 0
    return dr_grpo_advantages(scaled_I, length_I) / scaled_I.mean()


def opo_advantages(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """OPO: reward minus the length-weighted mean reward of the group (optimal reward baseline).

    If the gradient norm of a trajectory's log-probability grows with its length, this baseline minimises the variance
    of the policy gradient.

    >>> opo_advantages(np.array([1.0, 0.0]), np.array([30.0, 10.0])).tolist()
    [0.25, -0.75]
    """
    if not _differ(reward_I):
        return 0 * reward_I
    return reward_I - np.average(reward_I, weights=length_I if length_I.any() else None)


def raw_reward_advantages(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """The reward itself, for REINFORCE++ and PPO, which compute token-level returns from it in the trainer."""
    return reward_I


def zero_advantages(reward_I: Floats64, length_I: Floats64) -> Floats64:
    """0 regardless of the reward, for on-policy distillation, which trains on the teacher's signal only.

    >>> zero_advantages(np.array([1.0, 0.0]), np.ones(2)).tolist()
    [0.0, 0.0]
    """
    return 0 * reward_I


def _differ(reward_I: Floats64) -> bool:
    return len(reward_I) > 1 and bool(reward_I.max() > reward_I.min())


def _is_masked(trajectory: Trajectory, masked: frozenset[Status]) -> bool:
    return trajectory.status in masked or (bool(masked) and UNSCORED in trajectory.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelativeAdvantages:
    """An AdvantageFn that applies ``group_fn`` to the trajectories of a group.

    With ``role_key`` only trajectories with the same value under that metadata key are compared, so that in self-play
    each side is compared with its own side. Trajectories whose status is in ``masked``, and then also those that could
    not be scored, are left out of the comparison and get advantage 0.
    """

    group_fn: GroupAdvantageFn
    role_key: str | None = None
    masked: frozenset[Status] = frozenset()

    def __call__(self, group: Group) -> Sequence[float]:
        reward_I = np.array([_get_reward(group, t) for t in group.trajectories], np.float64)
        length_I = np.array([t.response_length for t in group.trajectories], np.float64)
        advantage_I = np.zeros_like(reward_I)
        unmasked_I = np.array([not _is_masked(t, self.masked) for t in group.trajectories], np.bool_)
        for side_I in self._iter_sides(group):
            if (compared_I := side_I & unmasked_I).any():
                advantage_I[compared_I] = self.group_fn(reward_I[compared_I], length_I[compared_I])
        return advantage_I.tolist()

    def _iter_sides(self, group: Group) -> Iterator[NDArray[np.bool_]]:
        """Yield a mask over the group for each set of trajectories that are compared with each other."""
        if self.role_key is None:
            yield np.ones(len(group.trajectories), np.bool_)
            return
        for trajectory in group.trajectories:
            if self.role_key not in trajectory.metadata:
                raise HookError(
                    f"trajectory {trajectory.index} of prompt {group.prompt.id} has no role; set "
                    f"metadata[{self.role_key!r}] in the generate function, or leave out --advantage-role-key."
                )
        roles = [str(t.metadata[self.role_key]) for t in group.trajectories]
        for role in dict.fromkeys(roles):
            yield np.array([r == role for r in roles])


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPenalty:
    """DAPO's soft overlong penalty: 0 up to ``buffer`` tokens before ``limit``, then linear to -``factor`` at it.

    >>> [OverlongPenalty(limit=10, buffer=4)(length) for length in (7, 8, 10, 12)]
    [-0.25, -0.5, -1.0, -1.0]
    """

    limit: int
    buffer: int
    factor: float = 1.0

    def __call__(self, length: int) -> float:
        """Return the value (0 or less) to add to the reward of a response of ``length`` tokens."""
        excess = length - (self.limit - self.buffer)
        return -self.factor * min(max(excess, 0) / self.buffer, 1.0)


def apply_length_penalty(group: Group, penalty: OverlongPenalty) -> Group:
    """Return the group with each trajectory's length penalty added to its reward."""
    trajectories = tuple(
        replace(t, reward=replace(t.reward, value=t.reward.value + penalty(t.response_length))) if t.reward else t
        for t in group.trajectories
    )
    return replace(group, trajectories=trajectories)


# -- advantage estimators: from a group to training samples -----------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeEstimator:
    """Gives every token of a trajectory the trajectory's advantage, computed by ``advantage_fn``.

    ``penalty`` is added to the rewards before; samples keep the original reward. Trajectories whose status is in
    ``masked``, and then also those that could not be scored, yield samples without trained tokens.
    """

    advantage_fn: AdvantageFn
    penalty: OverlongPenalty | None = None
    masked: frozenset[Status] = frozenset()

    def __call__(self, group: Group) -> Sequence[Sample]:
        advantages = self.advantage_fn(group if self.penalty is None else apply_length_penalty(group, self.penalty))
        if len(advantages) != len(group.trajectories):
            raise HookError(
                f"the advantage function returned {len(advantages)} values for the {len(group.trajectories)} "
                f"trajectories of prompt {group.prompt.id}; return one for each, in order."
            )
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            if not math.isfinite(advantage):
                raise HookError(
                    f"the advantage of trajectory {trajectory.index} of prompt {group.prompt.id} is {advantage}; "
                    "it must be finite."
                )
        return build_group_samples(
            group.prompt.id,
            group.trajectories,
            advantages=advantages,
            trained_authors=[None if _is_masked(t, self.masked) else Author.POLICY for t in group.trajectories],
        )


class SFTEstimator:
    """Supervised fine-tuning: every token of a demonstration's response has advantage 1."""

    def __call__(self, group: Group) -> Sequence[Sample]:
        count = len(group.trajectories)
        return build_group_samples(
            group.prompt.id, group.trajectories, advantages=[1.0] * count, trained_authors=[Author.POLICY] * count
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedEstimator:
    """A user's advantage estimator; HookError if its samples do not correspond to the group's trajectories."""

    estimator: AdvantageEstimator

    def __call__(self, group: Group) -> Sequence[Sample]:
        samples = list(self.estimator(group))
        num_trajectories, start = 0, 0
        while start < len(samples):
            expected = samples[start].samples_per_trajectory
            siblings = samples[start : start + max(expected, 1)]
            origins = {(s.prompt_id, s.trajectory, s.samples_per_trajectory) for s in siblings}
            if len(origins) != 1 or len(siblings) != expected:
                raise HookError(
                    f"the samples of trajectory {samples[start].trajectory} of prompt {group.prompt.id} are not "
                    "contiguous; return the samples of a trajectory next to each other, and set "
                    "samples_per_trajectory of each to their number."
                )
            num_trajectories += 1
            start += len(siblings)
        if num_trajectories != len(group.trajectories):
            raise HookError(
                f"the advantage estimator returned samples of {num_trajectories} trajectories for the "
                f"{len(group.trajectories)} of prompt {group.prompt.id}; return a sample with an empty mask for a "
                "trajectory that is not to be trained on."
            )
        return samples


def train_newest_version_only(estimator: AdvantageEstimator) -> AdvantageEstimator:
    """Wrap an estimator so that only tokens sampled by the newest version of each sample are trained on."""

    def estimate(group: Group) -> Sequence[Sample]:
        return [replace(s, mask=s.mask & (s.versions == s.versions.max())) for s in estimator(group)]

    return estimate


def limit_staleness(samples: Sequence[Sample], get_version: Callable[[str], int], bound: int) -> list[Sample]:
    """Mask the tokens that are more than ``bound`` versions older than their policy, whose version is given."""
    return [
        replace(s, mask=s.mask & ((s.versions < 0) | (s.versions >= get_version(s.policy) - bound))) for s in samples
    ]


# -- multi-agent credit assignment ------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleEstimator:
    """The advantage estimator of one role, and the ``policy`` that trains on its samples."""

    role: str
    policy: str
    estimator: AdvantageEstimator


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiAgentEstimator:
    """An AdvantageEstimator that compares each role's reward with the same role in the other trajectories.

    A role's branches of a trajectory share its reward and one loss denominator. A trajectory without a branch of a
    role yields a sample without trained tokens for it, so that every batch has the same number of samples per role; it
    takes no part in the comparison.
    """

    roles: Sequence[RoleEstimator]

    def __call__(self, group: Group) -> Sequence[Sample]:
        return [sample for role in self.roles for sample in _build_role_samples(group, role)]


def _build_role_samples(group: Group, role: RoleEstimator) -> list[Sample]:
    parts = [select_role_part(t, role.role) for t in group.trajectories]
    present = tuple(part for part in parts if part is not None)
    samples = list(role.estimator(replace(group, trajectories=present))) if present else []
    for trajectory, part in zip(group.trajectories, parts, strict=True):
        if part is None:
            placeholder = Span(author=Author.PROMPT, tokens=np.zeros(1, np.int32))
            empty = replace(trajectory, branches=((placeholder,),), reward=None)
            samples += build_samples(group.prompt.id, empty, advantage=0.0, trained_author=Author.POLICY)
    return [replace(sample, policy=role.policy) for sample in samples]


# -- from a trajectory to its samples ---------------------------------------------------------


def build_samples(
    prompt_id: int, trajectory: Trajectory, *, advantage: float, trained_author: Author | None
) -> list[Sample]:
    """Build one sample per branch; tokens of ``trained_author`` (if any) are trained with ``advantage``.

    A branch without such a token still yields a sample, so that the number of trajectories in a batch
    matches the configuration; it adds nothing to the loss and counts in its denominator.
    """
    return build_group_samples(prompt_id, [trajectory], advantages=[advantage], trained_authors=[trained_author])


def build_group_samples(
    prompt_id: int,
    trajectories: Sequence[Trajectory],
    *,
    advantages: Sequence[float],
    trained_authors: Sequence[Author | None],
) -> list[Sample]:
    """``build_samples`` of several trajectories, whose arrays are views of arrays of all their tokens."""
    spans: list[Span] = []
    trained: list[bool] = []
    values: list[float] = []
    for trajectory, advantage, author in zip(trajectories, advantages, trained_authors, strict=True):
        for branch in trajectory.branches:
            for span in branch:
                is_trained = span.author is author
                spans.append(span)
                trained.append(is_trained)
                values.append(advantage if is_trained else 0.0)
    arrays = _concat_token_arrays(spans, trained, values)
    samples: list[Sample] = []
    end = 0
    for trajectory in trajectories:
        for branch in trajectory.branches:
            start, end = end, end + sum([len(span.tokens) for span in branch])
            policies = [span.version.policy for span in branch if span.version is not None]
            has_images = bool([span for span in branch if span.images])
            samples.append(
                Sample(
                    prompt_id=prompt_id,
                    trajectory=trajectory.index,
                    tokens=arrays.tokens[start:end],
                    mask=arrays.mask[start:end],
                    logprobs=arrays.logprobs[start:end],
                    advantages=arrays.advantages[start:end],
                    versions=arrays.versions[start:end],
                    policy=policies[0] if policies else "actor",
                    samples_per_trajectory=len(trajectory.branches),
                    reward=0.0 if trajectory.reward is None else trajectory.reward.value,
                    extras=_concat_extras(branch),
                    images=join_images([(len(span), span.images) for span in branch]) if has_images else (),
                )
            )
    return samples


def _get_reward(group: Group, trajectory: Trajectory) -> float:
    value = None if trajectory.reward is None else trajectory.reward.value
    if value is None or not math.isfinite(value):
        raise HookError(
            f"the reward of trajectory {trajectory.index} of prompt {group.prompt.id} is {value}; "
            "the reward function must return a finite number for every trajectory"
        )
    return value


class _TokenArrays(NamedTuple):
    """The per-token arrays of samples."""

    tokens: Tokens
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    versions: NDArray[np.int32]


def _concat_token_arrays(spans: Sequence[Span], trained: Sequence[bool], advantages: Sequence[float]) -> _TokenArrays:
    """Concatenate the tokens of spans; those of ``trained`` spans have the span's advantage."""
    lengths = [len(span.tokens) for span in spans]
    versions = [-1 if span.version is None else span.version.number for span in spans]
    logprobs = np.zeros(sum(lengths), np.float32)
    end = 0
    for span, length in zip(spans, lengths, strict=True):
        start, end = end, end + length
        if span.logprobs is not None:
            logprobs[start:end] = span.logprobs
    return _TokenArrays(
        tokens=np.concatenate([span.tokens for span in spans] or [np.zeros(0, np.int32)]),
        mask=np.repeat(np.array(trained, np.bool_), lengths),
        logprobs=logprobs,
        advantages=np.repeat(np.array(advantages, np.float32), lengths),
        versions=np.repeat(np.array(versions, np.int32), lengths),
    )


def _concat_extras(branch: Sequence[Span]) -> dict[str, Array]:
    """Concatenate each named array over the branch, with ``missing_values_like`` for spans that lack it."""
    patterns = {name: values for s in branch if s.extras for name, values in s.extras.items()}
    return {
        name: np.concatenate(
            [s.extras[name] if name in s.extras else missing_values_like(values, len(s)) for s in branch]
        )
        for name, values in patterns.items()
    }


def missing_values_like(values: Array, length: int) -> Array:
    """Return ``length`` entries that mean "missing": the integer dtype's maximum, or NaN for floats."""
    missing = np.iinfo(values.dtype).max if np.issubdtype(values.dtype, np.integer) else np.nan
    return np.full((length, *values.shape[1:]), missing, values.dtype)
