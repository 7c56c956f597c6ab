"""Devices between the planes: what each waits is measured, and one moves between two steps when it should.

    to rollout   the trainer hands over its state, is made again with fewer ranks; an engine starts on what is free now,
                 and joins when it is ready
    to trainer   an engine gives its requests back and ends; the trainer is made again with more ranks

The loop waits while the trainer is made again. What the rollout plane has finished or under way stays as it is.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from miles.backends.sglang.fleet import Seat
from miles.core.errors import MilesError, TrainerError
from miles.core.events import DevicesMoved, Event, Progress, RunStarted, StepFinished
from miles.core.protocols import Journal, Rollout
from miles.core.types import Group, Prompt
from miles.launch.config import Config
from miles.launch.elastic_rules import bounds_of, split_of
from miles.launch.mending import MendedTrainer
from miles.launch.roster import Roster
from miles.schedule.elastic import Balance, Reading, Split

_HANDOVER = ".handover"


class Idleness:
    """A rollout plane, and for how many seconds it has had nothing to do."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._under_way = 0
        self._since: float | None = time.monotonic()
        self._total = 0.0

    async def produce(self, prompt: Prompt) -> Group:
        self._under_way += 1
        if self._since is not None:
            self._total, self._since = self.seconds(), None
        try:
            return await self._rollout.produce(prompt)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._since = time.monotonic()

    def seconds(self) -> float:
        return self._total + (0.0 if self._since is None else time.monotonic() - self._since)


class Overheard:
    """A journal that also tells ``hear`` of everything."""

    def __init__(self, journal: Journal, hear: Callable[[Event], None]) -> None:
        self._journal, self._hear = journal, hear

    def __call__(self, event: Event) -> None:
        self._journal(event)
        self._hear(event)

    def commit(self) -> None:
        self._journal.commit()

    def marks(self) -> Mapping[str, int]:
        return self._journal.marks()


class Elastic:
    """Is told of every event (``hear``), and acts ``between_steps``."""

    def __init__(
        self,
        config: Config,
        run: Path,
        roster: Roster,
        trainer: MendedTrainer,
        idleness: Idleness,
        journal: Journal,
    ) -> None:
        self._balance = Balance(split_of(config), bounds_of(config), patience=config.bounds.elastic_patience)
        self._run, self._roster, self._trainer, self._idleness = run, roster, trainer, idleness
        self._journal = journal
        self._step, self._steps, self._began = 0, 0, 0.0
        self._reading: Reading | None = None
        self._joining: asyncio.Task[Seat] | None = None

    def hear(self, event: Event) -> None:
        """Read what each plane waited for in the step that ends."""
        if isinstance(event, RunStarted):
            self._steps = event.steps
        elif isinstance(event, Progress) and event.step != self._step:
            self._step, self._began = event.step, self._idleness.seconds()
        elif isinstance(event, StepFinished):
            self._reading = Reading(
                seconds=event.seconds["step"],
                trainer_waited=event.seconds["rollout"],
                rollout_waited=self._idleness.seconds() - self._began,
            )

    async def between_steps(self) -> None:
        reading, self._reading = self._reading, None
        if self._step >= self._steps:
            return  # no step is left for which it would be of use
        if self._joining is not None:
            await self._join(self._joining)
        elif reading is not None and (target := self._balance.see(reading)) is not None:
            await self._move(target, reading)

    async def close(self) -> None:
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)

    async def _move(self, target: Split, reading: Reading) -> None:
        more = target.engines - self._balance.split.engines
        numbers = sorted(self._roster.numbers.items(), key=lambda item: item[1])
        if more < 0:
            if not any(seat.open for seat, _ in numbers[1:]):
                return  # the others are on their way back
            await self._roster.leave(numbers[0][0])  # its devices lie next to the trainer's
        try:
            await self._resize(target.ranks)
        except TrainerError as error:
            self._balance.failed(target)
            self._trainer.tell(f"Devices were not moved, for the trainer cannot have {target.ranks} ranks: {error}.")
            if more < 0:
                self._begin_joining(numbers[0][1])
            return
        self._moved(target, _said(reading))
        if more > 0:
            self._begin_joining(numbers[0][1] - 1)

    def _begin_joining(self, number: int) -> None:
        self._joining = asyncio.create_task(self._roster.start(number), name="one more engine starts")

    async def _join(self, joining: asyncio.Task[Seat]) -> None:
        """Look after an engine that is to come: one that cannot gives its device back."""
        if not joining.done():
            return
        self._joining = None
        self._balance.disturbed()
        try:
            await joining
        except MilesError as error:
            here = self._balance.split
            back = self._balance.bounds.toward_rollout(here, -1)
            self._balance.failed(here)
            await self._resize(back.ranks)
            self._moved(back, f"one more engine could not be started ({str(error).splitlines()[0]})")

    async def _resize(self, ranks: int) -> None:
        with _emptied(self._run / _HANDOVER) as folder:
            await self._trainer.resize(ranks, folder)

    def _moved(self, split: Split, why: str) -> None:
        self._balance.moved(split)
        self._journal(DevicesMoved(step=self._step, ranks=split.ranks, engines=split.engines, why=why))


@contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _said(reading: Reading) -> str:
    trainer, rollout, whole = reading.trainer_waited, reading.rollout_waited, reading.seconds
    who = "the trainer waited" if trainer > rollout else "rollout waited"
    for_whom = "groups" if trainer > rollout else "tickets"
    return f"{who} {max(trainer, rollout):.2f} of {whole:.2f} s for {for_whom}"
