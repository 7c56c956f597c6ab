"""Build a RewardFn or GroupRewardFn from a registry entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from miles.core.errors import DataError
from miles.core.protocols import GroupRewardFn, RewardFn
from miles.core.types import Prompt, Reward, Trajectory
from miles.rollout.reward.context import GraderContext
from miles.rollout.reward.grader_pool import GraderPool
from miles.rollout.reward.math import compare
from miles.rollout.reward.registry import RewardTerm
from miles.rollout.reward.text import extract_boxed
from miles.rollout.reward.types import BadLabel, Score, get_response_text
from miles.rollout.seeds import SeedStream, mix

_PACKAGE = "miles.rollout.reward."
_EQUIVALENT = _PACKAGE + "symbolic:is_equivalent"


def build_reward(term: RewardTerm, context: GraderContext) -> RewardFn:
    """Build the reward of a term that scores trajectories one by one."""
    grader = term.grader
    assert grader.kind != "group", "a group reward scores trajectories together"
    boxed_address = grader.boxed if term.is_boxed else None
    if grader.kind == "built":
        reward: RewardFn = _import_function(grader.address)(context)
    else:
        reward = GradedReward(term, boxed_address or grader.address, context.pool)
    return BoxedReward(reward, term.name) if term.is_boxed and boxed_address is None else reward


def build_group_reward(term: RewardTerm, context: GraderContext) -> GroupRewardFn:
    """Build the reward of a term that compares the trajectories of a group."""
    assert term.grader.kind == "group"
    return _import_function(term.grader.address)(context)


def build_code_reward(context: GraderContext) -> RewardFn:
    """Build the reward that runs programs, with the limits of the run's options."""
    assert context.code is not None, "a code reward needs the run's options"
    return context.code()


def build_random_reward(context: GraderContext) -> RewardFn:
    """0 or 1 at random, as a pure function of (seed, prompt, epoch, trajectory index): a control without a signal."""

    async def reward(prompt: Prompt, trajectory: Trajectory) -> Reward:
        return Reward(value=float(mix(SeedStream.REWARD, context.seed, prompt.id, prompt.epoch, trajectory.index) & 1))

    return reward


class GradedReward:
    """Grades the response text against the prompt's label and metadata, in this process or in a worker."""

    def __init__(self, term: RewardTerm, address: str, pool: GraderPool) -> None:
        self._name = term.name
        self._needs_label = term.grader.needs_label
        self._grade = {"inline": self._grade_inline, "worker": self._grade_in_worker, "math": self._grade_math}[
            term.grader.kind
        ]
        self._address = address
        self._function = None if term.grader.kind == "worker" else _import_function(address)
        self._pool = pool

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        reply = get_response_text(self._name, trajectory)
        if prompt.label is None and self._needs_label:
            raise DataError(f"Prompt {prompt.id} has no label to grade against; name its column with --label-key.")
        try:
            return _to_reward(await self._grade(reply, prompt))
        except BadLabel as error:
            raise DataError(f"Prompt {prompt.id} cannot be graded by {self._name}: {error}.") from error

    async def _grade_inline(self, reply: str, prompt: Prompt) -> Score:
        assert self._function is not None
        return self._function(reply, prompt.label or "", prompt.metadata)

    async def _grade_in_worker(self, reply: str, prompt: Prompt) -> Score:
        return await self._pool.call(_PACKAGE + self._address, reply, prompt.label or "", dict(prompt.metadata))

    async def _grade_math(self, reply: str, prompt: Prompt) -> Score:
        assert self._function is not None
        sides = self._function(reply, prompt.label or "")
        if sides is None:
            return 0.0
        same = compare(*sides)  # decides most answers without a process
        return float(await self._pool.call(_EQUIVALENT, *sides) if same is None else same)


class BoxedReward:
    """Passes only the content of the response's last box to a reward; without a box, the reward is 0."""

    def __init__(self, reward: RewardFn, name: str) -> None:
        self._to_reward = reward
        self._name = name

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        answer = extract_boxed(get_response_text(self._name, trajectory))
        if answer is None:
            return Reward(value=0.0)
        return await self._to_reward(prompt, replace(trajectory, metadata={**trajectory.metadata, "text": answer}))


def _to_reward(score: Score) -> Reward:
    if isinstance(score, Mapping):
        return Reward(value=score["score"], parts=dict(score))
    return Reward(value=float(score))


def _import_function(address: str) -> Callable[..., Any]:
    module, _, name = address.partition(":")
    return getattr(import_module(_PACKAGE + module), name)
