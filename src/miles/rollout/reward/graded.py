"""From a name in the table to a core.protocols.RewardFn, or to a GroupRewardFn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from miles.core.errors import DataError
from miles.core.protocols import GroupRewardFn, RewardFn
from miles.core.types import Prompt, Reward, Trajectory
from miles.rollout.reward.boxed import boxed
from miles.rollout.reward.math import compare
from miles.rollout.reward.means import Means
from miles.rollout.reward.reply import reply_of
from miles.rollout.reward.score import BadLabel, Score
from miles.rollout.reward.table import Part
from miles.rollout.reward.workers import Workers

_ROOM = "miles.rollout.reward."
_EQUIVALENT = _ROOM + "symbolic:equivalent"


def reward_of(part: Part, means: Means) -> RewardFn:
    """The reward of one part that scores attempts one by one."""
    row = part.row
    assert row.how != "group", "this one scores attempts together"
    own = row.boxed if part.boxed else None
    if row.how == "built":
        reward: RewardFn = _found(row.address)(means)
    else:
        reward = Graded(part, own or row.address, means.workers)
    return Boxed(reward, part.name) if part.boxed and own is None else reward


def group_reward_of(part: Part, means: Means) -> GroupRewardFn:
    """The reward of one part that compares attempts."""
    assert part.row.how == "group"
    return _found(part.row.address)(means)


def code_reward(means: Means) -> RewardFn:
    """The reward that runs programs, made with the limits the user set."""
    assert means.code is not None, "only a run with knobs runs programs"
    return means.code()


class Graded:
    """Grades the text of the reply against the prompt's label and metadata, here or in a worker."""

    def __init__(self, part: Part, address: str, workers: Workers) -> None:
        self._name = part.name
        self._labelled = part.row.labelled
        self._grade = {"here": self._here, "worker": self._in_worker, "algebra": self._by_algebra}[part.row.how]
        self._address = address
        self._function = None if part.row.how == "worker" else _found(address)
        self._workers = workers

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        reply = reply_of(self._name, trajectory)
        if prompt.label is None and self._labelled:
            raise DataError(f"Prompt {prompt.id} has no label to grade by; name its column with --label-key.")
        try:
            return _reward(await self._grade(reply, prompt))
        except BadLabel as error:
            raise DataError(f"Prompt {prompt.id} cannot be graded by {self._name}: {error}.") from error

    async def _here(self, reply: str, prompt: Prompt) -> Score:
        assert self._function is not None
        return self._function(reply, prompt.label or "", prompt.metadata)

    async def _in_worker(self, reply: str, prompt: Prompt) -> Score:
        return await self._workers.call(_ROOM + self._address, reply, prompt.label or "", dict(prompt.metadata))

    async def _by_algebra(self, reply: str, prompt: Prompt) -> Score:
        assert self._function is not None
        sides = self._function(reply, prompt.label or "")
        if sides is None:
            return 0.0
        same = compare(*sides)  # decides most answers without a process
        return float(await self._workers.call(_EQUIVALENT, *sides) if same is None else same)


class Boxed:
    """Shows a reward only what the reply's last box holds; without a box, 0."""

    def __init__(self, reward: RewardFn, name: str) -> None:
        self._reward = reward
        self._name = name

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        answer = boxed(reply_of(self._name, trajectory))
        if answer is None:
            return Reward(value=0.0)
        return await self._reward(prompt, replace(trajectory, metadata={**trajectory.metadata, "text": answer}))


def _reward(score: Score) -> Reward:
    if isinstance(score, Mapping):
        return Reward(value=score["score"], parts=dict(score))
    return Reward(value=float(score))


def _found(address: str) -> Callable[..., Any]:
    module, _, name = address.partition(":")
    return getattr(import_module(_ROOM + module), name)
