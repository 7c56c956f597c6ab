"""Built-in rewards, single or as a weighted mixture; ``metadata["rm_type"]`` overrides ``--rm-type`` per prompt.

::

    --rm-type  ----------+
                         +--> terms --> each term's reward, concurrently --> sum of weight x value
    metadata["rm_type"] -+  (a prompt's own wins)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from miles.core.errors import DataError, UsageError, first_cause
from miles.core.protocols import GroupRewardFn, RewardFn
from miles.core.types import Prompt, Reward, Trajectory
from miles.rollout.reward.adapter import build_group_reward, build_reward
from miles.rollout.reward.context import GraderContext
from miles.rollout.reward.registry import RewardTerm, check_rm_type, is_group_rm, parse_rm_type

RM_TYPE_KEY = "rm_type"
"""Metadata key that names a prompt's own reward."""


def build_builtin_reward(rm_type: str, context: GraderContext) -> RewardFn:
    """Build a reward that scores single trajectories. A prompt's own ``rm_type`` must then do so too."""
    return PerPromptReward(rm_type, context)


def build_builtin_group_reward(rm_type: str, context: GraderContext) -> GroupRewardFn:
    """Build a reward that scores all trajectories of a group; rewards of single trajectories are applied to each."""
    return PerPromptGroupReward(rm_type, context)


class RewardMixture:
    """Weighted sum of rewards. With several, ``parts`` has each one's value, and its parts as ``name.part``."""

    def __init__(self, terms: Sequence[RewardTerm], context: GraderContext) -> None:
        self._terms = tuple(terms)
        self._rewards = [build_reward(term, context) for term in terms]

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        if len(self._rewards) == 1:
            return combine_rewards(self._terms, [await self._rewards[0](prompt, trajectory)])
        return combine_rewards(self._terms, await _gather(reward(prompt, trajectory) for reward in self._rewards))


class GroupRewardMixture:
    """Weighted sum of the rewards of a group; some compare its trajectories and some score each."""

    def __init__(self, terms: Sequence[RewardTerm], context: GraderContext) -> None:
        self._terms = tuple(terms)
        self._scorers = [
            build_group_reward(term, context)
            if term.grader.kind == "group"
            else _PerTrajectory(build_reward(term, context))
            for term in terms
        ]

    async def __call__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Reward]:
        scored = await _gather(scorer(prompt, trajectories) for scorer in self._scorers)
        return [combine_rewards(self._terms, rewards) for rewards in zip(*scored, strict=True)]


class PerPromptReward:
    """The mixture each prompt names, built on first use."""

    def __init__(self, rm_type: str, context: GraderContext) -> None:
        self._default = rm_type
        self._context = context
        self._rewards_by_type: dict[str, RewardFn] = {rm_type: RewardMixture(parse_rm_type(rm_type), context)}

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        rm_type = resolve_rm_type(prompt, self._default)
        if rm_type not in self._rewards_by_type:
            if is_group_rm(rm_type):
                raise DataError(
                    f"Prompt {prompt.id} asks for {rm_type}, which compares all trajectories of a prompt; give "
                    f"--group-rm, "
                    "so that they are scored together."
                )
            self._rewards_by_type[rm_type] = _build_mixture(prompt, rm_type, RewardMixture, self._context)
        return await self._rewards_by_type[rm_type](prompt, trajectory)


class PerPromptGroupReward:
    """The mixture each prompt names, for groups."""

    def __init__(self, rm_type: str, context: GraderContext) -> None:
        self._default = rm_type
        self._context = context
        self._rewards_by_type: dict[str, GroupRewardFn] = {rm_type: GroupRewardMixture(parse_rm_type(rm_type), context)}

    async def __call__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Reward]:
        rm_type = resolve_rm_type(prompt, self._default)
        if rm_type not in self._rewards_by_type:
            self._rewards_by_type[rm_type] = _build_mixture(prompt, rm_type, GroupRewardMixture, self._context)
        return await self._rewards_by_type[rm_type](prompt, trajectories)


class _PerTrajectory:
    """Scores the trajectories that have no reward yet, one by one."""

    def __init__(self, reward: RewardFn) -> None:
        self._reward = reward

    async def __call__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Reward]:
        unscored = [t for t in trajectories if t.reward is None]
        scored = iter(await _gather(self._reward(prompt, t) for t in unscored))
        return [next(scored) if t.reward is None else t.reward for t in trajectories]


def resolve_rm_type(prompt: Prompt, default: str) -> str:
    """The rm_type of a prompt; its own is validated here, since config validation has not seen it."""
    rm_type = prompt.metadata.get(RM_TYPE_KEY)
    if rm_type is None or rm_type == "" or rm_type == default:
        return default
    try:
        if not isinstance(rm_type, str):
            raise UsageError(f"metadata['{RM_TYPE_KEY}'] must be the name of a reward, not {rm_type!r}.")
        check_rm_type(rm_type.strip())
    except UsageError as error:
        raise DataError(f"Prompt {prompt.id}: {error}") from error
    return rm_type.strip()


def combine_rewards(terms: Sequence[RewardTerm], rewards: Sequence[Reward]) -> Reward:
    """Sum weighted rewards. A single reward keeps its parts as they are."""
    value = sum([term.weight * reward.value for term, reward in zip(terms, rewards, strict=True)])
    if len(terms) == 1:
        return Reward(value=value, parts=rewards[0].parts)
    named: dict[str, float] = {}
    for term, reward in zip(terms, rewards, strict=True):
        named[term.name] = reward.value
        named |= {f"{term.name}.{name}": piece for name, piece in reward.parts.items()}
    return Reward(value=value, parts=named)


def _build_mixture(prompt: Prompt, rm_type: str, mixture_type: type[Any], context: GraderContext) -> Any:
    try:
        return mixture_type(parse_rm_type(rm_type), context)
    except UsageError as error:
        raise DataError(f"Prompt {prompt.id}: {error}") from error


async def _gather(awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all concurrently; the first error cancels the rest and is raised unwrapped."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_await(awaitable)) for awaitable in awaitables]
    except BaseExceptionGroup as group:
        first = first_cause(group)
        raise first from first.__cause__
    return [task.result() for task in running]


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
