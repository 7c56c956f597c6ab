"""The training loop, one for all modes: synchronous, one-step-off, fully asynchronous, colocated.

    source -> admission -> rollout -> filter -> advantages -> reorder buffer -> trainer -> publish -> (save) -> (eval)
                  ^                                                                           |
                  +------------------------------ release slots ------------------------------+

    synchronous          max_staleness = 0
    one step off         max_staleness = 1
    fully asynchronous   max_staleness = k
    over-sampled         max_staleness = 0, with extra groups that are interrupted when the step has enough;
                         max_staleness = k, with extra groups that overtake others, until these are too stale
    colocated            max_staleness = 0, with a lease that makes the planes take turns

Who waits for whom: the producer waits for admission (a free slot) and, group by group, for the
rollout plane; the consumer waits for the reorder buffer (the next group in ticket order, with a deadline),
then for the trainer, then for the weight update. A resumed run enters at the top of ``_consume``
exactly where an uninterrupted run passes through.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from miles.core.errors import MilesError, first_cause
from miles.core.events import (
    BatchTaken,
    Evaluated,
    GroupFinished,
    Progress,
    PromptAdmitted,
    RunEnded,
    RunStarted,
    Saved,
    StepFinished,
)
from miles.core.hooks import BufferFilter, DataBuffer
from miles.core.protocols import (
    AdvantageEstimator,
    Evaluate,
    Filter,
    FilterResult,
    InterruptibleRollout,
    Journal,
    Lease,
    Rollout,
    Source,
    Trainer,
    WeightSync,
)
from miles.core.types import Batch, Group, Prompt, Sample, Version
from miles.schedule.admission import AdmissionControl, compute_admission_slots
from miles.schedule.checkpoint_writer import CheckpointWriter
from miles.schedule.checkpoints import CheckpointDirectory, Cursor, checkpoint_name
from miles.schedule.oversampling import LEFTOVER, OVERSAMPLED, PARTIAL, STALE, LateGroups, Oversampling
from miles.schedule.reorder_buffer import FinishedGroup, ReorderBuffer, keep_all

TO_ROLLOUT = "offload/to_rollout"
TO_TRAIN = "offload/to_train"
_PROBE_SAMPLES = 8
_SHOWN_TICKETS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Due every ``every`` steps (never, if None), and optionally at the start and the end of the run.

    >>> [step for step in range(6) if Interval(every=3, at_end=True).due(step, last=5)]
    [3, 5]
    """

    every: int | None
    at_start: bool = False
    at_end: bool = False

    def due(self, step: int, *, last: int) -> bool:
        """Return whether it is due after ``step`` steps of a run that ends after ``last``."""
        if step == 0:
            return self.at_start
        if step == last and self.at_end:
            return True
        return self.every is not None and step % self.every == 0


Decision = tuple[FilterResult, Sequence[Sample] | None]
"""What becomes of a finished group: the filter's result, and the samples of a group it keeps."""

NEVER = Interval(every=None)
AT_END = Interval(every=None, at_end=True)
_STOP_POLL_SECONDS = 0.2
_CANCEL_SECONDS = 5.0


MeasureRates = Callable[[Sequence[Group], Mapping[str, float], Mapping[str, float]], Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    """Everything the loop drives: the planes, the filters and hooks between them, checkpoints and the journal.

    ``decide`` calls the group filter and the estimator where these may block, and ``read`` the source; else the loop
    calls them itself. ``limit_staleness`` masks the tokens of a group's samples that are too stale now, where groups
    may wait so long. ``take_engine_metrics`` returns what engines did since the last step that a resumed run need not
    repeat, and ``measure_rates`` the FLOPs per second of a step from its groups, its metrics and the seconds of its
    phases.
    """

    source: Source
    rollout: Rollout
    group_filter: Filter
    estimator: AdvantageEstimator
    trainer: Trainer
    sync: WeightSync
    lease: Lease
    evaluate: Evaluate | None
    checkpoints: CheckpointDirectory
    journal: Journal
    measure: Callable[[tuple[Group, ...], Version], Mapping[str, float]]
    buffer_filter: BufferFilter = keep_all
    data_buffer: DataBuffer | None = None
    interruptible: InterruptibleRollout | None = None
    decide: Callable[[Callable[[], Decision]], Awaitable[Decision]] | None = None
    read: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None
    take_engine_metrics: Callable[[], Mapping[str, float]] = dict
    measure_rates: MeasureRates = lambda groups, metrics, laps: {}
    limit_staleness: Callable[[Sequence[Sample]], Sequence[Sample]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Settings of the loop.

    ``extra_groups`` are admitted in each step beyond those it needs. When the step has enough, the others are
    interrupted: ``partial`` resumes them in the next step, else they are dropped. With ``max_staleness`` they go on,
    and are dropped when they would be too stale for the next step; ``partial`` keeps them, and the tokens that are too
    stale are not trained on.
    """

    steps: int
    groups_per_step: int
    max_staleness: int = 0
    window: int = 1
    extra_groups: int = 0
    partial: bool = False
    stall_timeout: float = 1800.0
    max_dropped: int = 1000
    save: Interval = AT_END
    evaluate: Interval = NEVER


class Loop:
    """Runs from ``cursor`` (a fresh run's is all zeros) to the last step, or until ``stop_soon``.

    ``policy`` is the main policy, whose versions are counted. ``finished`` tells afterwards whether the last step was
    reached.
    """

    def __init__(
        self, planes: Planes, settings: LoopSettings, cursor: Cursor | None = None, *, policy: str = "actor"
    ) -> None:
        cursor = cursor or Cursor(step=0, version=0)
        self._policy = policy
        self._planes = planes
        self._settings = settings
        self._cursor = cursor
        self._stop = False
        self.finished = cursor.step >= settings.steps
        slots = compute_admission_slots(
            groups_per_step=settings.groups_per_step, max_staleness=settings.max_staleness, window=settings.window
        )
        needed = max(0, settings.steps - cursor.step) * settings.groups_per_step + settings.extra_groups
        self._admission = AdmissionControl(slots=0, needed=needed, first=cursor.ticket, skip=cursor.done_tickets)
        self._initial_slots = slots + settings.extra_groups
        self._buffer = ReorderBuffer(
            window=sys.maxsize if settings.extra_groups else settings.window,
            first=cursor.ticket,
            skip=cursor.done_tickets,
            data_buffer=planes.data_buffer,
        )
        self._oversampling = Oversampling(planes.interruptible, partial=settings.partial)
        self._late = LateGroups(settings.max_staleness)
        self._num_read = cursor.ticket
        self._source_states: dict[int, Mapping[str, object]] = {}
        self._is_reading = False
        self._in_flight: dict[int, Prompt] = {}
        self._returned = 0
        self._groups: asyncio.TaskGroup | None = None
        self._writer = CheckpointWriter(planes.checkpoints, planes.trainer.save, planes.journal)

    def stop_soon(self) -> None:
        """Finish the current step, save, and return."""
        self._stop = True

    async def run(self) -> Version:
        """Train; the first failure of either plane stops both and is raised."""
        producing = asyncio.create_task(self._produce(), name="produce")
        consuming = asyncio.create_task(self._consume(), name="consume")
        try:
            done, _ = await asyncio.wait({producing, consuming}, return_when=asyncio.FIRST_COMPLETED)
            first = consuming if consuming in done else producing
            if first is producing:  # it never returns by itself: this raises
                await producing
            return await consuming
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        finally:
            for task in (producing, consuming):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
            if not isinstance(sys.exception(), asyncio.CancelledError):
                await self._writer.drain_after_failure()

    # -- rollout plane: as many prompts in flight as admission control has slots --------------

    async def _produce(self) -> None:
        async with asyncio.TaskGroup() as groups:
            self._groups = groups
            while True:
                ticket = await self._admission.admit()
                prompt = await self._next_prompt(ticket)
                self._planes.journal(PromptAdmitted(ticket=ticket, prompt_id=prompt.id, epoch=prompt.epoch))
                self._enter(ticket, prompt, partial(self._planes.rollout.produce, prompt))

    def _enter(self, ticket: int, prompt: Prompt, produce: Callable[[], Awaitable[Group]]) -> None:
        self._in_flight[ticket] = prompt
        assert self._groups is not None
        task = self._groups.create_task(self._finish_group(ticket, produce), name=f"ticket {ticket}")
        self._oversampling.watch(task)
        self._late.admit(ticket, task)

    async def _next_prompt(self, ticket: int) -> Prompt:
        """Return the prompt of ``ticket``; prompts consumed before the run was resumed are skipped."""
        source, read = self._planes.source, self._planes.read
        while True:
            self._is_reading = True
            self._source_states[self._num_read] = source.state() if read is None else await read(source.state)
            prompt = source.next() if read is None else await read(source.next)
            self._is_reading = False
            self._num_read += 1
            if self._num_read > ticket:
                return prompt

    async def _finish_group(self, ticket: int, produce: Callable[[], Awaitable[Group]]) -> None:
        group = await produce()
        reason = self._oversampling.classify(ticket, group)
        if reason is not None:
            del self._in_flight[ticket]
            if reason != PARTIAL:  # that one keeps its slot and resumes in the next step
                self._drop_extra(ticket, group, reason)
            return
        decide = self._planes.decide
        result, samples = self._decide(group) if decide is None else await decide(lambda: self._decide(group))
        del self._in_flight[ticket]
        self._buffer.put(FinishedGroup(ticket=ticket, group=group, samples=samples, reason=result.reason))
        if result.keep:
            self._returned += 1
        else:
            self._admission.drop()

    def _decide(self, group: Group) -> Decision:
        result = self._planes.group_filter(group)
        return result, self._planes.estimator(group) if result.keep else None

    # -- training plane: batch in, version out, slots back ------------------------------------

    async def _consume(self) -> Version:
        planes, settings, cursor = self._planes, self._settings, self._cursor
        version = Version(self._policy, cursor.version)
        planes.journal(RunStarted(step=cursor.step, steps=settings.steps))
        started = await self._publish_first(version)
        due = settings.save.due(cursor.step, last=settings.steps)
        if cursor.log_offsets and due and self._writer.logged:  # the previous process may have died before logging it
            planes.journal(Saved(step=cursor.step, name=checkpoint_name(cursor.step)))
        saved_step, free_slots = cursor.step, self._initial_slots
        while True:
            if cursor.step > settings.steps or not started:  # > where it is continued with fewer steps than it has made
                break
            self._late.live_step = cursor.step
            clock = _Clock()
            await planes.lease.to_rollout()
            clock.lap(TO_ROLLOUT)
            await self._evaluate(cursor.step)
            if cursor.step == settings.steps or self._stop:
                break
            for ticket, begun in self._oversampling.pop_partial():
                assert planes.interruptible is not None
                self._enter(ticket, begun.prompt, partial(planes.interruptible.resume_group, begun))
            self._admission.release(free_slots)
            version = await self._run_step(cursor.step + 1, version, clock)
            cursor, free_slots = self._build_cursor(cursor.step + 1, version), settings.groups_per_step
            await self._writer.settle(wait=False)
            if settings.save.due(cursor.step, last=settings.steps):
                await self._writer.save(cursor, scheduled=True, last=self._stop or cursor.step == settings.steps)
                saved_step = cursor.step
        if cursor.step != saved_step:  # stopped between two saves
            await self._writer.save(cursor, scheduled=False, last=True)
        await self._writer.settle()
        self.finished = cursor.step >= settings.steps
        if self.finished:
            self._log_leftovers()
        planes.journal(RunEnded(step=cursor.step, finished=self.finished))
        planes.journal.commit()
        return version

    async def _publish_first(self, version: Version) -> bool:
        """Have the engines start and take the first weights; false if the run is asked to stop before they have.

        Servers may take minutes to start, and there is nothing to save yet.
        """
        publishing = asyncio.ensure_future(self._planes.sync.publish(version))
        try:
            while not publishing.done() and not self._stop:  # set by the thread of the signals
                await asyncio.wait((publishing,), timeout=_STOP_POLL_SECONDS)
            if publishing.done():
                publishing.result()
            return publishing.done()
        finally:
            publishing.cancel()
            await asyncio.wait((publishing,), timeout=_CANCEL_SECONDS)

    async def _run_step(self, step: int, version: Version, clock: _Clock) -> Version:
        """Make a step, whose ``clock`` has the lap of handing the device to the engines already."""
        planes = self._planes
        clock.skip()
        batch, groups, dropped = await self._next_batch(step, version)
        interrupted = await self._interrupt_extra(step)
        clock.lap("rollout")
        await planes.lease.to_train()
        clock.lap(TO_TRAIN)
        report = await planes.trainer.step(batch)
        clock.lap("train")
        publish_seconds = await planes.sync.publish(report.version)
        clock.lap("publish")
        metrics = {
            **planes.measure(groups, version),
            **report.metrics,
            "staleness": float(batch.staleness(version)),
            "groups_dropped": float(dropped),
            **interrupted,
        }
        engine_seconds = planes.take_engine_metrics()
        laps = {"offload": clock.laps[TO_ROLLOUT] + clock.laps[TO_TRAIN], **clock.laps}
        train_seconds = {f"train/{name}": value for name, value in report.seconds.items()}
        seconds = {
            **laps,
            "step": sum(clock.laps.values()),
            **train_seconds,
            **publish_seconds,
            **engine_seconds,
            **planes.measure_rates(groups, metrics, {**laps, **engine_seconds}),
        }
        planes.journal(
            StepFinished(
                step=step,
                version=report.version,
                metrics=metrics,
                seconds=seconds,
                spans=report.spans,
                token_stats=report.token_stats,
            )
        )
        self._returned -= len(groups)
        return report.version

    async def _next_batch(self, step: int, version: Version) -> tuple[Batch, tuple[Group, ...], int]:
        """Take the next kept groups in order; dropped ones are logged when their turn comes."""
        kept: list[FinishedGroup] = []
        dropped: Counter[str] = Counter()
        dropped_in_a_row = 0
        while len(kept) < self._settings.groups_per_step:
            finished = await self._take(step, version)
            self._late.forget(finished.ticket)
            finished, keep, reason = self._filter_buffered(finished, version)
            self._log_group(finished.ticket, finished.group, reason, kept=keep)
            if keep:
                kept.append(finished)
                dropped_in_a_row = 0
                continue
            dropped[reason] += 1
            dropped_in_a_row += 1
            if dropped_in_a_row >= self._settings.max_dropped:
                raise MilesError(_format_all_dropped(step, dropped_in_a_row, dropped))
        groups = tuple(f.group for f in kept)
        samples = tuple(sample for f in kept for sample in f.samples or ())
        probe = self._buffer.select_fresh(version, _PROBE_SAMPLES)
        batch = Batch(step=step, samples=samples, num_groups=len(kept), probe=probe)
        tickets = tuple(f.ticket for f in kept)
        self._planes.journal(BatchTaken(step=step, tickets=tickets, batch=batch, groups=groups))
        return batch, groups, dropped.total()

    def _filter_buffered(self, finished: FinishedGroup, version: Version) -> tuple[FinishedGroup, bool, str]:
        """Apply the buffer filter to a group whose turn has come; a group it drops releases its slot."""
        if finished.samples is None:
            return finished, False, finished.reason
        result = self._planes.buffer_filter(finished.group, version)
        if result.keep:
            limited = self._limit_staleness(finished, finished.samples)
            if limited is not None:
                return limited, True, finished.reason
        self._returned -= 1
        self._admission.drop()
        return finished, False, STALE if result.keep else result.reason

    def _limit_staleness(self, finished: FinishedGroup, samples: Sequence[Sample]) -> FinishedGroup | None:
        """The group without training on tokens that are too stale; None if no other tokens are left."""
        if self._planes.limit_staleness is None:
            return finished
        limited = self._planes.limit_staleness(samples)
        trained = any(sample.mask.any() for sample in samples)
        if trained and not any(sample.mask.any() for sample in limited):
            return None
        return replace(finished, samples=limited)

    async def _take(self, step: int, version: Version) -> FinishedGroup:
        total = self._settings.groups_per_step
        self._planes.journal(Progress(step=step, done=min(self._returned, total), total=total))
        try:
            async with asyncio.timeout(self._settings.stall_timeout):
                return await self._buffer.take(version)
        except TimeoutError:
            cause = "look for a reward or generate function that hangs"
            if self._is_reading:
                cause = (
                    "the data source has not returned the next prompt (--data-source-path): find out what it waits for"
                )
            raise MilesError(
                f"step {step} waited {self._settings.stall_timeout:.0f} s for the next group and none finished; "
                f"in flight: tickets {self._format_in_flight()}; {cause}, or raise --stall-timeout"
            ) from None

    async def _interrupt_extra(self, step: int) -> Mapping[str, float]:
        """Interrupt the extra groups once a step has enough, so that none continues under new weights."""
        if not self._settings.extra_groups:
            return {}
        if self._settings.max_staleness:
            return {"groups_aborted": 0.0 if self._settings.partial else float(await self._drop_late(step))}
        self._admission.close()
        try:
            async with asyncio.timeout(self._settings.stall_timeout):
                count = await self._oversampling.interrupt()
        except TimeoutError:
            raise MilesError(
                f"step {step} had its groups and waited {self._settings.stall_timeout:.0f} s for the interrupted ones "
                f"to return; in flight: tickets {self._format_in_flight()}; look for a reward or generate function "
                "that hangs when it is aborted, or raise --stall-timeout"
            ) from None
        for finished in () if self._settings.partial else self._buffer.drain():
            if finished.samples is None:
                self._log_group(finished.ticket, finished.group, finished.reason, kept=False)
                self._buffer.skip(finished.ticket)
            else:
                count += 1
                self._returned -= 1
                self._drop_extra(finished.ticket, finished.group, OVERSAMPLED)
        return {"groups_aborted": float(count)}

    async def _drop_late(self, step: int) -> int:
        """Drop the groups that would be too stale for the step after this one; returns how many."""
        late = self._late.list_late(step)
        try:
            async with asyncio.timeout(self._settings.stall_timeout):
                await self._late.cancel(late)
        except TimeoutError:
            raise MilesError(
                f"step {step} had its groups and waited {self._settings.stall_timeout:.0f} s for late ones to be "
                f"cancelled; in flight: tickets {self._format_in_flight()}; look for a reward or generate function "
                "that hangs when it is cancelled, or raise --stall-timeout"
            ) from None
        count = 0
        for ticket in late:
            prompt = self._in_flight.pop(ticket, None)
            if prompt is not None:
                self._drop_extra(ticket, Group(prompt=prompt, trajectories=()), STALE)
            elif (group := self._buffer.pop_kept(ticket)) is not None:
                self._returned -= 1
                self._drop_extra(ticket, group, STALE)
            else:  # its filter has dropped it
                continue
            self._late.forget(ticket)
            count += 1
        return count

    def _drop_extra(self, ticket: int, group: Group, reason: str) -> None:
        self._log_group(ticket, group, reason, kept=False)
        self._buffer.skip(ticket)
        self._admission.drop()

    # -- evaluation, logging, checkpoints -----------------------------------------------------

    async def _evaluate(self, step: int) -> None:
        if self._planes.evaluate is None or not self._settings.evaluate.due(step, last=self._settings.steps):
            return
        clock = _Clock()
        metrics = await self._planes.evaluate()
        clock.lap("evaluate")
        self._planes.journal(Evaluated(step=step, metrics=metrics, seconds=clock.laps))

    def _log_group(self, ticket: int, group: Group, reason: str, *, kept: bool) -> None:
        seconds = measure_group_seconds(group)
        self._planes.journal(GroupFinished(ticket=ticket, kept=kept, reason=reason, group=group, seconds=seconds))

    def _log_leftovers(self) -> None:
        """Log the extra groups that no step is left for."""
        leftovers = [(f.ticket, f.group) for f in self._buffer.drain()] + list(self._oversampling.pop_partial())
        for ticket, group in leftovers if self._settings.extra_groups else ():
            self._log_group(ticket, group, LEFTOVER, kept=False)

    def _format_in_flight(self) -> str:
        shown = list(self._in_flight.items())[:_SHOWN_TICKETS]
        return ", ".join(f"{ticket} (prompt {prompt.id})" for ticket, prompt in shown) or "none"

    def _build_cursor(self, step: int, version: Version) -> Cursor:
        """Return the state of the run now, before the next step starts."""
        ticket, done_tickets = self._buffer.cursor
        for old in [t for t in self._source_states if t < ticket]:
            del self._source_states[old]
        return Cursor(
            step=step,
            version=version.number,
            ticket=ticket,
            done_tickets=done_tickets,
            # That of the next prompt is here already while the prompt is read.
            source=self._source_states[ticket] if ticket in self._source_states else self._planes.source.state(),
            log_offsets=self._planes.journal.offsets(),
        )


def measure_group_seconds(group: Group) -> dict[str, float]:
    """Return the seconds of the slowest generation and grading of a group, and of the group as a whole."""
    timed = [t.times for t in group.trajectories if "started" in t.times]
    if not timed:
        return {}
    ends = [times["started"] + times.get("generate", 0.0) + times.get("grade", 0.0) for times in timed]
    seconds = {name: max(times.get(name, 0.0) for times in timed) for name in ("generate", "grade")}
    return seconds | {"group": max(ends) - min(times["started"] for times in timed)}


class _Clock:
    """Wall-clock laps, for metrics only; ``skip`` leaves out the time since the last one."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now

    def skip(self) -> None:
        self._last = time.perf_counter()


def _format_all_dropped(step: int, count: int, dropped: Counter[str]) -> str:
    reasons = ", ".join(f"{reason} {count} times" for reason, count in dropped.most_common())
    return (
        f"in step {step} a filter dropped {count} groups in a row ({reasons}): "
        "the task is too hard or too easy for this policy, or the reward function is wrong; "
        "check the rewards without the filter, or raise --max-dropped-groups"
    )
