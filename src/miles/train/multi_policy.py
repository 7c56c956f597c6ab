"""Multi-policy trainer: each policy is trained on its own samples, at its own interval.

batch --+-- samples of the main policy ---------------------------------> its step
        +-- samples of another, collected over ``every`` steps ---------> its step

The steps of policies that have ranks of their own run at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from miles.core.errors import CheckpointError
from miles.core.protocols import Trainer
from miles.core.serialization import CORE_TYPES, Codec, SerializationError
from miles.core.types import Batch, Sample, StepReport, TimeSpan, TokenStats, Version

_T = TypeVar("_T")

FOLDER = "policies"
"""Checkpoint subfolder of the policies other than the main one."""
PENDING_FILE = "held.rows"


class VersionedTrainer(Trainer, Protocol):
    """A trainer with versioned weights."""

    @property
    def version(self) -> Version: ...
    def weights(self) -> Mapping[str, Tensor]: ...


@dataclass(slots=True, kw_only=True)
class PolicyLearner:
    """A policy's trainer, the number of run steps per training step, and the samples collected so far."""

    trainer: VersionedTrainer
    every: int = 1
    pending: list[Sample] = field(default_factory=list)
    groups: int = 0


class MultiPolicyTrainer:
    """Implements the Trainer protocol over ``learners``, of which ``main`` is trained at every step.

    Between two steps of a policy its weights do not change, so collected samples do not get staler. The
    main policy's metrics keep their names, those of others are under ``policy/<name>/``.
    """

    def __init__(self, learners: Mapping[str, PolicyLearner], main: str) -> None:
        assert learners[main].every == 1, "the main policy is trained at every step"
        self._learners = learners
        self._main = main

    @property
    def version(self) -> Version:
        return self._learners[self._main].trainer.version

    def weights(self) -> Mapping[str, Tensor]:
        """Return the main policy's live weights."""
        return self._learners[self._main].trainer.weights()

    async def step(self, batch: Batch) -> StepReport:
        """Run one step; the report's version is the main policy's."""
        metrics: dict[str, float] = {}
        seconds: dict[str, float] = {}
        spans: list[TimeSpan] = []
        stats: list[TokenStats] = []
        due = {name: self._take_due_batch(name, learner, batch) for name, learner in self._learners.items()}
        batches = {name: each for name, each in due.items() if each is not None}
        versions = {name: self._learners[name].trainer.version for name in batches}
        reports = await _gather([self._learners[name].trainer.step(each) for name, each in batches.items()])
        for (name, each), report in zip(batches.items(), reports, strict=True):
            learner, staleness = self._learners[name], float(each.staleness(versions[name]))
            spans += [replace(span, lane=f"{name} {span.lane}".strip()) for span in report.spans]
            if report.token_stats is not None and learner.every == 1:
                stats.append(_number_in_batch(report.token_stats, name, batch))
            if name == self._main:
                metrics |= report.metrics
                seconds |= report.seconds
                continue
            policy_metrics = {**report.metrics, "staleness": staleness, "version": float(report.version.number)}
            metrics |= {policy_metric(name, metric): value for metric, value in policy_metrics.items()}
            seconds |= {f"{name}.{part}": value for part, value in report.seconds.items()}
        token_stats = TokenStats.merge(stats) if stats else None
        return StepReport(
            version=self.version, metrics=metrics, seconds=seconds, spans=tuple(spans), token_stats=token_stats
        )

    async def save(self, folder: Path) -> None:
        await self._learners[self._main].trainer.save(folder)
        for name, learner in self._others():
            subfolder = folder / FOLDER / name
            subfolder.mkdir(parents=True)
            await learner.trainer.save(subfolder)
            if learner.every > 1:
                (subfolder / PENDING_FILE).write_bytes(
                    Codec(CORE_TYPES).pack("held", [learner.groups, learner.pending])
                )

    async def load(self, folder: Path) -> None:
        for name, _ in self._others():
            if not (folder / FOLDER / name).is_dir():
                raise CheckpointError(
                    f"{folder} has no policy {name}, so a run with that policy in --policies cannot resume from it; "
                    "start from its weights with --hf-checkpoint."
                )
        await self._learners[self._main].trainer.load(folder)
        for name, learner in self._others():
            subfolder = folder / FOLDER / name
            await learner.trainer.load(subfolder)
            if learner.every > 1:
                learner.groups, learner.pending = _read_pending(subfolder / PENDING_FILE)

    async def sleep(self) -> None:
        await _gather([learner.trainer.sleep() for learner in self._learners.values()])

    async def wake(self) -> None:
        await _gather([learner.trainer.wake() for learner in self._learners.values()])

    def _others(self) -> list[tuple[str, PolicyLearner]]:
        return [(name, learner) for name, learner in self._learners.items() if name != self._main]

    def _take_due_batch(self, name: str, learner: PolicyLearner, batch: Batch) -> Batch | None:
        """Collect the policy's samples; returns its batch when a training step is due."""
        learner.pending += _select_policy(name, batch.samples)
        learner.groups += batch.num_groups
        if batch.step % learner.every:
            return None
        version = learner.trainer.version.number
        probe = tuple(s for s in _select_policy(name, batch.probe) if s.oldest_version == version)
        due = Batch(step=batch.step, samples=tuple(learner.pending), num_groups=learner.groups, probe=probe)
        learner.pending, learner.groups = [], 0
        return due


async def _gather(running: Sequence[Awaitable[_T]]) -> list[_T]:
    """Wait for all of them, also where one fails; raises the error of the first that did."""
    results = await asyncio.gather(*running, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def policy_metric(policy: str, metric: str) -> str:
    """Return the metric name of a policy other than the main one."""
    return f"policy/{policy}/{metric}"


def _select_policy(policy: str, samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.policy == policy]


def _number_in_batch(stats: TokenStats, policy: str, batch: Batch) -> TokenStats:
    """Return the stats of a policy's samples with their places in the batch of all policies."""
    places = np.array([i for i, sample in enumerate(batch.samples) if sample.policy == policy], np.int32)
    return replace(stats, sample_indices=places[stats.sample_indices])


def _read_pending(path: Path) -> tuple[int, list[Sample]]:
    try:
        _, (groups, pending) = Codec(CORE_TYPES).unpack(path.read_bytes())
    except (OSError, SerializationError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use an older checkpoint.") from error
    return groups, list(pending)
