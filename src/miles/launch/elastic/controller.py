"""Elastic controller: measures how long trainer and engines wait, and moves a GPU between two steps.

    to engines   the trainer is restarted with fewer ranks from its saved state; an engine starts on the free GPU and
                 joins when it is ready
    to trainer   an engine gives its requests back and stops; the trainer is restarted with more ranks

The loop waits while the trainer restarts. Finished groups and requests in flight are kept.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from miles.backends.remote.pool.engine_pool import EngineSlot
from miles.core.errors import MilesError, TrainerError
from miles.core.events import DevicesMoved, Event, Progress, RunStarted, StepFinished
from miles.core.protocols import Journal, Rollout
from miles.core.types import Group, Prompt
from miles.launch.config import Config
from miles.launch.distributed.resilient_trainer import ResilientTrainer
from miles.launch.elastic.engine_registry import EngineRegistry
from miles.launch.plan.topology import get_split, get_split_bounds
from miles.schedule.elastic import DeviceSplit, ElasticBalancer, StepTimes

_HANDOVER_FOLDER = ".handover"


class IdleTimer:
    """A rollout, and the seconds in which it had nothing to do."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._in_flight = 0
        self._since: float | None = time.monotonic()
        self._total = 0.0

    async def produce(self, prompt: Prompt) -> Group:
        self._in_flight += 1
        if self._since is not None:
            self._total = self.seconds()
            self._since = None
        try:
            return await self._rollout.produce(prompt)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._since = time.monotonic()

    def seconds(self) -> float:
        return self._total + (0.0 if self._since is None else time.monotonic() - self._since)


class ObservedJournal:
    """A journal that also calls ``observe`` with every event."""

    def __init__(self, journal: Journal, observe: Callable[[Event], None]) -> None:
        self._journal = journal
        self._observe = observe

    def __call__(self, event: Event) -> None:
        self._journal(event)
        self._observe(event)

    def commit(self) -> None:
        self._journal.commit()

    def offsets(self) -> Mapping[str, int]:
        return self._journal.offsets()


class ElasticController:
    """``observe`` is called with every event, and ``between_steps`` moves GPUs."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        registry: EngineRegistry,
        trainer: ResilientTrainer,
        idle: IdleTimer,
        journal: Journal,
    ) -> None:
        self._balance = ElasticBalancer(
            get_split(config), get_split_bounds(config), window=config.elastic.elastic_patience
        )
        self._run_dir = run_dir
        self._registry = registry
        self._trainer = trainer
        self._idle = idle
        self._journal = journal
        self._step = 0
        self._num_steps = 0
        self._idle_at_start = 0.0
        self._times: StepTimes | None = None
        self._joining: asyncio.Task[EngineSlot] | None = None

    def observe(self, event: Event) -> None:
        """Measure how long trainer and engines waited in each step."""
        if isinstance(event, RunStarted):
            self._num_steps = event.steps
        elif isinstance(event, Progress) and event.step != self._step:
            self._step = event.step
            self._idle_at_start = self._idle.seconds()
        elif isinstance(event, StepFinished):
            self._times = StepTimes(
                seconds=event.seconds["step"],
                trainer_waited=event.seconds["rollout"],
                rollout_waited=self._idle.seconds() - self._idle_at_start,
            )

    async def between_steps(self) -> None:
        times, self._times = self._times, None
        if self._step >= self._num_steps:
            return  # no step is left
        if self._joining is not None:
            await self._join(self._joining)
        elif times is not None and (target := self._balance.observe(times)) is not None:
            await self._move(target, times)

    async def close(self) -> None:
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)

    async def _move(self, target: DeviceSplit, times: StepTimes) -> None:
        more = target.engines - self._balance.split.engines
        servers = sorted(self._registry.own_servers.items(), key=lambda item: item[1])
        if more < 0:
            if not any(slot.open for slot, _ in servers[1:]):
                return  # the others are restarting
            await self._registry.remove(servers[0][0])  # its GPUs are next to the trainer's
        try:
            await self._resize(target.ranks)
        except TrainerError as error:
            self._balance.on_failed(target)
            self._trainer.report(f"No GPU was moved: the trainer cannot have {target.ranks} ranks: {error}.")
            if more < 0:
                self._begin_joining(servers[0][1])
            return
        self._record_move(target, _describe_wait(times))
        if more > 0:
            self._begin_joining(servers[0][1] - 1)

    def _begin_joining(self, index: int) -> None:
        self._joining = asyncio.create_task(self._registry.start(index), name="start one more engine")

    async def _join(self, joining: asyncio.Task[EngineSlot]) -> None:
        """Check on an engine that is starting; if it failed, its GPU goes back to the trainer."""
        if not joining.done():
            return
        self._joining = None
        self._balance.reset()
        try:
            await joining
        except MilesError as error:
            current = self._balance.split
            back = self._balance.bounds.toward_rollout(current, -1)
            self._balance.on_failed(current)
            await self._resize(back.ranks)
            self._record_move(back, f"one more engine could not be started ({str(error).splitlines()[0]})")

    async def _resize(self, ranks: int) -> None:
        with _temporary_folder(self._run_dir / _HANDOVER_FOLDER) as folder:
            await self._trainer.resize(ranks, folder)

    def _record_move(self, split: DeviceSplit, why: str) -> None:
        self._balance.on_moved(split)
        self._journal(DevicesMoved(step=self._step, ranks=split.ranks, engines=split.engines, reason=why))


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _describe_wait(times: StepTimes) -> str:
    if times.trainer_waited > times.rollout_waited:
        return f"the trainer waited {times.trainer_waited:.2f} of {times.seconds:.2f} s for groups"
    return f"rollout waited {times.rollout_waited:.2f} of {times.seconds:.2f} s for tickets"
