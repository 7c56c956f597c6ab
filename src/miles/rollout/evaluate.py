"""Held-out scores of the policy as it is now (see core.protocols.Evaluate)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import comb
from statistics import fmean

from miles.core.errors import first_cause
from miles.core.plugs import EvalFn
from miles.core.protocols import Engine, Generate, GroupRewardFn, RewardFn, Rollout, Sampling
from miles.core.roles import ROLES, earned, roles_in
from miles.core.types import Group, Prompt, Status
from miles.rollout.own import answered
from miles.rollout.produce import Producer
from miles.rollout.seeds import evaluation_seeds


class Evaluator:
    """Attempts every prompt of every named set, with the same seeds each time; an ``own`` function may do it."""

    def __init__(
        self,
        sets: Mapping[str, Sequence[Prompt]],
        *,
        engine: Engine,
        generate: Generate,
        sampling: Sampling,
        attempts: int,
        seed: int,
        reward: RewardFn | None = None,
        group_reward: GroupRewardFn | None = None,
        reward_key: str | None = None,
        reward_seconds: float = 300.0,
        most_unscored: int = 128,
        log_passrate: bool = False,
        own: EvalFn | None = None,
    ) -> None:
        self._log_passrate = log_passrate
        self._own, self._engine, self._sampling, self._seed = own, engine, sampling, seed
        self._sets = {
            name: (
                tuple(prompts),
                Producer(
                    engine=engine,
                    generate=generate,
                    sampling=sampling,
                    attempts=attempts,
                    seed_of=evaluation_seeds(seed, name),
                    reward=reward,
                    group_reward=group_reward,
                    reward_key=reward_key,
                    reward_seconds=reward_seconds,
                    most_unscored=most_unscored,
                ),
            )
            for name, prompts in sets.items()
        }

    async def __call__(self) -> Mapping[str, float]:
        return self.metrics(await self.groups())

    def metrics(self, groups: Mapping[str, Sequence[Group]]) -> dict[str, float]:
        """The scores of every set, by metric name."""
        metrics: dict[str, float] = {}
        for name, found in groups.items():
            measured = scores(found) | role_scores(found) | (pass_rates(found) if self._log_passrate else {})
            metrics |= {f"eval/{name}/{key}": value for key, value in measured.items()}
        return metrics

    async def groups(self) -> dict[str, list[Group]]:
        """Every group of every set, in the order of their prompts."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = {
                    name: tasks.create_task(self._answer(name, prompts, producer))
                    for name, (prompts, producer) in self._sets.items()
                }
        except BaseExceptionGroup as group:
            first = first_cause(group)
            raise first from first.__cause__
        return {name: task.result() for name, task in running.items()}

    async def _answer(self, name: str, prompts: Sequence[Prompt], usual: Rollout) -> list[Group]:
        if self._own is not None:
            sampling = replace(self._sampling, seed=self._seed)
            return answered(name, prompts, await self._own(name, prompts, self._engine, sampling, usual))
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_produce(usual, prompt)) for prompt in prompts]
        return [task.result() for task in running]


async def _produce(rollout: Rollout, prompt: Prompt) -> Group:
    return await rollout.produce(prompt)


def scores(groups: Sequence[Group]) -> dict[str, float]:
    """Mean reward, mean response length in tokens, and the shares of attempts cut at the limit or left unscored."""
    attempts = [t for group in groups for t in group.trajectories]
    return {
        "reward": fmean(r for group in groups for r in group.rewards),
        "response_length": fmean(t.response_length for t in attempts),
        "truncated": fmean(t.status is Status.TRUNCATED for t in attempts),
        "unscored": fmean("unscored" in t.metadata for t in attempts),
    }


def role_scores(groups: Sequence[Group]) -> dict[str, float]:
    """What each role earned on average where it had a part; nothing where there is only one."""
    attempts = [t for group in groups for t in group.trajectories if ROLES in t.metadata and t.reward is not None]
    return {
        f"reward/{role}": fmean(earned(t.reward, role) for t in attempts if t.reward and role in t.metadata[ROLES])
        for role in roles_in(groups)
    }


def pass_rates(groups: Sequence[Group]) -> dict[str, float]:
    """``pass@k`` for k = 1, 2, 4 ... up to the attempts; an attempt passes with a reward of at least 1."""
    attempts = min(len(group.trajectories) for group in groups)
    rates: dict[str, float] = {}
    k = 1
    while attempts > 1 and k <= attempts:
        passed = (pass_at(k, len(g.rewards), sum(r >= 1.0 for r in g.rewards)) for g in groups)
        rates[f"pass@{k}"] = fmean(passed)
        k *= 2
    return rates


def pass_at(k: int, attempts: int, passed: int) -> float:
    """The chance that ``k`` of the attempts, drawn without replacement, hold one that passed (unbiased pass@k).

    >>> pass_at(1, 4, 1)
    0.25
    """
    return float(1 - Fraction(comb(attempts - passed, k), comb(attempts, k)))
