"""The reward a run was told to use: one or a weighted mixture, the same for every prompt or by its own wish.

::

    --rm-type  ----------+
                         +--> parts --> each part's reward, side by side --> sum of weight x value
    metadata["rm_type"] -+  (a prompt's own wins)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from miles.core.errors import DataError, UsageError, first_cause
from miles.core.protocols import GroupRewardFn, RewardFn
from miles.core.types import Prompt, Reward, Trajectory
from miles.rollout.reward.graded import group_reward_of, reward_of
from miles.rollout.reward.means import Means
from miles.rollout.reward.table import Part, check_name, is_group, parts_of

OVERRIDE = "rm_type"
"""The key of a prompt's metadata that names its own reward."""


def builtin_reward(rm_type: str, means: Means) -> RewardFn:
    """Scores an attempt by itself. A prompt's own ``rm_type`` must then be one that can, too."""
    return ByPrompt(rm_type, means)


def builtin_group_reward(rm_type: str, means: Means) -> GroupRewardFn:
    """Scores all attempts at a prompt; rewards that score one attempt are asked for each."""
    return GroupByPrompt(rm_type, means)


class Mixture:
    """Weighted rewards of one attempt. With several, ``parts`` has each one's value, and its parts as ``name.part``."""

    def __init__(self, parts: Sequence[Part], means: Means) -> None:
        self._parts = tuple(parts)
        self._rewards = [reward_of(part, means) for part in parts]

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        if len(self._rewards) == 1:
            return weighed(self._parts, [await self._rewards[0](prompt, trajectory)])
        return weighed(self._parts, await _all(reward(prompt, trajectory) for reward in self._rewards))


class GroupMixture:
    """Weighted rewards of a group, of which some compare its attempts and some look at each."""

    def __init__(self, parts: Sequence[Part], means: Means) -> None:
        self._parts = tuple(parts)
        self._scorers = [
            group_reward_of(part, means) if part.row.how == "group" else _Each(reward_of(part, means)) for part in parts
        ]

    async def __call__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Reward]:
        scored = await _all(scorer(prompt, trajectories) for scorer in self._scorers)
        return [weighed(self._parts, rewards) for rewards in zip(*scored, strict=True)]


class ByPrompt:
    """The mixture each prompt asks for, made when first asked for."""

    def __init__(self, rm_type: str, means: Means) -> None:
        self._default = rm_type
        self._means = means
        self._made: dict[str, RewardFn] = {rm_type: Mixture(parts_of(rm_type), means)}

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        wish = wish_of(prompt, self._default)
        if wish not in self._made:
            if is_group(wish):
                raise DataError(
                    f"Prompt {prompt.id} asks for {wish}, which compares all attempts at a prompt; give --group-rm, so "
                    "that they are scored together."
                )
            self._made[wish] = _made(prompt, wish, Mixture, self._means)
        return await self._made[wish](prompt, trajectory)


class GroupByPrompt:
    """The same for groups."""

    def __init__(self, rm_type: str, means: Means) -> None:
        self._default = rm_type
        self._means = means
        self._made: dict[str, GroupRewardFn] = {rm_type: GroupMixture(parts_of(rm_type), means)}

    async def __call__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Reward]:
        wish = wish_of(prompt, self._default)
        if wish not in self._made:
            self._made[wish] = _made(prompt, wish, GroupMixture, self._means)
        return await self._made[wish](prompt, trajectories)


class _Each:
    """Scores the attempts that have no reward yet, one by one."""

    def __init__(self, reward: RewardFn) -> None:
        self._reward = reward

    async def __call__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Reward]:
        waiting = [t for t in trajectories if t.reward is None]
        scored = iter(await _all(self._reward(prompt, t) for t in waiting))
        return [next(scored) if t.reward is None else t.reward for t in trajectories]


def wish_of(prompt: Prompt, default: str) -> str:
    """The reward a prompt is scored by; its own name for one is checked here, since no rule has seen it."""
    wish = prompt.metadata.get(OVERRIDE)
    if wish is None or wish == "" or wish == default:
        return default
    try:
        if not isinstance(wish, str):
            raise UsageError(f"metadata['{OVERRIDE}'] is a {type(wish).__name__}, and a reward has a name.")
        check_name(wish.strip())
    except UsageError as error:
        raise DataError(f"Prompt {prompt.id}: {error}") from error
    return wish.strip()


def weighed(parts: Sequence[Part], rewards: Sequence[Reward]) -> Reward:
    """The weighted sum. A single reward keeps its parts as they are."""
    value = sum(part.weight * reward.value for part, reward in zip(parts, rewards, strict=True))
    if len(parts) == 1:
        return Reward(value=value, parts=rewards[0].parts)
    named: dict[str, float] = {}
    for part, reward in zip(parts, rewards, strict=True):
        named[part.name] = reward.value
        named |= {f"{part.name}.{name}": piece for name, piece in reward.parts.items()}
    return Reward(value=value, parts=named)


def _made(prompt: Prompt, wish: str, kind: type[Any], means: Means) -> Any:
    try:
        return kind(parts_of(wish), means)
    except UsageError as error:
        raise DataError(f"Prompt {prompt.id}: {error}") from error


async def _all(waiting: Any) -> list[Any]:
    """All results, side by side; the first error ends the rest and is raised bare."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_awaited(one)) for one in waiting]
    except BaseExceptionGroup as group:
        first = first_cause(group)
        raise first from first.__cause__
    return [task.result() for task in running]


async def _awaited(one: Awaitable[Any]) -> Any:
    return await one
