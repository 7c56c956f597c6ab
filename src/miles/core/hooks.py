"""Protocols of user hooks at the edges of the planes (see docs/hooks.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from miles.core.protocols import Engine, FilterResult, Rollout, SamplingParams, Source
from miles.core.types import Batch, Floats, Group, Prompt, Version

# -- prompts to groups ----------------------------------------------------------------------


class DataSource(Protocol):
    """Build the prompt source from the prompts that were read (empty if no data file was given)."""

    def __call__(self, prompts: Sequence[Prompt]) -> Source: ...


class RolloutFn(Protocol):
    """Generate and score the group of a prompt: ``num_samples`` trajectories.

    ``sampling`` has the prompt's own seed; ``default_rollout`` is the built-in implementation.
    """

    async def __call__(
        self, prompt: Prompt, engine: Engine, sampling: SamplingParams, num_samples: int, default_rollout: Rollout
    ) -> Group: ...


class EvalFn(Protocol):
    """Evaluate one held-out set: a scored group for each prompt, in order.

    ``default_rollout`` is the built-in implementation.
    """

    async def __call__(
        self, name: str, prompts: Sequence[Prompt], engine: Engine, sampling: SamplingParams, default_rollout: Rollout
    ) -> Sequence[Group]: ...


# -- groups to a batch ----------------------------------------------------------------------


class SampleFilter(Protocol):
    """Select the trajectories of a kept group to train on: one boolean per trajectory, in order."""

    def __call__(self, group: Group) -> Sequence[bool]: ...


class DataBuffer(Protocol):
    """Choose the next finished group: its index in ``waiting``, which is in admission order.

    ``version`` is the version of the weights that will be trained on it.
    """

    def __call__(self, waiting: Sequence[Group], version: Version) -> int: ...


class BufferFilter(Protocol):
    """Decide whether a buffered group is still trained on when its turn comes, given the current ``version``."""

    def __call__(self, group: Group, version: Version) -> FilterResult: ...


class AllSamples(Protocol):
    """Observe every group that finished while a step's batch was filled."""

    def __call__(self, step: int, kept: Sequence[Group], dropped: Sequence[Group]) -> None: ...


class Advantage(Protocol):
    """Compute per-token advantages of a batch: one array per sample, of the sample's length."""

    def __call__(self, batch: Batch) -> Sequence[Floats]: ...


class PostProcess(Protocol):
    """Return the batch to train on instead; it must have the same trajectories in the same order."""

    def __call__(self, batch: Batch) -> Batch: ...


# -- logging and saving -----------------------------------------------------------------------


class RolloutLog(Protocol):
    """Return the metrics to log for a step's groups, given the default ones."""

    def __call__(self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> Mapping[str, float]: ...


class EvalLog(Protocol):
    """Return the metrics to log for an evaluation, given the default ones; ``groups`` is by dataset name."""

    def __call__(
        self, step: int, groups: Mapping[str, Sequence[Group]], metrics: Mapping[str, float]
    ) -> Mapping[str, float]: ...


class PostSave(Protocol):
    """Called when the checkpoint in ``folder`` is complete."""

    def __call__(self, step: int, folder: Path) -> None: ...
