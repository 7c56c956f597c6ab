"""Evaluation on held-out prompts: mean reward, response length, pass@k (see core.protocols.Evaluate)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fractions import Fraction
from math import comb
from statistics import fmean, stdev

from miles.core.agents import ROLES, get_role_reward, list_roles
from miles.core.errors import first_cause
from miles.core.hooks import EvalFn
from miles.core.protocols import Engine, Generate, GroupRewardFn, RewardFn, Rollout, SamplingParams
from miles.core.types import EMPTY, Group, Prompt, Status, Trajectory
from miles.rollout.custom import check_eval_groups
from miles.rollout.group_rollout import GroupRollout
from miles.rollout.seeds import make_eval_seed_fn

HELD_OUT_SET: ContextVar[str | None] = ContextVar("held-out set", default=None)
"""The name of the held-out set that a function generates or scores for; None in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """How one held-out set is sampled and scored."""

    generate: Generate
    sampling: SamplingParams
    group_size: int
    reward: RewardFn | None = None
    group_reward: GroupRewardFn | None = None
    reward_key: str | None = None
    reward_name: str = "the reward function"


class Evaluator:
    """Evaluates every prompt of every named set, with the same seeds each time; ``eval_fn`` may replace it.

    ``settings`` are those of sets that have their own.
    """

    def __init__(
        self,
        sets: Mapping[str, Sequence[Prompt]],
        *,
        engine: Engine,
        generate: Generate,
        sampling: SamplingParams,
        group_size: int,
        seed: int,
        reward: RewardFn | None = None,
        group_reward: GroupRewardFn | None = None,
        reward_key: str | None = None,
        reward_name: str = "the reward function",
        reward_seconds: float = 300.0,
        max_reward_failures: int = 128,
        log_passrate: bool = False,
        eval_fn: EvalFn | None = None,
        settings: Mapping[str, EvalSettings] = EMPTY,
    ) -> None:
        self._log_passrate = log_passrate
        self._eval_fn = eval_fn
        self._engine = engine
        self._seed = seed
        default = EvalSettings(
            generate=generate,
            sampling=sampling,
            group_size=group_size,
            reward=reward,
            group_reward=group_reward,
            reward_key=reward_key,
            reward_name=reward_name,
        )
        self._settings = {name: settings.get(name, default) for name in sets}
        self._sets = {
            name: (
                tuple(prompts),
                GroupRollout(
                    engine=engine,
                    seed_fn=make_eval_seed_fn(seed, name),
                    generate=self._settings[name].generate,
                    sampling=self._settings[name].sampling,
                    group_size=self._settings[name].group_size,
                    reward=self._settings[name].reward,
                    group_reward=self._settings[name].group_reward,
                    reward_key=self._settings[name].reward_key,
                    reward_name=self._settings[name].reward_name,
                    reward_seconds=reward_seconds,
                    max_reward_failures=max_reward_failures,
                ),
            )
            for name, prompts in sets.items()
        }

    async def __call__(self) -> Mapping[str, float]:
        return self.metrics(await self.groups())

    def metrics(self, groups: Mapping[str, Sequence[Group]]) -> dict[str, float]:
        """The metrics of every set by name."""
        metrics: dict[str, float] = {}
        for name, set_groups in groups.items():
            set_metrics = (
                compute_scores(set_groups)
                | compute_role_scores(set_groups)
                | (compute_pass_rates(set_groups) if self._log_passrate else {})
            )
            metrics |= {f"eval/{name}/{key}": value for key, value in set_metrics.items()}
        return metrics

    async def groups(self) -> dict[str, list[Group]]:
        """All groups of every set, in the order of their prompts."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = {
                    name: tasks.create_task(self._evaluate_set(name, prompts, rollout))
                    for name, (prompts, rollout) in self._sets.items()
                }
        except BaseExceptionGroup as group:
            first = first_cause(group)
            raise first from first.__cause__
        return {name: task.result() for name, task in running.items()}

    async def _evaluate_set(self, name: str, prompts: Sequence[Prompt], default_rollout: Rollout) -> list[Group]:
        HELD_OUT_SET.set(name)
        if self._eval_fn is not None:
            sampling = replace(self._settings[name].sampling, seed=self._seed)
            return check_eval_groups(
                name, prompts, await self._eval_fn(name, prompts, self._engine, sampling, default_rollout)
            )
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_produce(default_rollout, prompt)) for prompt in prompts]
        return [task.result() for task in running]


def limit_context(generate: Generate, render: Callable[[Prompt], Sized], limit: int) -> Generate:
    """The function with responses that fit, with the prompt, within ``limit`` tokens."""

    async def generate_within(prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory:
        room = min(sampling.max_new_tokens, limit - len(render(prompt)))
        return await generate(prompt, engine, replace(sampling, max_new_tokens=room))

    return generate_within


async def _produce(rollout: Rollout, prompt: Prompt) -> Group:
    return await rollout.produce(prompt)


def compute_scores(groups: Sequence[Group]) -> dict[str, float]:
    """Mean reward with its standard error, mean response length, fractions of truncated and unscored trajectories.

    Trajectories of one prompt are not independent, so the error is that of the mean over prompts; one prompt has none.
    """
    group_size = [t for group in groups for t in group.trajectories]
    means = [fmean(group.rewards) for group in groups]
    return {
        "reward": fmean(r for group in groups for r in group.rewards),
        **({"reward_stderr": stdev(means) / len(means) ** 0.5} if len(means) > 1 else {}),
        "response_length": fmean(t.response_length for t in group_size),
        "truncated": fmean(t.status is Status.TRUNCATED for t in group_size),
        "unscored": fmean("unscored" in t.metadata for t in group_size),
    }


def compute_role_scores(groups: Sequence[Group]) -> dict[str, float]:
    """Mean reward of each role where it took part; empty with a single role."""
    group_size = [t for group in groups for t in group.trajectories if ROLES in t.metadata and t.reward is not None]
    return {
        f"reward/{role}": fmean(
            get_role_reward(t.reward, role) for t in group_size if t.reward and role in t.metadata[ROLES]
        )
        for role in list_roles(groups)
    }


def compute_pass_rates(groups: Sequence[Group]) -> dict[str, float]:
    """``pass@k`` for k = 1, 2, 4 ... up to the group size; a trajectory passes with a reward of at least 1."""
    group_size = min(len(group.trajectories) for group in groups)
    rates: dict[str, float] = {}
    k = 1
    while group_size > 1 and k <= group_size:
        passed = (estimate_pass_at_k(k, len(g.rewards), sum(r >= 1.0 for r in g.rewards)) for g in groups)
        rates[f"pass@{k}"] = fmean(passed)
        k *= 2
    return rates


def estimate_pass_at_k(k: int, group_size: int, passed: int) -> float:
    """Unbiased pass@k: the probability that ``k`` trajectories, sampled without replacement, include one that passed.

    >>> estimate_pass_at_k(1, 4, 1)
    0.25
    """
    return float(1 - Fraction(comb(group_size - passed, k), comb(group_size, k)))
