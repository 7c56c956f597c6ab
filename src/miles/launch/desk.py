"""Where a run that goes on answers ``miles engines``: questions at once, changes between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from miles.core.errors import MilesError, UsageError
from miles.launch.requests import Answer, Box, Request
from miles.launch.roster import Roster

# Seconds between two looks at what was asked.
_LOOK = 0.25


class Desk:
    """``next_number`` says where one more server of the run's own goes; ``fixed`` why its own may not leave, if so."""

    def __init__(self, run: Path, roster: Roster, next_number: Callable[[], int], fixed: str = "") -> None:
        self._box, self._roster = Box(run), roster
        self._next_number, self._fixed = next_number, fixed
        self._waiting: list[tuple[str, Request]] = []
        self._changing: set[asyncio.Task[None]] = set()

    async def attend(self) -> None:
        """Answer questions, and keep what is to be changed for the end of the step."""
        self._box.open()
        while True:
            for name, request in self._box.waiting():
                if request.changes:
                    self._waiting.append((name, request))
                else:
                    self._box.answer(name, Answer(engines=self._roster.rows()))
            for task in [task for task in self._changing if task.done()]:
                self._changing.remove(task)
                task.result()
            await asyncio.sleep(_LOOK)

    def between_steps(self) -> None:
        """Begin what was asked for; it is answered when it is done, and the run goes on meanwhile."""
        while self._waiting:
            name, request = self._waiting.pop(0)
            self._changing.add(asyncio.create_task(self._change(name, request), name=f"request {name}"))

    async def close(self) -> None:
        """Nothing is asked of this run from now on."""
        for task in self._changing:
            task.cancel()
        await asyncio.gather(*self._changing, return_exceptions=True)
        self._box.close()

    async def _change(self, name: str, request: Request) -> None:
        done: list[str] = []
        problems: list[str] = []
        for deed in self._deeds(request):
            try:
                done.append(await deed())
            except UsageError as error:
                problems += error.problems
            except MilesError as error:
                problems.append(f"{str(error).rstrip('.')}.")
        self._box.answer(name, Answer(done=tuple(done), problems=tuple(problems), engines=self._roster.rows()))

    def _deeds(self, request: Request) -> Iterator[Callable[[], Awaitable[str]]]:
        """Who joins comes before who leaves, so that the last may be replaced."""
        for address in request.add:
            yield lambda address=address: self._add(address)
        for _ in range(request.add_servers):
            yield self._start
        for called in request.remove:
            yield lambda called=called: self._remove(called)

    async def _add(self, address: str) -> str:
        seat = await self._roster.visit(address)
        return f"{seat.name} at {address} has joined."

    async def _start(self) -> str:
        seat = await self._roster.start(self._next_number())
        assert seat.client is not None
        return f"{seat.name} was started at {seat.client.url} and has joined."

    async def _remove(self, called: str) -> str:
        seat = self._roster.found(called)
        if self._fixed and seat in self._roster.numbers:
            raise UsageError(f"{called} cannot be removed by hand: {self._fixed}.")
        await self._roster.leave(seat)
        return f"{seat.name} has left."
