"""The loop. One, for every mode.

    source -> gate -> rollout -> filter -> credit -> shelf -> trainer -> publish -> (save) -> (eval)
               ^                                                           |
               +------------------------- release -------------------------+

    synchronous          max_staleness = 0
    one step off         max_staleness = 1
    fully asynchronous   max_staleness = k
    over-sampled         max_staleness = 0, spare groups that are cut when the step has enough
    colocated            max_staleness = 0, with a lease that makes the planes take turns

Who waits for whom: the producer waits for the gate (a free place) and, group by group, for the
rollout plane; the consumer waits for the shelf (the next group in ticket order, with a deadline),
then for the trainer, then for the publication. A continued run enters at the top of ``_consume``
exactly where a run that was never stopped passes through.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

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
from miles.core.plugs import BufferFilter, DataBuffer
from miles.core.protocols import (
    Credit,
    Cuttable,
    Evaluate,
    Filter,
    Journal,
    Lease,
    Rollout,
    Source,
    Trainer,
    WeightSync,
)
from miles.core.types import Batch, Group, Prompt, Version
from miles.schedule.buffer import keep_waiting
from miles.schedule.cadence import AT_END, NEVER, Cadence
from miles.schedule.gate import Gate, places
from miles.schedule.recover import Checkpoints, Cursor, name_of
from miles.schedule.saver import Saver
from miles.schedule.shelf import Finished, Shelf
from miles.schedule.spares import BEGUN, LEFT_OVER, SPARE, Spares

_PROBE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    """All the loop can see of the world."""

    source: Source
    rollout: Rollout
    keep: Filter
    credit: Credit
    trainer: Trainer
    sync: WeightSync
    lease: Lease
    evaluate: Evaluate | None
    checkpoints: Checkpoints
    journal: Journal
    measure: Callable[[tuple[Group, ...], Version], Mapping[str, float]]
    still: BufferFilter = keep_waiting
    choose: DataBuffer | None = None
    cuttable: Cuttable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tempo:
    """Every number the loop goes by.

    ``spare`` groups enter a step beyond those it needs. When it has these, the others are cut: ``partial`` keeps what
    was begun for the next step, else it is dropped.
    """

    steps: int
    groups_per_step: int
    max_staleness: int = 0
    window: int = 1
    spare: int = 0
    partial: bool = False
    stall_timeout: float = 1800.0
    max_dropped: int = 1000
    save: Cadence = AT_END
    evaluate: Cadence = NEVER


class Loop:
    """Runs from ``cursor`` (a fresh run's is all zeros) to the last step, or until asked to stop.

    ``policy`` is the one whose versions it counts, where there are several.
    ``finished`` says afterwards which of the two it was.
    """

    def __init__(self, planes: Planes, tempo: Tempo, cursor: Cursor | None = None, *, policy: str = "actor") -> None:
        cursor = cursor or Cursor(step=0, version=0)
        self._policy = policy
        self._p, self._tempo, self._cursor = planes, tempo, cursor
        self._stop = False
        self.finished = cursor.step >= tempo.steps
        inside = places(groups_per_step=tempo.groups_per_step, max_staleness=tempo.max_staleness, window=tempo.window)
        wanted = (tempo.steps - cursor.step) * tempo.groups_per_step
        self._gate = Gate(places=0, wanted=wanted + tempo.spare, first=cursor.ticket, skip=cursor.dealt)
        self._opening = inside + tempo.spare
        window = sys.maxsize if tempo.spare else tempo.window
        self._shelf = Shelf(window=window, first=cursor.ticket, skip=cursor.dealt, choose=planes.choose)
        self._spares = Spares(planes.cuttable, partial=tempo.partial)
        self._drawn = cursor.ticket
        self._source_before: dict[int, Mapping[str, object]] = {}
        self._in_flight: dict[int, Prompt] = {}
        self._returned = 0
        self._groups: asyncio.TaskGroup | None = None
        self._saver = Saver(planes.checkpoints, planes.trainer.save, planes.journal)

    def stop_soon(self) -> None:
        """Finish the step under way, save, and return."""
        self._stop = True

    async def run(self) -> Version:
        """Train; the first failure of either plane ends both and is the one raised."""
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
                await self._saver.let_go()

    # -- rollout plane: as many prompts in flight as the gate has places --------------------

    async def _produce(self) -> None:
        async with asyncio.TaskGroup() as groups:
            self._groups = groups
            while True:
                ticket = await self._gate.admit()
                prompt = self._draw(ticket)
                self._p.journal(PromptAdmitted(ticket=ticket, prompt_id=prompt.id, epoch=prompt.epoch))
                self._enter(ticket, prompt, self._p.rollout.produce(prompt))

    def _enter(self, ticket: int, prompt: Prompt, coming: Awaitable[Group]) -> None:
        self._in_flight[ticket] = prompt
        assert self._groups is not None
        self._spares.watch(self._groups.create_task(self._one(ticket, coming), name=f"ticket {ticket}"))

    def _draw(self, ticket: int) -> Prompt:
        """The prompt of ``ticket``; those an earlier life has dealt with are passed over."""
        while True:
            self._source_before[self._drawn] = self._p.source.state()
            prompt = self._p.source.next()
            self._drawn += 1
            if self._drawn > ticket:
                return prompt

    async def _one(self, ticket: int, coming: Awaitable[Group]) -> None:
        group = await coming
        del self._in_flight[ticket]
        if (fate := self._spares.fate(ticket, group)) is not None:
            if fate == BEGUN:
                return  # its place stays taken: it goes on in the next step
            self._drop_spare(ticket, group, fate)
            return
        verdict = self._p.keep(group)
        rows = self._p.credit(group) if verdict.keep else None
        self._shelf.put(Finished(ticket=ticket, group=group, rows=rows, reason=verdict.reason))
        if verdict.keep:
            self._returned += 1
        else:
            self._gate.drop()

    # -- training plane: batch in, version out, places back ---------------------------------

    async def _consume(self) -> Version:
        p, t, cursor = self._p, self._tempo, self._cursor
        version = Version(self._policy, cursor.version)
        p.journal(RunStarted(step=cursor.step, steps=t.steps))
        await p.sync.publish(version)
        due = t.save.due(cursor.step, last=t.steps)
        if cursor.marks and due and self._saver.logged:  # the run before may not have come to say so
            p.journal(Saved(step=cursor.step, name=name_of(cursor.step)))
        saved, free = cursor.step, self._opening
        while True:
            await p.lease.to_rollout()
            await self._evaluate(cursor.step)
            if cursor.step == t.steps or self._stop:
                break
            for ticket, begun in self._spares.take_up():
                assert p.cuttable is not None
                self._enter(ticket, begun.prompt, p.cuttable.go_on(begun))
            self._gate.release(free)
            version = await self._one_step(cursor.step + 1, version)
            cursor, free = self._cursor_at(cursor.step + 1, version), t.groups_per_step
            await self._saver.settle(wait=False)
            if t.save.due(cursor.step, last=t.steps):
                await self._saver.save(cursor, scheduled=True, last=self._stop or cursor.step == t.steps)
                saved = cursor.step
        if cursor.step != saved:  # asked to stop between two saves
            await self._saver.save(cursor, scheduled=False, last=True)
        await self._saver.settle()
        self.finished = cursor.step == t.steps
        if self.finished:
            self._tell_leftovers()
        p.journal(RunEnded(step=cursor.step, finished=self.finished))
        p.journal.commit()
        return version

    async def _one_step(self, step: int, version: Version) -> Version:
        p, clock = self._p, _Clock()
        batch, groups, dropped = await self._next_batch(step, version)
        cut = await self._cut(step)
        clock.lap("rollout")
        await p.lease.to_train()
        report = await p.trainer.step(batch)
        clock.lap("train")
        published = await p.sync.publish(report.version)
        clock.lap("publish")
        metrics = {
            **p.measure(groups, version),
            **report.metrics,
            "staleness": float(batch.staleness(version)),
            "groups_dropped": float(dropped),
            **cut,
        }
        parts = {f"train/{name}": value for name, value in report.seconds.items()}
        seconds = {**clock.laps, "step": sum(clock.laps.values()), **parts, **published}
        p.journal(StepFinished(step=step, version=report.version, metrics=metrics, seconds=seconds))
        self._returned -= len(groups)
        return report.version

    async def _next_batch(self, step: int, version: Version) -> tuple[Batch, tuple[Group, ...], int]:
        """The next kept groups in line; dropped ones are told of as their turn comes."""
        kept: list[Finished] = []
        dropped: Counter[str] = Counter()
        in_a_row = 0
        while len(kept) < self._tempo.groups_per_step:
            finished = await self._take(step, version)
            is_kept, reason = self._judged(finished, version)
            self._p.journal(GroupFinished(ticket=finished.ticket, kept=is_kept, reason=reason, group=finished.group))
            if is_kept:
                kept.append(finished)
                in_a_row = 0
                continue
            dropped[reason] += 1
            in_a_row += 1
            if in_a_row >= self._tempo.max_dropped:
                raise MilesError(_all_dropped(step, in_a_row, dropped))
        groups = tuple(f.group for f in kept)
        rows = tuple(row for f in kept for row in f.rows or ())
        batch = Batch(step=step, samples=rows, num_groups=len(kept), probe=self._shelf.fresh(version, _PROBE))
        tickets = tuple(f.ticket for f in kept)
        self._p.journal(BatchTaken(step=step, tickets=tickets, batch=batch, groups=groups))
        return batch, groups, dropped.total()

    def _judged(self, finished: Finished, version: Version) -> tuple[bool, str]:
        """Is a group trained on, now that its turn has come? One that is not after all makes room for another."""
        if finished.rows is None:
            return False, finished.reason
        verdict = self._p.still(finished.group, version)
        if verdict.keep:
            return True, finished.reason
        self._returned -= 1
        self._gate.drop()
        return False, verdict.reason

    async def _take(self, step: int, version: Version) -> Finished:
        wanted = self._tempo.groups_per_step
        self._p.journal(Progress(step=step, done=min(self._returned, wanted), wanted=wanted))
        try:
            async with asyncio.timeout(self._tempo.stall_timeout):
                return await self._shelf.take(version)
        except TimeoutError:
            held = ", ".join(f"{ticket} (prompt {p.id})" for ticket, p in list(self._in_flight.items())[:8])
            raise MilesError(
                f"step {step} waited {self._tempo.stall_timeout:.0f} s for the next group and none came back; "
                f"still in the rollout plane: tickets {held or 'none'}; "
                "look for a reward or generate function that hangs, or raise --stall-timeout"
            ) from None

    async def _cut(self, step: int) -> Mapping[str, float]:
        """A step has its groups: end the others where they are, so that none outlives the weights unseen."""
        if not self._tempo.spare:
            return {}
        self._gate.shut()
        try:
            async with asyncio.timeout(self._tempo.stall_timeout):
                count = await self._spares.cut()
        except TimeoutError:
            held = ", ".join(f"{ticket} (prompt {p.id})" for ticket, p in list(self._in_flight.items())[:8])
            raise MilesError(
                f"step {step} had its groups and waited {self._tempo.stall_timeout:.0f} s for the spare ones to end; "
                f"still in the rollout plane: tickets {held}; look for a reward or generate function that hangs when "
                "it is aborted, or raise --stall-timeout"
            ) from None
        for finished in () if self._tempo.partial else self._shelf.rest():
            if finished.rows is None:
                self._p.journal(_dropped(finished, finished.reason))
                self._shelf.pass_over(finished.ticket)
            else:
                count += 1
                self._returned -= 1
                self._drop_spare(finished.ticket, finished.group, SPARE)
        return {"groups_cut": float(count)}

    def _drop_spare(self, ticket: int, group: Group, reason: str) -> None:
        self._p.journal(GroupFinished(ticket=ticket, kept=False, reason=reason, group=group))
        self._shelf.pass_over(ticket)
        self._gate.drop()

    # -- now and then ------------------------------------------------------------------------

    async def _evaluate(self, step: int) -> None:
        if self._p.evaluate is None or not self._tempo.evaluate.due(step, last=self._tempo.steps):
            return
        clock = _Clock()
        metrics = await self._p.evaluate()
        clock.lap("evaluate")
        self._p.journal(Evaluated(step=step, metrics=metrics, seconds=clock.laps))

    def _tell_leftovers(self) -> None:
        """Spare groups that no step is left for."""
        over = [(f.ticket, f.group) for f in self._shelf.rest()] + list(self._spares.take_up())
        for ticket, group in over if self._tempo.spare else ():
            self._p.journal(GroupFinished(ticket=ticket, kept=False, reason=LEFT_OVER, group=group))

    def _cursor_at(self, step: int, version: Version) -> Cursor:
        """Where the run stands now, before anything of the next step has happened."""
        ticket, dealt = self._shelf.cursor
        for gone in [t for t in self._source_before if t < ticket]:
            del self._source_before[gone]
        source = self._source_before[ticket] if ticket < self._drawn else self._p.source.state()
        return Cursor(
            step=step, version=version.number, ticket=ticket, dealt=dealt, source=source, marks=self._p.journal.marks()
        )


class _Clock:
    """Wall-clock laps, for reports only."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def _dropped(finished: Finished, reason: str) -> GroupFinished:
    return GroupFinished(ticket=finished.ticket, kept=False, reason=reason, group=finished.group)


def _all_dropped(step: int, in_a_row: int, dropped: Counter[str]) -> str:
    reasons = ", ".join(f"{reason} {count} times" for reason, count in dropped.most_common())
    return (
        f"step {step} saw {in_a_row} groups in a row dropped by a filter ({reasons}); "
        "the task is too hard or too easy for this policy, or the reward is broken; "
        "look at the rewards without the filter, or raise --max-dropped-groups"
    )
