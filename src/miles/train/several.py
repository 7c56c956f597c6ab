"""Several policies behind one trainer's door: each is trained on its own rows, at its own pace.

batch --+-- rows of the main policy ------------------------------> its step
        +-- rows of another, held until it has ``every`` steps' --> its step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from miles.core.errors import CheckpointError
from miles.core.protocols import Trainer
from miles.core.types import Batch, Sample, StepReport, Version
from miles.core.wire import NOUNS, Codec, WireError

FOLDER = "policies"
"""Where the policies beside the main one have their folders in a checkpoint."""
HELD = "held.rows"


class Versioned(Trainer, Protocol):
    """A trainer that says which version its weights are."""

    @property
    def version(self) -> Version: ...
    def weights(self) -> Mapping[str, Tensor]: ...


@dataclass(slots=True, kw_only=True)
class Learner:
    """A policy's trainer, how many of the run's steps make one of its own, and the rows it waits with."""

    trainer: Versioned
    every: int = 1
    held: list[Sample] = field(default_factory=list)
    groups: int = 0


class SeveralTrainers:
    """Implements the Trainer door over ``learners``, of which ``main`` is trained at every step.

    Between two steps of a policy its weights stay as they are, so that rows it waits with are as fresh as the last. The
    main policy's metrics have their own names, those of another stand under ``policy/<name>/``.
    """

    def __init__(self, learners: Mapping[str, Learner], main: str) -> None:
        assert learners[main].every == 1, "the main policy is trained at every step"
        self._learners, self._main = learners, main

    @property
    def version(self) -> Version:
        return self._learners[self._main].trainer.version

    def weights(self) -> Mapping[str, Tensor]:
        """The main policy's live weights."""
        return self._learners[self._main].trainer.weights()

    async def step(self, batch: Batch) -> StepReport:
        """One step of the run; the report's version is the main policy's."""
        metrics: dict[str, float] = {}
        seconds: dict[str, float] = {}
        for name, learner in self._learners.items():
            due = self._due(name, learner, batch)
            if due is None:
                continue
            stale = float(due.staleness(learner.trainer.version))
            report = await learner.trainer.step(due)
            if name == self._main:
                metrics |= report.metrics
                seconds |= report.seconds
                continue
            measured = {**report.metrics, "staleness": stale, "version": float(report.version.number)}
            metrics |= {policy_metric(name, metric): value for metric, value in measured.items()}
            seconds |= {f"{name}.{part}": value for part, value in report.seconds.items()}
        return StepReport(version=self.version, metrics=metrics, seconds=seconds)

    async def save(self, folder: Path) -> None:
        await self._learners[self._main].trainer.save(folder)
        for name, learner in self._others():
            own = folder / FOLDER / name
            own.mkdir(parents=True)
            await learner.trainer.save(own)
            if learner.every > 1:
                (own / HELD).write_bytes(Codec(NOUNS).pack("held", [learner.groups, learner.held]))

    async def load(self, folder: Path) -> None:
        for name, _ in self._others():
            if not (folder / FOLDER / name).is_dir():
                raise CheckpointError(
                    f"{folder} has no policy {name}, so it cannot be gone on from with --policies that name one; start "
                    "from its weights with --hf-checkpoint."
                )
        await self._learners[self._main].trainer.load(folder)
        for name, learner in self._others():
            own = folder / FOLDER / name
            await learner.trainer.load(own)
            if learner.every > 1:
                learner.groups, learner.held = _read(own / HELD)

    async def sleep(self) -> None:
        for learner in self._learners.values():
            await learner.trainer.sleep()

    async def wake(self) -> None:
        for learner in self._learners.values():
            await learner.trainer.wake()

    def _others(self) -> list[tuple[str, Learner]]:
        return [(name, learner) for name, learner in self._learners.items() if name != self._main]

    def _due(self, name: str, learner: Learner, batch: Batch) -> Batch | None:
        """The policy's own batch, once it has waited for enough steps' rows."""
        learner.held += _of(name, batch.samples)
        learner.groups += batch.num_groups
        if batch.step % learner.every:
            return None
        now = learner.trainer.version.number
        probe = tuple(row for row in _of(name, batch.probe) if row.oldest == now)
        due = Batch(step=batch.step, samples=tuple(learner.held), num_groups=learner.groups, probe=probe)
        learner.held, learner.groups = [], 0
        return due


def policy_metric(policy: str, metric: str) -> str:
    """What a metric of a policy beside the main one is called."""
    return f"policy/{policy}/{metric}"


def _of(policy: str, samples: Sequence[Sample]) -> list[Sample]:
    return [row for row in samples if row.policy == policy]


def _read(path: Path) -> tuple[int, list[Sample]]:
    try:
        _, (groups, held) = Codec(NOUNS).unpack(path.read_bytes())
    except (OSError, WireError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use an older checkpoint.") from error
    return groups, list(held)
