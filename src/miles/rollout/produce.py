"""One prompt in, one scored group out: the rollout plane's whole job (see core.protocols.Rollout).

Attempts run side by side, and each is scored as soon as it ends::

    attempt 0   generate ----------> reward -->|
    attempt 1   generate --> reward ---------->|  group
    attempt 2   generate ---------------> ... >|  (a group reward instead waits for all attempts)

A reward that raises or does not come in time costs its attempt the score, and not the run its life.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from miles.core.aloud import generate_aloud
from miles.core.errors import MilesError, PlugError, first_cause
from miles.core.protocols import Completion, Engine, Generate, GroupRewardFn, Hear, Resumes, RewardFn, Sampling
from miles.core.types import Group, Prompt, Reward, Status, Tokens, Trajectory
from miles.rollout.reward.score import GradingError
from miles.rollout.seeds import SeedOf
from miles.rollout.throttle import Throttle

_UNSCORED = (Status.ABORTED, Status.FAILED)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why there is no reward."""

    reason: str


class Door:
    """The engine's door (see core.protocols.Engine); while it is ``shut`` requests end at once, with nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.shut = False

    async def generate(self, tokens: Tokens, sampling: Sampling) -> Completion:
        if self.shut:
            return Completion(spans=(), status=Status.ABORTED, reason="abort")
        return await self._engine.generate(tokens, sampling)

    async def generate_aloud(self, tokens: Tokens, sampling: Sampling, hear: Hear) -> Completion:
        if self.shut:
            return await self.generate(tokens, sampling)
        return await generate_aloud(self._engine, tokens, sampling, hear)


class Producer:
    """Makes ``attempts`` attempts at a prompt and scores them, by ``reward`` or all together by ``group_reward``.

    A ``generate`` that raises ends its siblings, and its error is raised. An attempt that was aborted or
    failed earns 0 unseen, and so does one whose reward raises or takes more than ``reward_seconds``;
    ``metadata["unscored"]`` says why. Errors meant for the user (MilesError) are raised all the same, and so
    is a reward's when it is the last of ``most_unscored`` failures in a row, for then it is not the attempt.
    With neither reward, ``generate`` must score. ``reward_key`` names the part of the reward to train on.

    ``abort`` ends the engine's requests, for ``cut``. With ``renew`` an attempt that was aborted by anyone else goes
    on. ``throttle`` bounds how many attempts are under way at once.
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
        reward_seconds: float = 300.0,
        most_unscored: int = 128,
        abort: Callable[[], Awaitable[object]] | None = None,
        throttle: Throttle | None = None,
        renew: bool = False,
    ) -> None:
        assert reward is None or group_reward is None, "an attempt is scored alone or with its group"
        self._engine = Door(engine)
        self._abort, self._throttle, self._renew = abort, throttle, renew
        self._generate = generate
        self._sampling = sampling
        self._attempts = attempts
        self._seed_of = seed_of
        self._reward = reward
        self._group_reward = group_reward
        self._reward_key = reward_key
        self._reward_seconds = reward_seconds
        self._most_unscored = most_unscored
        self._unscored_in_a_row = 0

    async def produce(self, prompt: Prompt) -> Group:
        return await self._group(prompt, [None] * self._attempts)

    async def cut(self) -> None:
        """End every attempt where it is: a request under way with what it has, and others before they begin."""
        assert self._abort is not None, "nobody said how requests are ended"
        self._engine.shut = True
        await self._abort()

    async def go_on(self, begun: Group) -> Group:
        """End the attempts of a group that were cut. Those that cannot be taken up in the middle start anew."""
        return await self._group(begun.prompt, begun.trajectories)

    async def _group(self, prompt: Prompt, begun: Sequence[Trajectory | None]) -> Group:
        self._engine.shut = False
        try:
            async with (
                self._throttle.group(len(begun)) if self._throttle else nullcontext(),
                asyncio.TaskGroup() as tasks,
            ):
                running = [tasks.create_task(self._attempt(prompt, i, past)) for i, past in enumerate(begun)]
        except BaseExceptionGroup as group:
            first = first_cause(group)
            raise first from first.__cause__
        trajectories = [task.result() for task in running]
        if self._engine.shut and any(t.status is Status.ABORTED for t in trajectories):
            return Group(prompt=prompt, trajectories=tuple(trajectories))
        if self._group_reward is not None:
            trajectories = await self._score_together(self._group_reward, prompt, trajectories)
        return Group(prompt=prompt, trajectories=tuple(trajectories))

    async def _attempt(self, prompt: Prompt, index: int, past: Trajectory | None) -> Trajectory:
        if past is not None and past.status is not Status.ABORTED:
            return past
        sampling = replace(self._sampling, seed=self._seed_of(prompt, index))
        trajectory = replace(await self._written(prompt, sampling, past), index=index)
        if self._engine.shut and trajectory.status is Status.ABORTED:
            return trajectory  # not scored: it may go on
        if trajectory.reward is not None:  # an environment may score as it goes
            return replace(trajectory, reward=self._checked(prompt, trajectory.reward))
        if trajectory.status in _UNSCORED:
            return _unscored(trajectory, str(trajectory.status))
        if self._group_reward is not None:
            return trajectory
        if self._reward is None:
            raise PlugError(
                f"Nothing scores the attempts at prompt {prompt.id}; choose a reward with --rm-type or "
                "--custom-rm-path, or set the reward in the generate function."
            )
        scored = await self._in_time(prompt, 1, self._reward(prompt, trajectory))
        if isinstance(scored, _Failure):
            return _unscored(trajectory, scored.reason)
        return replace(trajectory, reward=self._checked(prompt, scored))

    async def _written(self, prompt: Prompt, sampling: Sampling, past: Trajectory | None) -> Trajectory:
        """An attempt, from its beginning or from where it was cut."""
        while True:
            async with self._throttle.sample() if self._throttle else nullcontext():
                if isinstance(self._generate, Resumes) and past is not None and past.response_length:
                    past = await self._generate.resume(prompt, past, self._engine, sampling)
                else:
                    past = await self._generate(prompt, self._engine, sampling)
            # New weights may end requests under way; what was asked is still wanted.
            if not (self._renew and past.status is Status.ABORTED and not self._engine.shut):
                return past

    async def _score_together(
        self, group_reward: GroupRewardFn, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> list[Trajectory]:
        waiting = sum(t.reward is None for t in trajectories)
        rewards = await self._in_time(prompt, waiting, group_reward(prompt, trajectories))
        if isinstance(rewards, _Failure):
            return [t if t.reward is not None else _unscored(t, rewards.reason) for t in trajectories]
        if len(rewards) != len(trajectories):
            raise PlugError(
                f"The group reward gave {len(rewards)} rewards for the {len(trajectories)} attempts at prompt "
                f"{prompt.id}; it must give one for each, in their order."
            )
        return [
            t if t.reward is not None else replace(t, reward=self._checked(prompt, reward))
            for t, reward in zip(trajectories, rewards, strict=True)
        ]

    async def _in_time(self, prompt: Prompt, attempts: int, scoring: Awaitable[T]) -> T | _Failure:
        """What a reward gives, or why it gave nothing."""
        limit = asyncio.timeout(self._reward_seconds)
        try:
            async with limit:
                scored = await scoring
        except MilesError:
            raise
        except Exception as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            said = str(error) if isinstance(error, GradingError) else f"{type(error).__name__}: {error}"
            reason = f"no reward within {self._reward_seconds:g} s" if late else said
            self._unscored_in_a_row += attempts
            if self._unscored_in_a_row >= self._most_unscored:
                raise PlugError(
                    f"The reward failed for {self._unscored_in_a_row} attempts in a row, the last at prompt "
                    f"{prompt.id} ({reason}); mend it, or allow more with --max-unscored-attempts."
                ) from error
            return _Failure(reason)
        self._unscored_in_a_row = 0
        return scored

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


def _unscored(trajectory: Trajectory, reason: str) -> Trajectory:
    metadata = {**trajectory.metadata, "unscored": reason}
    return replace(trajectory, reward=Reward(value=0.0), metadata=metadata)
