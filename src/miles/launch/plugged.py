"""The user's own code around the planes: loaded before anything is built, and put around what was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from miles.cluster.local import Run
from miles.core.errors import PlugError
from miles.core.events import BatchTaken, Event, GroupFinished, RunStarted, Saved, StepFinished
from miles.core.plugs import (
    Advantage,
    AllSamples,
    BufferFilter,
    DataBuffer,
    EvalLog,
    PostProcess,
    PostSave,
    RolloutFn,
    RolloutLog,
    SampleFilter,
)
from miles.core.protocols import Engine, Evaluate, Journal, Observer, Rollout, Trainer
from miles.core.types import Batch, Group, Sample, StepReport, Version
from miles.launch.config import Config
from miles.launch.hooks import own
from miles.launch.upstream import upstream_of
from miles.plug import points
from miles.rollout.evaluate import Evaluator
from miles.rollout.own import Chosen, OwnRollout
from miles.rollout.sampling import training_sampling
from miles.rollout.seeds import training_seeds
from miles.schedule.loop import Planes
from miles.schedule.recover import Checkpoints
from miles.sync.post_write import Announced, PostWrite
from miles.train.rows import trajectories_of

_LATER = (
    points.ROLLOUT,
    points.EVALUATE,
    points.DATA_SOURCE,
    points.PROVIDE,
    points.INIT,
    points.BEFORE_LOG_PROBS,
    points.BEFORE_TRAIN_STEP,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What the user brought for the edges of the planes."""

    choose: DataBuffer | None
    still: BufferFilter | None
    samples: SampleFilter | None
    all_samples: AllSamples | None
    advantage: Advantage | None
    post_process: PostProcess | None
    post_write: PostWrite | None
    post_save: PostSave | None
    rollout_log: RolloutLog | None
    eval_log: EvalLog | None

    def around(
        self, planes: Planes, *, weights: Callable[[], Mapping[str, Tensor]], run: Run, recorded: bool
    ) -> Planes:
        """The planes with the user's functions in them. Groups that were ``recorded`` have been chosen among already.

        ``weights`` are the trainer's; ``run`` does what blocks on the side of the engine.
        """
        step = Step()
        hears: list[Observer] = [step]
        planes = self._about_groups(planes, step, hears, recorded=recorded)
        if self.advantage is not None or self.post_process is not None:
            planes = replace(planes, trainer=Prepared(planes.trainer, self.advantage, self.post_process))
        if self.post_write is not None:
            planes = replace(planes, sync=Announced(planes.sync, self.post_write, weights=weights, run=run))
        if self.post_save is not None:
            hears.append(Kept(self.post_save, planes.checkpoints))
        if self.eval_log is not None and isinstance(planes.evaluate, Evaluator):
            planes = replace(planes, evaluate=LoggedEvaluation(planes.evaluate, self.eval_log, step))
        return replace(planes, journal=Hearing(planes.journal, hears))

    def _about_groups(self, planes: Planes, step: Step, hears: list[Observer], *, recorded: bool) -> Planes:
        if self.samples is not None:
            planes = replace(planes, credit=Chosen(planes.credit, self.samples))
        if self.still is not None and not recorded:
            planes = replace(planes, still=self.still)
        if self.choose is not None and not recorded:
            planes = replace(planes, choose=self.choose)
        if self.all_samples is not None:
            hears.append(Collected(self.all_samples))
        if self.rollout_log is not None:
            planes = replace(planes, measure=_logged(planes.measure, self.rollout_log, step))
        return planes


def own_of(config: Config) -> Own:
    """Everything the user named, held against its door; also what is loaded only where it is used."""
    for point in _LATER:
        path: str | None = getattr(config.plug, point.knob)
        if path is not None:
            point.check(path, upstream_of(config))
    return Own(
        choose=own(config, points.DATA_BUFFER),
        still=own(config, points.BUFFER_FILTER),
        samples=own(config, points.SAMPLE_FILTER),
        all_samples=own(config, points.ALL_SAMPLES),
        advantage=own(config, points.ADVANTAGE),
        post_process=own(config, points.POST_PROCESS),
        post_write=own(config, points.POST_WRITE),
        post_save=own(config, points.POST_SAVE),
        rollout_log=own(config, points.ROLLOUT_LOG),
        eval_log=own(config, points.EVAL_LOG),
    )


def own_rollout(config: Config, usual: Rollout, engine: Engine) -> Rollout:
    """The rollout plane by the user's function, if there is one."""
    make: RolloutFn | None = own(config, points.ROLLOUT)
    if make is None:
        return usual
    r = config.rollout
    return OwnRollout(
        make,
        usual,
        engine=engine,
        sampling=training_sampling(r),
        attempts=r.n_samples_per_prompt,
        seed_of=training_seeds(r.rollout_seed),
    )


def logged(config: Config, evaluator: Evaluator) -> Evaluate:
    """An evaluation before any step, with the metrics the user wants of it."""
    log: EvalLog | None = own(config, points.EVAL_LOG)
    return evaluator if log is None else LoggedEvaluation(evaluator, log, Step())


def trackers_of(config: Config) -> list[Observer]:
    """Who is told of everything that happens."""
    tracker: Observer | None = own(config, points.TRACKER)
    return [] if tracker is None else [tracker]


# -- what happens, overheard ----------------------------------------------------------------


class Step:
    """How many steps are done, as the journal is told."""

    def __init__(self) -> None:
        self.done = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted | StepFinished):
            self.done = event.step


class Hearing:
    """A journal that tells others too, once it has written down itself; what they raise ends the run."""

    def __init__(self, journal: Journal, others: Sequence[Observer]) -> None:
        self._journal, self._others = journal, tuple(others)

    def __call__(self, event: Event) -> None:
        self._journal(event)
        for other in self._others:
            other(event)

    def commit(self) -> None:
        self._journal.commit()

    def marks(self) -> Mapping[str, int]:
        return self._journal.marks()


class Collected:
    """Gathers the groups of a step, and shows them when its batch is full."""

    def __init__(self, process: AllSamples) -> None:
        self._process = process
        self._kept: list[Group] = []
        self._dropped: list[Group] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, GroupFinished):
            (self._kept if event.kept else self._dropped).append(event.group)
        elif isinstance(event, BatchTaken):
            kept, dropped, self._kept, self._dropped = self._kept, self._dropped, [], []
            self._process(event.step, kept, dropped)


class Kept:
    """Tells of checkpoints that are complete."""

    def __init__(self, post_save: PostSave, checkpoints: Checkpoints) -> None:
        self._post_save, self._checkpoints = post_save, checkpoints

    def __call__(self, event: Event) -> None:
        if isinstance(event, Saved):
            self._post_save(event.step, Path(self._checkpoints.folder_of(event.name)))


# -- metrics --------------------------------------------------------------------------------

Measure = Callable[[tuple[Group, ...], Version], Mapping[str, float]]


def _logged(measure: Measure, log: RolloutLog, step: Step) -> Measure:
    def measured(groups: tuple[Group, ...], version: Version) -> Mapping[str, float]:
        return _numbers(log(step.done + 1, groups, measure(groups, version)), points.ROLLOUT_LOG.flag)

    return measured


class LoggedEvaluation:
    """A core.protocols.Evaluate whose metrics the user has the last word on."""

    def __init__(self, evaluator: Evaluator, log: EvalLog, step: Step) -> None:
        self._evaluator, self._log, self._step = evaluator, log, step

    async def __call__(self) -> Mapping[str, float]:
        groups = await self._evaluator.groups()
        return _numbers(self._log(self._step.done, groups, self._evaluator.metrics(groups)), points.EVAL_LOG.flag)


def _numbers(metrics: Any, flag: str) -> dict[str, float]:
    if not isinstance(metrics, Mapping) or not all(isinstance(v, int | float | np.number) for v in metrics.values()):
        raise PlugError(f"{flag} gave {metrics!r}; it gives the metrics to log, a number for each name.")
    return {str(name): float(value) for name, value in metrics.items()}


# -- what is trained on ---------------------------------------------------------------------


class Prepared:
    """A trainer that is given what the user's functions make of each batch."""

    def __init__(self, trainer: Trainer, advantage: Advantage | None, process: PostProcess | None) -> None:
        self._trainer, self._advantage, self._process = trainer, advantage, process
        self.save, self.load = trainer.save, trainer.load
        self.sleep, self.wake = trainer.sleep, trainer.wake

    async def step(self, batch: Batch) -> StepReport:
        if self._advantage is not None:
            batch = replace(batch, samples=_valued(batch, self._advantage(batch)))
        if self._process is not None:
            batch = _same_trajectories(batch, self._process(batch))
        return await self._trainer.step(batch)


def _valued(batch: Batch, advantages: Sequence[Any]) -> tuple[Sample, ...]:
    if len(advantages) != len(batch.samples):
        raise PlugError(
            f"{points.ADVANTAGE.flag} gave {len(advantages)} arrays for {len(batch.samples)} samples; it gives one for "
            "each, in their order."
        )
    rows: list[Sample] = []
    for sample, values in zip(batch.samples, advantages, strict=True):
        value = np.asarray(values, np.float32)
        if value.shape != sample.tokens.shape or not np.isfinite(value[sample.mask]).all():
            raise PlugError(
                f"{points.ADVANTAGE.flag} gave an array of shape {list(value.shape)} for a sample of {len(sample)} "
                f"tokens (prompt {sample.prompt_id}); it gives a finite number for each token that is trained on."
            )
        rows.append(replace(sample, advantages=np.where(sample.mask, value, np.float32(0))))
    return tuple(rows)


def _same_trajectories(before: Batch, after: Any) -> Batch:
    flag = points.POST_PROCESS.flag
    if not isinstance(after, Batch):
        raise PlugError(f"{flag} gave a {type(after).__name__}; it gives the miles.core.types.Batch to train on.")
    was, now = (
        [(rows[0].prompt_id, rows[0].trajectory) for rows in trajectories_of(batch.samples)]
        for batch in (before, after)
    )
    if was != now:
        raise PlugError(
            f"{flag} gave {len(now)} trajectories for {len(was)}; it gives the same ones in their order, and leaves "
            "out of the loss with the mask what is not to be learned."
        )
    return after
