"""One plane without the other: training on groups that were written down, and sampling with nothing that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from miles.core.errors import DataError
from miles.core.extras import ROUTED
from miles.core.protocols import Credit, Trainer
from miles.core.types import Batch, StepReport, Version
from miles.launch.config import Config
from miles.models.door import Model
from miles.models.vocabulary import vocabulary_of
from miles.observe.fanout import Keeper
from miles.observe.naming import named
from miles.observe.reread import VOCABULARY
from miles.observe.rollouts import RolloutDump
from miles.rollout.recorded import Recorded, Recording


def dumps_of(config: Config, directory: Path) -> list[Keeper]:
    """Who writes down the groups of a run: into its directory, and where the user says."""
    o, keepers = config.observe, list[Keeper]()
    known = None if config.models.hf_checkpoint is None else vocabulary_of(Path(config.models.hf_checkpoint))
    about = {} if known is None else {VOCABULARY: known}
    if o.save_rollouts:
        # Nobody reads it again, and it may be far more than all else.
        without = () if config.algo.use_rollout_routing_replay else (ROUTED,)
        keepers.append(RolloutDump(directory / "rollouts", about=about, without=without))
    if o.save_debug_rollout_data is not None:
        keepers.append(RolloutDump(_naming(o.save_debug_rollout_data), about=about))
    return keepers


def _naming(word: str) -> Callable[[int], Path]:
    return lambda step: named(word, step)


def recorded_of(config: Config, *, first: int, steps: int) -> Recorded | None:
    """The groups of ``--load-debug-rollout-data`` from step ``first`` on, all of which are there; None without it."""
    word = config.observe.load_debug_rollout_data
    if word is None:
        return None
    recording = Recording(word)
    if (gone := recording.missing(range(first, steps + 1))) is not None:
        there = recording.there()
        held = f"; there are steps {there[0]} to {there[-1]}" if there else ""
        raise DataError(
            f"--load-debug-rollout-data {word} has no step {gone} ({recording.path(gone)}){held}; lower --num-rollout, "
            "or name files that hold every step."
        )
    assert config.models.hf_checkpoint is not None
    return Recorded(
        recording,
        steps=range(first, max(first, steps) + 1),
        groups=config.rollout.rollout_batch_size,
        attempts=config.rollout.n_samples_per_prompt,
        vocabulary=vocabulary_of(Path(config.models.hf_checkpoint)),
        needs=(ROUTED,) if config.algo.use_rollout_routing_replay else (),
    )


class Probed:
    """A trainer that is shown the rows which waited when the groups were written down, as it was then."""

    def __init__(self, trainer: Trainer, recorded: Recorded, credit: Credit) -> None:
        self._trainer, self._recorded, self._credit = trainer, recorded, credit
        self.save, self.load = trainer.save, trainer.load
        self.sleep, self.wake = trainer.sleep, trainer.wake

    async def step(self, batch: Batch) -> StepReport:
        return await self._trainer.step(replace(batch, probe=self._recorded.probe(batch.step, self._credit)))


class Idle:
    """A trainer that trains nothing (see trainer.Trains): the weights stay as they were loaded, and are version 0."""

    def __init__(self, model: Model) -> None:
        self._weights = {name: tensor.detach() for name, tensor in model.named_parameters()}

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    async def step(self, batch: Batch) -> StepReport:
        return StepReport(version=Version())

    async def save(self, folder: Path) -> None:
        """Nothing has changed, so there is nothing to keep but where the run stands."""

    async def load(self, folder: Path) -> None:
        """Nothing was kept."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...
