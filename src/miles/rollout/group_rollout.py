"""Group rollouts: one prompt in, one scored group of trajectories out (see core.protocols.Rollout).

Trajectories run concurrently, and each is scored as soon as it ends::

    trajectory 0   generate ----------> reward -->|
    trajectory 1   generate --> reward ---------->|  group
    trajectory 2   generate ---------------> ... >|  (a group reward instead waits for all trajectories)

A reward that raises or times out leaves its trajectory unscored, and does not end the run: it is not trained on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypedDict, TypeVar

from miles.core.errors import EngineError, HookError, MilesError, describe_error, first_cause
from miles.core.media import Images
from miles.core.protocols import (
    Completion,
    Engine,
    Generate,
    GroupRewardFn,
    OnTokens,
    ResumableGenerate,
    RewardFn,
    SamplingParams,
    stream_or_generate,
)
from miles.core.types import UNSCORED, Group, Prompt, Reward, Status, Tokens, Trajectory
from miles.hooks.guard import HookExit, is_cancelling
from miles.rollout.concurrency import ConcurrencyLimiter, StartedAwaitable
from miles.rollout.duplicate_samples import find_improbable_copies
from miles.rollout.reward.types import GradingError, check_group_rewards, check_reward
from miles.rollout.seeds import SeedFn

_UNSCORED_STATUS = (Status.ABORTED, Status.FAILED)


T = TypeVar("T")


class _Scoring(TypedDict, total=False):
    """Fields of a trajectory that scoring sets."""

    reward: Reward
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why there is no reward."""

    reason: str


class InterruptibleEngine:
    """An engine wrapper (see core.protocols.Engine); while ``interrupted``, requests return at once with no tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.interrupted = False

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images: Images = ()) -> Completion:
        if self.interrupted:
            return Completion(spans=(), status=Status.ABORTED, finish_reason="abort")
        return await self._engine.generate(tokens, sampling, images)

    async def generate_stream(
        self, tokens: Tokens, sampling: SamplingParams, on_tokens: OnTokens, images: Images = ()
    ) -> Completion:
        if self.interrupted:
            return await self.generate(tokens, sampling, images)
        return await stream_or_generate(self._engine, tokens, sampling, on_tokens, images)


class GroupRollout:
    """Generates ``group_size`` trajectories of a prompt and scores them, by ``reward`` or together by ``group_reward``.

    An error of ``generate`` cancels the rest of the group and is raised. A trajectory that was aborted or failed earns
    0, and so does one whose reward raises or takes more than ``reward_seconds``; ``metadata["unscored"]`` says why,
    and ``report`` is called with the first reason. User errors (MilesError) are raised all the same, and so is an error
    at the last of ``max_reward_failures`` consecutive failures, since the trajectory is not to blame then. With neither
    reward, ``generate`` must score, unless groups are returned without ``scores``. ``reward_key`` names the part of the
    reward to train on, ``reward_name`` the reward in error messages.

    ``abort`` cancels the engine's requests, for ``interrupt``, and those of ``role_engines``, which ``generate`` has
    for itself where it runs several policies. With ``retry_aborted`` a trajectory that was aborted by anything else is
    resumed. ``limiter`` bounds the number of running trajectories. Copies among the samples that chance cannot explain
    are an error unless ``allow_duplicates``. ``clock`` reads the seconds since the epoch.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        generate: Generate,
        sampling: SamplingParams,
        group_size: int,
        seed_fn: SeedFn,
        reward: RewardFn | None = None,
        group_reward: GroupRewardFn | None = None,
        reward_key: str | None = None,
        reward_name: str = "the reward function",
        reward_seconds: float = 300.0,
        max_reward_failures: int = 128,
        abort: Callable[[], Awaitable[object]] | None = None,
        role_engines: Sequence[InterruptibleEngine] = (),
        limiter: ConcurrencyLimiter | None = None,
        retry_aborted: bool = False,
        allow_duplicates: bool = False,
        scores: bool = True,
        report: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        assert reward is None or group_reward is None, "a trajectory is scored by itself or with its group"
        self._engine = InterruptibleEngine(engine)
        self._role_engines = tuple(role_engines)
        self._abort = abort
        self._limiter = limiter
        self._retry_aborted = retry_aborted
        self._allow_duplicates = allow_duplicates
        self._scores = scores
        self._generate = generate
        self._sampling = sampling
        # As ``replace`` with a seed, without reading all fields for every trajectory.
        self._sampling_with_seed = partial(
            SamplingParams, **{f.name: getattr(sampling, f.name) for f in fields(sampling) if f.name != "seed"}
        )
        self._group_size = group_size
        self._seed_fn = seed_fn
        self._reward = reward
        self._group_reward = group_reward
        self._reward_key = reward_key
        self._reward_name = reward_name
        self._reward_seconds = reward_seconds
        self._max_reward_failures = max_reward_failures
        self._consecutive_failures = 0
        self._report = report
        self._clock = clock
        self._is_reported = False

    async def produce(self, prompt: Prompt) -> Group:
        return await self._group(prompt, [None] * self._group_size)

    async def score(self, group: Group) -> Group:
        """Score the trajectories of a group that have no reward."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._score_trajectory(group.prompt, t)) for t in group.trajectories]
        except BaseExceptionGroup as errors:
            first = first_cause(errors)
            raise first from first.__cause__
        trajectories = [replace(t, **task.result()) for t, task in zip(group.trajectories, running, strict=True)]
        if self._group_reward is not None:
            trajectories = await self._score_together(self._group_reward, group.prompt, trajectories)
        return Group(prompt=group.prompt, trajectories=tuple(trajectories))

    async def interrupt(self) -> None:
        """Interrupt every trajectory: running requests return what they have, and later ones nothing."""
        assert self._abort is not None, "interrupt needs an abort function"
        self._set_interrupted(True)
        await self._abort()

    def _set_interrupted(self, interrupted: bool) -> None:
        for engine in (self._engine, *self._role_engines):
            engine.interrupted = interrupted

    async def resume_group(self, partial: Group) -> Group:
        """Finish the interrupted trajectories of a group. Those that cannot be resumed restart."""
        return await self._group(partial.prompt, partial.trajectories)

    async def _group(self, prompt: Prompt, partial: Sequence[Trajectory | None]) -> Group:
        self._set_interrupted(False)
        try:
            async with (
                self._limiter.group(len(partial)) if self._limiter else nullcontext(),
                asyncio.TaskGroup() as tasks,
            ):
                running = [
                    tasks.create_task(self._run_trajectory(prompt, i, previous)) for i, previous in enumerate(partial)
                ]
        except BaseExceptionGroup as group:
            first = first_cause(group)
            raise first from first.__cause__
        trajectories = [task.result() for task in running]
        if self._engine.interrupted and any(t.status is Status.ABORTED for t in trajectories):
            return Group(prompt=prompt, trajectories=tuple(trajectories))
        if self._group_reward is not None:
            trajectories = await self._score_together(self._group_reward, prompt, trajectories)
        if not self._allow_duplicates and (copies := find_improbable_copies(trajectories, self._sampling)):
            raise EngineError(
                f"Prompt {prompt.id}: {copies}; the engine or the generate function ignores the seed of each sample. "
                "Fix it, or accept copies with --allow-duplicate-samples."
            )
        return Group(prompt=prompt, trajectories=tuple(trajectories))

    async def _run_trajectory(self, prompt: Prompt, index: int, previous: Trajectory | None) -> Trajectory:
        if previous is not None and previous.status is not Status.ABORTED:
            return previous
        sampling = self._sampling_with_seed(seed=self._seed_fn(prompt, index))
        started, earlier = self._clock(), previous.times.get("generate", 0.0) if previous is not None else 0.0
        trajectory = await self._generate_trajectory(prompt, sampling, previous)
        ended = self._clock()
        times = {"started": started - earlier, "generate": ended - started + earlier}
        trajectory = replace(trajectory, index=index, times=times)
        if self._engine.interrupted and trajectory.status is Status.ABORTED:
            return trajectory  # not scored: it may be resumed
        if not self._scores:
            return trajectory
        changes = await self._score_trajectory(prompt, trajectory)
        return replace(trajectory, **changes, times={**times, "grade": self._clock() - ended})

    async def _score_trajectory(self, prompt: Prompt, trajectory: Trajectory) -> _Scoring:
        """What scoring changes of a trajectory."""
        if trajectory.reward is not None:  # scored by its environment
            self._consecutive_failures = 0
            return {"reward": self._check_reward(prompt, trajectory.reward, "the generate function")}
        if trajectory.status in _UNSCORED_STATUS:
            if trajectory.status is Status.FAILED:
                self._count_failure("The generation", prompt, 1, str(trajectory.metadata.get("failure", "failed")))
            return _mark_unscored(trajectory, str(trajectory.status))
        if self._group_reward is not None:
            return {}
        if self._reward is None:
            raise HookError(
                f"Nothing scores the trajectories of prompt {prompt.id}; choose a reward with --rm-type or "
                "--custom-rm-path, or set the reward in the generate function."
            )
        scored = await self._await_reward(prompt, 1, self._reward(prompt, trajectory))
        if isinstance(scored, _Failure):
            return _mark_unscored(trajectory, scored.reason)
        return {"reward": self._check_reward(prompt, scored, self._reward_name)}

    async def _generate_trajectory(
        self, prompt: Prompt, sampling: SamplingParams, previous: Trajectory | None
    ) -> Trajectory:
        """Generate a trajectory from its beginning, or from where it was interrupted."""
        while True:
            if self._limiter is None:
                previous = await self._continue(prompt, sampling, previous)
            else:
                async with self._limiter.sample():
                    previous = await self._continue(prompt, sampling, previous)
            # A weight update may abort running requests, which are still wanted.
            if not (self._retry_aborted and previous.status is Status.ABORTED and not self._engine.interrupted):
                return previous

    def _continue(self, prompt: Prompt, sampling: SamplingParams, previous: Trajectory | None) -> Awaitable[Trajectory]:
        """Resume a trajectory that has tokens, where that is possible; else start it."""
        if previous is not None and previous.response_length and isinstance(self._generate, ResumableGenerate):
            return self._generate.resume(prompt, previous, self._engine, sampling)
        return self._generate(prompt, self._engine, sampling)

    async def _score_together(
        self, group_reward: GroupRewardFn, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> list[Trajectory]:
        waiting, started = sum(t.reward is None for t in trajectories), self._clock()
        rewards = await self._await_reward(prompt, waiting, group_reward(prompt, trajectories))
        grade = self._clock() - started
        trajectories = [replace(t, times={**t.times, "grade": grade}) if t.reward is None else t for t in trajectories]
        if isinstance(rewards, _Failure):
            reason = rewards.reason
            return [t if t.reward is not None else replace(t, **_mark_unscored(t, reason)) for t in trajectories]
        rewards = check_group_rewards(rewards, source=self._reward_name, prompt=prompt, count=len(trajectories))
        return [
            t if t.reward is not None else replace(t, reward=self._check_reward(prompt, reward, self._reward_name))
            for t, reward in zip(trajectories, rewards, strict=True)
        ]

    async def _await_reward(self, prompt: Prompt, count: int, scoring: Awaitable[T]) -> T | _Failure:
        """Await a reward within its time limit; returns the failure where there is none."""
        deadline = asyncio.get_running_loop().time() + self._reward_seconds
        limit: asyncio.Timeout | None = None
        try:
            started = StartedAwaitable(scoring)
            if started.is_done:  # most rewards never wait, and a timer takes longer than they do
                scored = started.result()
            else:
                limit = asyncio.timeout_at(deadline)
                async with limit:
                    scored = await started
        except MilesError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelling():
                raise
            late = isinstance(error, TimeoutError) and limit is not None and limit.expired()
            message = str(error) if isinstance(error, GradingError | HookExit) else describe_error(error)
            reason = f"no reward within {self._reward_seconds:g} s" if late else message
            self._count_failure("The reward", prompt, count, reason, error)
            return _Failure(reason)
        self._consecutive_failures = 0
        return scored

    def _count_failure(
        self, what: str, prompt: Prompt, count: int, reason: str, error: BaseException | None = None
    ) -> None:
        """Count trajectories that failed; raises at the limit."""
        self._consecutive_failures += count
        if self._consecutive_failures >= self._max_reward_failures:
            raise HookError(
                f"{what} failed for {self._consecutive_failures} trajectories in a row, the last at prompt "
                f"{prompt.id} ({reason}); fix it, or allow more with --max-reward-failures."
            ) from error
        if not self._is_reported:
            self._is_reported = True
            self._report(
                f"{what} failed for a trajectory of prompt {prompt.id} ({reason}); it is not trained on. Further "
                f"failures are counted in unscored_ratio, and {self._max_reward_failures} in a row end the run "
                "(--max-reward-failures)."
            )

    def _check_reward(self, prompt: Prompt, reward: Reward, source: str) -> Reward:
        return check_reward(reward, source=source, prompt=prompt, key=self._reward_key)


def _mark_unscored(trajectory: Trajectory, reason: str) -> _Scoring:
    return {"reward": Reward(value=0.0), "metadata": {**trajectory.metadata, UNSCORED: reason}}
