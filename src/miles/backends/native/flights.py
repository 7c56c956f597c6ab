"""Steps on their way: launched before the one before has landed, and absorbed in their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from miles.backends.native.order import Flight, Order
from miles.backends.native.plan import Plan
from miles.backends.native.scheduler import Scheduler
from miles.backends.native.sequence import Sequence
from miles.core.types import Version


class Launches(Protocol):
    """Who makes steps."""

    def launch(self, order: Order) -> Flight: ...


class Flights:
    """At most ``depth`` steps are in flight when the next is planned.

    ``late`` are requests found ended by somebody who could not tell anyone, ``trouble`` is what went wrong then;
    both wait for who can.
    """

    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        self.aloft: list[tuple[Plan, Flight, Version]] = []
        self.late: list[Sequence] = []
        self.trouble: Exception | None = None
        self._scheduler = scheduler
        self._depth = depth

    @property
    def pending(self) -> bool:
        """Is anything in flight, or to be told of?"""
        return bool(self.aloft or self.late or self.trouble)

    def step(self, runner: Launches, version: Version) -> list[Sequence]:
        """The scheduler decides, the runner obeys, the sequences remember; returns those that ended."""
        scheduler = self._scheduler
        ended = self.ground() if self.aloft and scheduler.stuck() else []
        plan = scheduler.plan()
        if plan is None:
            return ended + self.ground()
        flight = runner.launch(plan.order)
        scheduler.promise(plan)
        self.aloft.append((plan, flight, version))
        return ended + self.ground(keep=self._depth)

    def steps(self, runner: Launches, version: Version, on: Callable[[], bool]) -> list[Sequence]:
        """Step after step while something is in flight, nobody ended and it may go ``on``; returns those that ended."""
        ended = self.step(runner, version)
        while self.aloft and not ended and on():
            ended = self.step(runner, version)
        return ended

    def ground(self, keep: int = 0) -> list[Sequence]:
        """Let what is in flight land, but for the last ``keep`` steps; returns who ended."""
        ended: list[Sequence] = []
        while len(self.aloft) > keep:
            plan, flight, version = self.aloft.pop(0)
            ended += self._scheduler.absorb(plan, flight.land(), version)
        return ended

    def ground_quietly(self) -> None:
        """Let everything land on behalf of somebody whom neither the ended nor an error concern."""
        try:
            self.late += self.ground()
        except Exception as error:
            self.trouble = error

    def overdue(self) -> list[Sequence]:
        """Who ended in the meantime; raises what went wrong in the meantime."""
        late, trouble = self.late, self.trouble
        self.late, self.trouble = [], None
        if trouble is not None:
            raise trouble
        return late

    def forget(self) -> None:
        """Nothing that is in flight matters any more."""
        self.aloft, self.late, self.trouble = [], [], None
