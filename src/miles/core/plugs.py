"""Doors of a user's own code at the edges of the planes: each is called, and given nouns (see docs/plugs.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from miles.core.protocols import Engine, Rollout, Sampling, Source, Verdict
from miles.core.types import Batch, Floats, Group, Prompt, Version

# -- prompts to groups ----------------------------------------------------------------------


class DataSource(Protocol):
    """Make the source of prompts out of those that were read; there are none where no file was named."""

    def __call__(self, prompts: Sequence[Prompt]) -> Source: ...


class RolloutFn(Protocol):
    """Make the whole group of a prompt: ``attempts`` scored trajectories.

    ``sampling`` has a seed of this prompt's own; ``usual`` makes the group that the run would without this.
    """

    async def __call__(
        self, prompt: Prompt, engine: Engine, sampling: Sampling, attempts: int, usual: Rollout
    ) -> Group: ...


class EvalFn(Protocol):
    """Answer one held-out set: a scored group for each prompt, in their order.

    ``usual`` makes the group that an evaluation would without this.
    """

    async def __call__(
        self, name: str, prompts: Sequence[Prompt], engine: Engine, sampling: Sampling, usual: Rollout
    ) -> Sequence[Group]: ...


# -- groups to a batch ----------------------------------------------------------------------


class SampleFilter(Protocol):
    """Which attempts of a kept group are learned from: one answer an attempt, in their order."""

    def __call__(self, group: Group) -> Sequence[bool]: ...


class DataBuffer(Protocol):
    """Which of the finished groups that wait is taken next: its place among ``waiting``, which come as asked.

    ``version`` is that of the weights which will learn from it.
    """

    def __call__(self, waiting: Sequence[Group], version: Version) -> int: ...


class BufferFilter(Protocol):
    """May a group still be trained on, now that its turn has come? ``version`` is of the weights that would learn."""

    def __call__(self, group: Group, version: Version) -> Verdict: ...


class AllSamples(Protocol):
    """Look at every group that came back while a step's batch was filled."""

    def __call__(self, step: int, kept: Sequence[Group], dropped: Sequence[Group]) -> None: ...


class Advantage(Protocol):
    """What every token of a batch is worth: an array for each sample, as long as it."""

    def __call__(self, batch: Batch) -> Sequence[Floats]: ...


class PostProcess(Protocol):
    """The batch that is trained on in place of this one; of the same trajectories, in their order."""

    def __call__(self, batch: Batch) -> Batch: ...


# -- what is told ---------------------------------------------------------------------------


class RolloutLog(Protocol):
    """The metrics of a step's groups that are logged, given those that would be."""

    def __call__(self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> Mapping[str, float]: ...


class EvalLog(Protocol):
    """The metrics of an evaluation that are logged, given those that would be; ``groups`` go by the set's name."""

    def __call__(
        self, step: int, groups: Mapping[str, Sequence[Group]], metrics: Mapping[str, float]
    ) -> Mapping[str, float]: ...


class PostSave(Protocol):
    """A checkpoint is complete in ``folder``."""

    def __call__(self, step: int, folder: Path) -> None: ...
