"""Who is there to be given weights: servers that take requests, and those that wait for their first version.

All are told at once. A server that is lost on the way is dropped, and is no error of the others'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from miles.backends.sglang.client import Client, Lost
from miles.backends.sglang.fleet import Fleet, Seat, State
from miles.backends.sglang.lines import Line, line_to
from miles.core.errors import EngineError, SyncError
from miles.core.types import Version


class Present:
    """Ways into the servers of a ``fleet``. ``opened`` wait for their first weights; ``made`` were there before."""

    def __init__(self, fleet: Fleet, seconds: float) -> None:
        self._fleet, self._seconds = fleet, seconds
        self.opened: dict[Seat, Client] = {}
        self.made: dict[Seat, Line] = {}

    async def lines(self) -> list[Line]:
        """Servers that take requests, and those that wait for their first weights."""
        there = {seat: seat.client for seat in self._fleet.serving() if seat.client is not None} | self.opened
        made: list[Line] = []

        async def open_(seat: Seat, client: Client) -> None:
            try:
                self.made[seat] = await line_to(seat, client, self._seconds)
                made.append(self.made[seat])
            except EngineError as error:
                self.drop(seat, error if isinstance(error, Lost) else Lost(str(error)))

        await asyncio.gather(*(open_(seat, client) for seat, client in there.items()))
        return sorted(made, key=lambda line: line.seat.name)

    async def each(self, lines: Sequence[Line], word: Callable[[Line], Awaitable[Any]]) -> list[Line]:
        """Tell all at once, of whom some must be left; who is lost is dropped, and the first refusal raised."""
        await self.told(lines, word)
        return self.left(lines)

    async def told(self, lines: Sequence[Line], word: Callable[[Line], Awaitable[Any]]) -> None:
        """The first refusal is raised when all have answered."""
        results = await asyncio.gather(*(word(line) for line in lines), return_exceptions=True)
        refusals: list[BaseException] = []
        for line, result in zip(lines, results, strict=True):
            if isinstance(result, Lost):
                self.drop(line.seat, result)
            elif isinstance(result, BaseException):
                refusals.append(result)
        if refusals:
            raise refusals[0]

    def there(self, lines: Sequence[Line]) -> list[Line]:
        return [line for line in lines if line.seat.state is State.SERVING or line.seat in self.opened]

    def left(self, lines: Sequence[Line]) -> list[Line]:
        left = self.there(lines)
        if not left:
            raise Lost(self.nobody())
        return left

    async def somebody(self, version: Version) -> None:
        """Wait until some server is there: one that was lost is on its way back, or given up for good."""
        while not (self._fleet.serving() or self.opened):
            if all(seat.state is State.GONE for seat in self._fleet.seats):
                raise SyncError(f"{called(version)} was not published: {self.nobody()}")
            await self._fleet.news()

    def drop(self, seat: Seat, why: Lost) -> None:
        self.opened.pop(seat, None)
        self._fleet.drop(seat, str(why))
        self._fleet.trouble(seat, why)

    async def look_round(self) -> None:
        """Drop whoever does not answer: some server was lost with what all of them were sent."""
        for seat, client in [*((s, s.client) for s in self._fleet.serving()), *self.opened.items()]:
            why = None if client is None else await client.healthy(10.0, generate=False)
            if why is not None:
                self.drop(seat, Lost(why))

    def nobody(self) -> str:
        told = [f"{seat.name}: {seat.why}" for seat in self._fleet.seats if seat.why]
        return f"no server is there to take it ({'; '.join(told) or 'none has started'})"


def called(version: Version) -> str:
    return f"{version.policy} version {version.number}"
