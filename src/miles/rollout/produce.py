"""One prompt in, one scored group out: the rollout plane's whole job (see core.protocols.Rollout).

Attempts run side by side, and each is scored as soon as it ends::

    attempt 0   generate ----------> reward -->|
    attempt 1   generate --> reward ---------->|  group
    attempt 2   generate ---------------> ... >|  (a group reward instead waits for all attempts)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from miles.core.errors import PlugError, first_cause
from miles.core.protocols import Engine, Generate, GroupRewardFn, RewardFn, Sampling
from miles.core.types import Group, Prompt, Reward, Status, Trajectory
from miles.rollout.seeds import SeedOf

_UNSCORED = (Status.ABORTED, Status.FAILED)


class Producer:
    """Makes ``attempts`` attempts at a prompt and scores them, by ``reward`` or all together by ``group_reward``.

    An attempt that fails ends its siblings, and its error is raised. An attempt that was aborted or
    failed earns 0 unseen, and says so in ``metadata["unscored"]``. With neither reward, ``generate``
    must score. ``reward_key`` names the part of the reward to train on.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        generate: Generate,
        sampling: Sampling,
        attempts: int,
        seed_of: SeedOf,
        reward: RewardFn | None = None,
        group_reward: GroupRewardFn | None = None,
        reward_key: str | None = None,
    ) -> None:
        assert reward is None or group_reward is None, "an attempt is scored alone or with its group"
        self._engine = engine
        self._generate = generate
        self._sampling = sampling
        self._attempts = attempts
        self._seed_of = seed_of
        self._reward = reward
        self._group_reward = group_reward
        self._reward_key = reward_key

    async def produce(self, prompt: Prompt) -> Group:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._attempt(prompt, i)) for i in range(self._attempts)]
        except BaseExceptionGroup as group:
            first = first_cause(group)
            raise first from first.__cause__
        trajectories = [task.result() for task in running]
        if self._group_reward is not None:
            trajectories = await self._score_together(self._group_reward, prompt, trajectories)
        return Group(prompt=prompt, trajectories=tuple(trajectories))

    async def _attempt(self, prompt: Prompt, index: int) -> Trajectory:
        sampling = replace(self._sampling, seed=self._seed_of(prompt, index))
        trajectory = replace(await self._generate(prompt, self._engine, sampling), index=index)
        if trajectory.reward is not None:  # an environment may score as it goes
            return replace(trajectory, reward=self._checked(prompt, trajectory.reward))
        if trajectory.status in _UNSCORED:
            unscored = {**trajectory.metadata, "unscored": str(trajectory.status)}
            return replace(trajectory, reward=Reward(value=0.0), metadata=unscored)
        if self._group_reward is not None:
            return trajectory
        if self._reward is None:
            raise PlugError(
                f"Nothing scores the attempts at prompt {prompt.id}; choose a reward with --rm-type or "
                "--custom-rm-path, or set the reward in the generate function."
            )
        return replace(trajectory, reward=self._checked(prompt, await self._reward(prompt, trajectory)))

    async def _score_together(
        self, group_reward: GroupRewardFn, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> list[Trajectory]:
        rewards = await group_reward(prompt, trajectories)
        if len(rewards) != len(trajectories):
            raise PlugError(
                f"The group reward gave {len(rewards)} rewards for the {len(trajectories)} attempts at prompt "
                f"{prompt.id}; it must give one for each, in their order."
            )
        return [
            t if t.reward is not None else replace(t, reward=self._checked(prompt, reward))
            for t, reward in zip(trajectories, rewards, strict=True)
        ]

    def _checked(self, prompt: Prompt, reward: Reward) -> Reward:
        if not isinstance(reward, Reward):  # a plug is not type-checked before it runs
            raise PlugError(
                f"The reward of prompt {prompt.id} is a {type(reward).__name__}; "
                "return miles.core.types.Reward(value=...)."
            )
        value = reward.value
        if self._reward_key is not None:
            if self._reward_key not in reward.parts:
                parts = ", ".join(reward.parts) or "none"
                raise PlugError(
                    f"The reward of prompt {prompt.id} has no part {self._reward_key} (found: {parts}); "
                    "name one of its parts with --reward-key."
                )
            value = reward.parts[self._reward_key]
        if not math.isfinite(value):
            raise PlugError(f"The reward of prompt {prompt.id} is {value}; a reward must be a finite number.")
        return Reward(value=float(value), parts=reward.parts)
