"""A crew of workers that are asked: each question is dealt to one that has room, and again where that one was lost.

    ask --> place (waits for room) --> worker --> answer
                  ^                       |
                  +------- lost ----------+      its process, its actor or its node ended: asked again elsewhere

Each worker has a task of its own, which starts it, waits for its end, and starts it again. Who waits for whom: a
question for room and for its answer, with no deadline but that of whoever asked; the tasks for their workers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Protocol

from miles.core.errors import MilesError

# How many workers a question may be lost with before it is taken to be the cause.
_TRIES = 3
# How often in a row a worker may end without having answered anything before it is given up.
_FAILURES = 5
_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
# Seconds in which a worker lets go of a question that is not wanted any more.
_LETTING_GO = 5.0


class Lost(Exception):
    """A worker is gone, and with it what it was asked."""


class Hopeless(MilesError):
    """No worker is left, nor will be."""


class Home(Protocol):
    """Where a worker lives. ``open`` starts it, again and again if need be, and raises Lost where it cannot."""

    name: str

    async def open(self) -> None: ...
    async def ask(self, number: int, question: bytes) -> bytes: ...
    def cut(self, number: int) -> None: ...
    async def ended(self) -> str: ...
    async def close(self) -> None: ...


class _Shift:
    """A worker from when it came up until it was lost. ``spares``: it was ended by us, over another question."""

    def __init__(self, home: Home) -> None:
        self.home, self.load, self.answered, self.spares = home, 0, 0, False
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def end(self, why: str, *, spares: bool = False) -> None:
        if not self.over.done():
            self.over.set_result(why)
            self.spares = spares


class Crew:
    """At most ``most`` questions are with a worker at once. Workers start with the first question that is asked.

    ``tell`` is given a sentence about each that is lost.
    """

    def __init__(self, homes: Sequence[Home], *, most: int, tell: Callable[[str], None]) -> None:
        self._homes, self._most, self._tell = tuple(homes), most, tell
        self._shifts: list[_Shift] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._gone: dict[Home, str] = {}
        self._lives: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._numbers = count()

    async def ask(self, question: bytes) -> bytes:
        """The answer; Lost when several workers were lost over it, Hopeless when none is left."""
        if not self._lives:
            self._lives = [asyncio.create_task(self._life(home), name=f"life of {home.name}") for home in self._homes]
        tries = 0
        while True:
            shift = await self._place()
            try:
                return await self._asked(shift, question)
            except Lost as error:
                shift.end(str(error))
                tries += not shift.spares
                if tries == _TRIES:
                    raise Lost(f"{tries} workers were lost over it, the last as {error}") from error

    async def close(self) -> None:
        """End all workers; what they were asked is lost."""
        tasks = [*self._lives, *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for home in self._homes:
            self._gone.setdefault(home, f"{home.name} was ended")
        self._shifts.clear()
        await asyncio.gather(*(home.close() for home in self._homes))
        self._wake(len(self._waiting))

    # -- one question -----------------------------------------------------------------------

    async def _asked(self, shift: _Shift, question: bytes) -> bytes:
        number = next(self._numbers)
        asked = asyncio.ensure_future(shift.home.ask(number, question))
        try:
            answer = await asyncio.shield(asked)
        except asyncio.CancelledError:
            shift.home.cut(number)
            leaving = asyncio.create_task(self._let_go(shift, asked))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            raise
        except Lost:
            self._free(shift)
            raise
        shift.answered += 1
        self._free(shift)
        return answer

    async def _let_go(self, shift: _Shift, asked: asyncio.Future[bytes]) -> None:
        """Nobody waits for it any more. A worker that cannot stop working on it is ended."""
        try:
            await asyncio.wait_for(asked, _LETTING_GO)
        except TimeoutError:
            shift.end(f"{shift.home.name} went on with what nobody waits for, and was ended", spares=True)
        except Lost as error:
            shift.end(str(error))
        finally:
            self._free(shift)

    async def _place(self) -> _Shift:
        """A worker with room, the one with the least to do first; whoever waited longer has the first turn."""
        waited = False
        while True:
            found = None if self._waiting and not waited else self._roomiest()
            if found is not None:
                found.load += 1
                return found
            if len(self._gone) == len(self._homes):
                raise Hopeless("no worker is left: " + "; ".join(self._gone[home] for home in self._homes))
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            (self._waiting.appendleft if waited else self._waiting.append)(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake(1)  # it was its turn: the next one's now
                raise
            waited = True

    def _roomiest(self) -> _Shift | None:
        open_ones = [shift for shift in self._shifts if shift.load < self._most and not shift.over.done()]
        return min(open_ones, key=lambda shift: shift.load, default=None)

    def _free(self, shift: _Shift) -> None:
        shift.load -= 1
        self._wake(1)

    def _wake(self, turns: int) -> None:
        while turns and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                turns -= 1

    # -- one worker -------------------------------------------------------------------------

    async def _life(self, home: Home) -> None:
        failures = 0
        while True:
            try:
                await home.open()
            except (Lost, MilesError) as error:
                why, failures = str(error), failures + 1
            else:
                shift = _Shift(home)
                why = await self._served(shift)
                failures = 0 if shift.answered else failures + 1
            if failures == _FAILURES:
                break
            self._tell(f"{why}; it is started again.")
            await asyncio.sleep(0.0 if failures < 2 else min(_LONGEST_PAUSE, _PAUSE * 2 ** (failures - 2)))
        self._tell(f"{home.name} is given up: {why}.")
        self._gone[home] = why
        await home.close()
        self._wake(len(self._waiting))

    async def _served(self, shift: _Shift) -> str:
        """Let it be asked until it is lost; how that was."""
        self._shifts.append(shift)
        self._wake(self._most)
        ended = asyncio.ensure_future(shift.home.ended())
        try:
            await asyncio.wait((ended, shift.over), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                shift.end(ended.result())
        finally:
            ended.cancel()
            with suppress(asyncio.CancelledError):
                await ended
        self._shifts.remove(shift)
        await shift.home.close()
        return shift.over.result()
