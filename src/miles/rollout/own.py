"""A user's own source, rollout and evaluation, held to what the other planes count on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.core.errors import PlugError
from miles.core.plugs import RolloutFn, SampleFilter
from miles.core.protocols import Credit, Engine, Rollout, Sampling, Source
from miles.core.types import Group, Prompt, Sample
from miles.rollout.seeds import SeedOf


class OwnSource:
    """A core.protocols.Source over the user's, out of ``prompts`` that were read."""

    def __init__(self, inner: Source, prompts: Sequence[Prompt]) -> None:
        self._inner, self._read = inner, len(prompts)

    def __len__(self) -> int:
        """The prompts it was made from; what it deals out may be more or fewer."""
        return self._read

    def next(self) -> Prompt:
        prompt = self._inner.next()
        if not isinstance(prompt, Prompt):
            raise PlugError(
                f"The data source gave a {type(prompt).__name__}; its next() gives a miles.core.types.Prompt."
            )
        return prompt

    def state(self) -> dict[str, Any]:
        return dict(self._inner.state())

    def load(self, state: Mapping[str, Any]) -> None:
        self._inner.load(state)


class _InOrder:
    """Prompts in their order, again and again."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts, self._drawn = prompts, 0

    def next(self) -> Prompt:
        epoch, row = divmod(self._drawn, len(self._prompts))
        self._drawn += 1
        return replace(self._prompts[row], epoch=epoch)

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        self._drawn = state["drawn"]


def in_order(prompts: Sequence[Prompt]) -> Source:
    """A core.plugs.DataSource: the prompts as they were read, again and again."""
    if not prompts:
        raise PlugError(
            "--data-source-path in_order reads the prompts of --prompt-data, and there are none; name some."
        )
    return _InOrder(prompts)


class OwnRollout:
    """A core.protocols.Rollout by the user's function."""

    def __init__(
        self, make: RolloutFn, usual: Rollout, *, engine: Engine, sampling: Sampling, attempts: int, seed_of: SeedOf
    ) -> None:
        self._make, self._usual, self._engine = make, usual, engine
        self._sampling, self._attempts, self._seed_of = sampling, attempts, seed_of

    async def produce(self, prompt: Prompt) -> Group:
        sampling = replace(self._sampling, seed=self._seed_of(prompt, 0))
        group = await self._make(prompt, self._engine, sampling, self._attempts, self._usual)
        if not isinstance(group, Group):
            raise PlugError(f"The rollout function gave a {type(group).__name__}; it gives a miles.core.types.Group.")
        if len(group.trajectories) != self._attempts:
            raise PlugError(
                f"The rollout function made {len(group.trajectories)} attempts at prompt {prompt.id}, and a batch is "
                f"of --n-samples-per-prompt {self._attempts}; make as many."
            )
        return _scored(_numbered(group), "rollout function")


async def standard(prompt: Prompt, engine: Engine, sampling: Sampling, attempts: int, usual: Rollout) -> Group:
    """A core.plugs.RolloutFn that changes nothing."""
    return await usual.produce(prompt)


async def standard_evaluation(
    name: str, prompts: Sequence[Prompt], engine: Engine, sampling: Sampling, usual: Rollout
) -> list[Group]:
    """A core.plugs.EvalFn that answers one prompt after the other, as in training."""
    return [await usual.produce(prompt) for prompt in prompts]


def answered(name: str, prompts: Sequence[Prompt], groups: Sequence[Group]) -> list[Group]:
    """What the user's function made of a held-out set, if it is of every prompt and scored."""
    if [group.prompt.id for group in groups] != [prompt.id for prompt in prompts]:
        raise PlugError(
            f"The evaluation function gave {len(groups)} groups for the {len(prompts)} prompts of {name}; it gives one "
            "for each, in their order."
        )
    return [_scored(group, "evaluation function") for group in groups]


def _numbered(group: Group) -> Group:
    return replace(group, trajectories=tuple(replace(t, index=i) for i, t in enumerate(group.trajectories)))


def _scored(group: Group, whose: str) -> Group:
    for trajectory in group.trajectories:
        if trajectory.reward is None or not math.isfinite(trajectory.reward.value):
            raise PlugError(
                f"The {whose} left attempt {trajectory.index} at prompt {group.prompt.id} without a finite reward; "
                "score it, or let usual.produce do so."
            )
    return group


class Chosen:
    """A core.protocols.Credit whose rows teach only what ``keep`` lets them."""

    def __init__(self, credit: Credit, keep: SampleFilter) -> None:
        self._credit, self._keep = credit, keep

    def __call__(self, group: Group) -> Sequence[Sample]:
        kept = list(self._keep(group))
        if len(kept) != len(group.trajectories):
            raise PlugError(
                f"The sample filter gave {len(kept)} answers for the {len(group.trajectories)} attempts at prompt "
                f"{group.prompt.id}; it gives one for each, in their order."
            )
        left_out = {t.index for t, keep in zip(group.trajectories, kept, strict=True) if not keep}
        return list(self._rows(group, left_out))

    def _rows(self, group: Group, left_out: set[int]) -> Iterator[Sample]:
        for row in self._credit(group):
            # The row stays, so that a batch has as many trajectories as the configuration says.
            yield replace(row, mask=row.mask & False) if row.trajectory in left_out else row
