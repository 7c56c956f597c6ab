"""Wrappers of user-defined sources, rollouts, evaluations and sample filters that validate their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.core.errors import HookError
from miles.core.hooks import RolloutFn, SampleFilter
from miles.core.protocols import AdvantageEstimator, Engine, Rollout, SamplingParams, Source
from miles.core.types import Group, Prompt, Sample
from miles.hooks.guard import guard_hook
from miles.rollout.reward.types import check_reward
from miles.rollout.seeds import SeedFn


class CustomSource:
    """A core.protocols.Source over the user's, built from ``prompts``."""

    def __init__(self, inner: Source, prompts: Sequence[Prompt]) -> None:
        self._next, self._state, self._load = (
            guard_hook(method, "The data source", is_async=False) for method in (inner.next, inner.state, inner.load)
        )
        self._num_prompts = len(prompts)

    def __len__(self) -> int:
        """The number of prompts it was built from; it may return more or fewer."""
        return self._num_prompts

    def next(self) -> Prompt:
        prompt = self._next()
        if not isinstance(prompt, Prompt):
            raise HookError(
                f"The data source gave a {type(prompt).__name__}; its next() gives a miles.core.types.Prompt."
            )
        return prompt

    def state(self) -> dict[str, Any]:
        return dict(self._state())

    def load(self, state: Mapping[str, Any]) -> None:
        self._load(state)


class _SequentialSource:
    """Returns prompts in order, over and over."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._count = 0

    def next(self) -> Prompt:
        epoch, sample = divmod(self._count, len(self._prompts))
        self._count += 1
        return replace(self._prompts[sample], epoch=epoch)

    def state(self) -> dict[str, Any]:
        return {"drawn": self._count}

    def load(self, state: Mapping[str, Any]) -> None:
        self._count = state["drawn"]


def in_order(prompts: Sequence[Prompt]) -> Source:
    """A core.hooks.DataSource: the prompts in file order, over and over."""
    if not prompts:
        raise HookError(
            "--data-source-path in_order reads the prompts of --prompt-data, and there are none; name some."
        )
    return _SequentialSource(prompts)


class CustomRollout:
    """A core.protocols.Rollout that calls the user's function."""

    def __init__(
        self,
        make_group: RolloutFn,
        default_rollout: Rollout,
        *,
        engine: Engine,
        sampling: SamplingParams,
        group_size: int,
        seed_fn: SeedFn,
    ) -> None:
        self._make_group = make_group
        self._default_rollout = default_rollout
        self._engine = engine
        self._sampling = sampling
        self._group_size = group_size
        self._seed_fn = seed_fn

    async def produce(self, prompt: Prompt) -> Group:
        sampling = replace(self._sampling, seed=self._seed_fn(prompt, 0))
        group = await self._make_group(prompt, self._engine, sampling, self._group_size, self._default_rollout)
        if not isinstance(group, Group):
            raise HookError(f"The rollout function gave a {type(group).__name__}; it gives a miles.core.types.Group.")
        if len(group.trajectories) != self._group_size:
            raise HookError(
                f"The rollout function made {len(group.trajectories)} trajectories for prompt {prompt.id}, and "
                f"--n-samples-per-prompt is {self._group_size}; make as many."
            )
        return _check_rewards(_set_indices(group), "rollout function")


async def standard(
    prompt: Prompt, engine: Engine, sampling: SamplingParams, num_samples: int, default_rollout: Rollout
) -> Group:
    """A core.hooks.RolloutFn that changes nothing."""
    return await default_rollout.produce(prompt)


async def standard_evaluation(
    name: str, prompts: Sequence[Prompt], engine: Engine, sampling: SamplingParams, default_rollout: Rollout
) -> list[Group]:
    """A core.hooks.EvalFn that generates one group after the other, as in training."""
    return [await default_rollout.produce(prompt) for prompt in prompts]


def check_eval_groups(name: str, prompts: Sequence[Prompt], groups: Sequence[Group]) -> list[Group]:
    """Check that the user's function returned a scored group for every prompt of a held-out set."""
    if [group.prompt.id for group in groups] != [prompt.id for prompt in prompts]:
        raise HookError(
            f"The evaluation function gave {len(groups)} groups for the {len(prompts)} prompts of {name}; it gives one "
            "for each, in their order."
        )
    return [_check_rewards(group, "evaluation function") for group in groups]


def _set_indices(group: Group) -> Group:
    return replace(group, trajectories=tuple(replace(t, index=i) for i, t in enumerate(group.trajectories)))


def _check_rewards(group: Group, function_name: str) -> Group:
    for trajectory in group.trajectories:
        if trajectory.reward is None:
            raise HookError(
                f"The {function_name} left trajectory {trajectory.index} of prompt {group.prompt.id} without a finite "
                "reward; score it, or call default_rollout.produce."
            )
        check_reward(trajectory.reward, source=f"the {function_name}", prompt=group.prompt)
    return group


class FilteredAdvantages:
    """A core.protocols.AdvantageEstimator whose samples are masked where ``keep`` rejects their trajectory."""

    def __init__(self, estimator: AdvantageEstimator, keep: SampleFilter) -> None:
        self._estimator = estimator
        self._keep = keep

    def __call__(self, group: Group) -> Sequence[Sample]:
        kept = list(self._keep(group))
        if len(kept) != len(group.trajectories):
            raise HookError(
                f"The sample filter returned {len(kept)} values for the {len(group.trajectories)} trajectories of "
                f"prompt {group.prompt.id}; it returns one for each, in order."
            )
        rejected = {t.index for t, keep in zip(group.trajectories, kept, strict=True) if not keep}
        return list(self._masked_samples(group, rejected))

    def _masked_samples(self, group: Group, rejected: set[int]) -> Iterator[Sample]:
        for sample in self._estimator(group):
            # The sample stays, so that a batch has as many trajectories as configured.
            yield replace(sample, mask=sample.mask & False) if sample.trajectory in rejected else sample
