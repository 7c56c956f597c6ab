"""User hooks of the training loop: wrap the source, trainer, sync, evaluator and journal with user functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from miles.cluster.executor import Executor
from miles.core.errors import HookError
from miles.core.events import BatchTaken, Event, GroupFinished, RunStarted, Saved, StepFinished
from miles.core.hooks import (
    Advantage,
    AllSamples,
    BufferFilter,
    DataBuffer,
    EvalFn,
    EvalLog,
    PostProcess,
    PostSave,
    RolloutFn,
    RolloutLog,
    SampleFilter,
)
from miles.core.protocols import AdvantageEstimator, Engine, Journal, Observer, Rollout, Trainer
from miles.core.types import Batch, Group, Sample, StepReport, Version
from miles.hooks import registry
from miles.hooks.compat.convert import is_removed
from miles.hooks.compat.rollout import is_batch_function
from miles.hooks.compat.types import UpstreamServices
from miles.hooks.offload import HookCaller, offload_evaluation, offload_rollout
from miles.hooks.worker import HookWorker
from miles.launch.build.hooks import build_upstream_context, load_hook, names_user_function
from miles.launch.build.rewards import build_rewards
from miles.launch.config import Config
from miles.rollout.custom import CustomRollout, FilteredAdvantages
from miles.rollout.evaluate import Evaluator
from miles.rollout.sampling import build_training_sampling
from miles.rollout.seeds import make_training_seed_fn
from miles.schedule.checkpoints import CheckpointDirectory
from miles.schedule.loop import Planes
from miles.sync.publish import PostWriteHook, SyncWithHook
from miles.train.batch_tensors import group_by_trajectory

_LOADED_ELSEWHERE = (
    registry.ROLLOUT,
    registry.EVALUATE,
    registry.DATA_SOURCE,
    registry.MODEL_PROVIDER,
    registry.TRAINER_INIT,
    registry.BEFORE_LOG_PROBS,
    registry.BEFORE_TRAIN_STEP,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserHooks:
    """The user's functions around the parts of the loop."""

    data_buffer: DataBuffer | None
    buffer_filter: BufferFilter | None
    sample_filter: SampleFilter | None
    all_samples: AllSamples | None
    advantage: Advantage | None
    post_process: PostProcess | None
    post_write: PostWriteHook | None
    post_save: PostSave | None
    rollout_log: RolloutLog | None
    eval_log: EvalLog | None

    def wrap_estimator(self, estimator: AdvantageEstimator) -> AdvantageEstimator:
        """The estimator with the user's sample filter."""
        return estimator if self.sample_filter is None else FilteredAdvantages(estimator, self.sample_filter)

    def wrap_planes(
        self,
        planes: Planes,
        *,
        evaluator: Evaluator | None,
        weights: Callable[[], Mapping[str, Tensor]],
        run: Executor,
        call: HookCaller,
        recorded: bool,
    ) -> Planes:
        """The planes with the user's functions; groups that were ``recorded`` have been filtered already.

        ``weights`` are the trainer's; ``run`` executes what blocks on the engine's side; ``call`` calls the functions
        of batches and evaluations.
        """
        step = StepCounter()
        observers: list[Observer] = [step]
        if self.buffer_filter is not None and not recorded:
            planes = replace(planes, buffer_filter=self.buffer_filter)
        if self.data_buffer is not None and not recorded:
            planes = replace(planes, data_buffer=self.data_buffer)
        if self.all_samples is not None:
            observers.append(StepGroups(self.all_samples))
        if self.rollout_log is not None:
            planes = replace(planes, measure=_wrap_measure(planes.measure, self.rollout_log, step))
        if self.advantage is not None or self.post_process is not None:
            planes = replace(planes, trainer=PreparingTrainer(planes.trainer, self.advantage, self.post_process, call))
        if self.post_write is not None:
            planes = replace(planes, sync=SyncWithHook(planes.sync, self.post_write, weights=weights, run=run))
        if self.post_save is not None:
            observers.append(PostSaveObserver(self.post_save, planes.checkpoints))
        if self.eval_log is not None and evaluator is not None:
            planes = replace(planes, evaluate=LoggedEvaluator(evaluator, self.eval_log, step, call))
        return replace(planes, journal=FanoutJournal(planes.journal, observers))


def load_user_hooks(config: Config) -> UserHooks:
    """Load the user's functions, checked against their protocols; also check those that are loaded elsewhere."""
    for point in _LOADED_ELSEWHERE:
        path: str | None = getattr(config.hooks, point.option)
        if path is not None:
            point.check(path, build_upstream_context(config))
    return UserHooks(
        data_buffer=load_hook(config, registry.DATA_BUFFER),
        buffer_filter=load_hook(config, registry.BUFFER_FILTER),
        sample_filter=_load_sample_filter(config),
        all_samples=load_hook(config, registry.ALL_SAMPLES),
        advantage=load_hook(config, registry.ADVANTAGE),
        post_process=load_hook(config, registry.POST_PROCESS),
        post_write=load_hook(config, registry.POST_WRITE),
        post_save=load_hook(config, registry.POST_SAVE),
        rollout_log=load_hook(config, registry.ROLLOUT_LOG),
        eval_log=load_hook(config, registry.EVAL_LOG),
    )


def _load_sample_filter(config: Config) -> SampleFilter | None:
    """The user's sample filter, and what functions with upstream's signatures exclude by ``remove_sample``."""
    own: SampleFilter | None = load_hook(config, registry.SAMPLE_FILTER)
    if not any(names_user_function(config, point) for point in (registry.ROLLOUT, registry.GENERATE)):
        return own

    def keep(group: Group) -> list[bool]:
        kept = [True] * len(group.trajectories) if own is None else list(own(group))
        if len(kept) != len(group.trajectories):
            return kept
        return [k and not is_removed(t) for k, t in zip(kept, group.trajectories, strict=True)]

    return keep


def wrap_rollout(
    config: Config, default_rollout: Rollout, engine: Engine, worker: HookWorker, services: UpstreamServices
) -> Rollout:
    """The user's rollout function around the default one, if there is one; it runs in the ``worker``'s thread.

    One with upstream's signature has a thread of its own, and may use ``services`` and the run's rewards.
    """
    services = replace(services, rewards=cache(lambda: build_rewards(config)))
    make: RolloutFn | None = load_hook(config, registry.ROLLOUT, services=services)
    if make is None:
        return default_rollout
    r = config.rollout
    return CustomRollout(
        make if is_batch_function(make) else offload_rollout(worker, make, "The rollout function"),
        default_rollout,
        engine=engine,
        sampling=build_training_sampling(r),
        group_size=r.n_samples_per_prompt,
        seed_fn=make_training_seed_fn(r.rollout_seed),
    )


def load_eval_function(config: Config, worker: HookWorker) -> EvalFn | None:
    """The user's evaluation function; with upstream's signature, --rollout-function-path is one too."""
    services = UpstreamServices(rewards=cache(lambda: build_rewards(config)))
    evaluate: EvalFn | None = load_hook(config, registry.EVALUATE, services=services)
    path = config.hooks.rollout_function_path
    if evaluate is None and path is not None and not registry.ROLLOUT.is_builtin(path):
        context = build_upstream_context(config, services)
        if is_batch_function(registry.ROLLOUT.load(path, context)):
            point = replace(registry.EVALUATE, flag=registry.ROLLOUT.flag)
            return point.load_guarded(path, context)
    if evaluate is None or is_batch_function(evaluate):
        return evaluate
    return offload_evaluation(worker, evaluate, "The evaluation function")


def log_evaluation(config: Config, groups: dict[str, list[Group]], metrics: dict[str, float]) -> Mapping[str, float]:
    """The metrics of an evaluation without a training loop, as the user's function returns them."""
    log: EvalLog | None = load_hook(config, registry.EVAL_LOG)
    return metrics if log is None else _check_metrics(log(StepCounter().done, groups, metrics), registry.EVAL_LOG.flag)


def load_trackers(config: Config) -> list[Observer]:
    """The user's observers of all events."""
    tracker: Observer | None = load_hook(config, registry.TRACKER)
    return [] if tracker is None else [tracker]


# -- observers ------------------------------------------------------------------------------


class StepCounter:
    """The number of finished steps, from the events."""

    def __init__(self) -> None:
        self.done = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted | StepFinished):
            self.done = event.step


class FanoutJournal:
    """A journal that also calls observers after it has written an event; what they raise ends the run."""

    def __init__(self, journal: Journal, observers: Sequence[Observer]) -> None:
        self._journal = journal
        self._observers = tuple(observers)

    def __call__(self, event: Event) -> None:
        self._journal(event)
        for observer in self._observers:
            observer(event)

    def commit(self) -> None:
        self._journal.commit()

    def offsets(self) -> Mapping[str, int]:
        return self._journal.offsets()


class StepGroups:
    """Collects the groups of a step, and passes them on when its batch is complete."""

    def __init__(self, process: AllSamples) -> None:
        self._process = process
        self._kept: list[Group] = []
        self._dropped: list[Group] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, GroupFinished):
            (self._kept if event.kept else self._dropped).append(event.group)
        elif isinstance(event, BatchTaken):
            kept, dropped = self._kept, self._dropped
            self._kept, self._dropped = [], []
            self._process(event.step, kept, dropped)


class PostSaveObserver:
    """Calls the post-save hook for each complete checkpoint."""

    def __init__(self, post_save: PostSave, checkpoints: CheckpointDirectory) -> None:
        self._post_save = post_save
        self._checkpoints = checkpoints

    def __call__(self, event: Event) -> None:
        if isinstance(event, Saved):
            self._post_save(event.step, Path(self._checkpoints.get_path(event.name)))


# -- metrics --------------------------------------------------------------------------------

Measure = Callable[[tuple[Group, ...], Version], Mapping[str, float]]


def _wrap_measure(measure: Measure, log: RolloutLog, step: StepCounter) -> Measure:
    def measure_and_log(groups: tuple[Group, ...], version: Version) -> Mapping[str, float]:
        return _check_metrics(log(step.done + 1, groups, measure(groups, version)), registry.ROLLOUT_LOG.flag)

    return measure_and_log


class LoggedEvaluator:
    """A core.protocols.Evaluate whose metrics pass through the user's function."""

    def __init__(self, evaluator: Evaluator, log: EvalLog, step: StepCounter, call: HookCaller) -> None:
        self._evaluator = evaluator
        self._log = log
        self._step = step
        self._call = call

    async def __call__(self) -> Mapping[str, float]:
        groups = await self._evaluator.groups()
        log = partial(self._log, self._step.done, groups, self._evaluator.metrics(groups))
        return _check_metrics(await self._call(log, registry.EVAL_LOG.flag), registry.EVAL_LOG.flag)


def _check_metrics(metrics: Any, flag: str) -> dict[str, float]:
    if not isinstance(metrics, Mapping) or not all(isinstance(v, int | float | np.number) for v in metrics.values()):
        raise HookError(f"{flag} returned {metrics!r}; return the metrics to log, a number for each name.")
    return {str(name): float(value) for name, value in metrics.items()}


# -- training batches -----------------------------------------------------------------------


class PreparingTrainer:
    """A trainer whose batches pass through the user's functions."""

    def __init__(
        self, trainer: Trainer, advantage: Advantage | None, process: PostProcess | None, call: HookCaller
    ) -> None:
        self._trainer = trainer
        self._advantage = advantage
        self._process = process
        self._call = call
        self.save, self.load = trainer.save, trainer.load
        self.sleep, self.wake = trainer.sleep, trainer.wake

    async def step(self, batch: Batch) -> StepReport:
        if self._advantage is not None:
            advantages = await self._call(partial(self._advantage, batch), registry.ADVANTAGE.flag)
            batch = replace(batch, samples=_set_advantages(batch, advantages))
        if self._process is not None:
            processed = await self._call(partial(self._process, batch), registry.POST_PROCESS.flag)
            batch = _check_same_trajectories(batch, processed)
        return await self._trainer.step(batch)


def _set_advantages(batch: Batch, advantages: Sequence[Any]) -> tuple[Sample, ...]:
    if len(advantages) != len(batch.samples):
        raise HookError(
            f"{registry.ADVANTAGE.flag} returned {len(advantages)} arrays for {len(batch.samples)} samples; return one "
            "for each, in their order."
        )
    rows: list[Sample] = []
    for sample, values in zip(batch.samples, advantages, strict=True):
        value = np.asarray(values, np.float32)
        if value.shape != sample.tokens.shape or not np.isfinite(value[sample.mask]).all():
            raise HookError(
                f"{registry.ADVANTAGE.flag} returned an array of shape {list(value.shape)} for a sample of "
                f"{len(sample)} tokens (prompt {sample.prompt_id}); return a finite number for each trained token."
            )
        rows.append(replace(sample, advantages=np.where(sample.mask, value, np.float32(0))))
    return tuple(rows)


def _check_same_trajectories(before: Batch, after: Any) -> Batch:
    flag = registry.POST_PROCESS.flag
    if not isinstance(after, Batch):
        raise HookError(f"{flag} returned a {type(after).__name__}; return the miles.core.types.Batch to train on.")
    was, now = (
        [(rows[0].prompt_id, rows[0].trajectory) for rows in group_by_trajectory(batch.samples)]
        for batch in (before, after)
    )
    if was != now:
        raise HookError(
            f"{flag} returned {len(now)} trajectories for {len(was)}; return the same ones in their order, and mask "
            "what must not be trained on."
        )
    return after
