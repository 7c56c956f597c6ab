"""How the loop saves: in its turn, or behind its back, one checkpoint at a time.

save   ──begin──┬─────────────── training goes on ──────────────►  save   ──begin──
                └──finish (a thread)──► Saved                        waits for it
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import TypeVar

from miles.core.errors import CheckpointError
from miles.core.events import Saved, SaveFailed
from miles.core.protocols import Journal
from miles.schedule.recover import Checkpoints, Cursor, Draft

T = TypeVar("T")


class Saver:
    """Checkpoints that ``write`` fills, told to the ``journal`` when each is in place.

    When a save in the background is done is no function of the seed, nor is whether one succeeds that may fail: such
    saves are told of, and not ``logged`` among what a run repeats.
    """

    def __init__(self, checkpoints: Checkpoints, write: Callable[[Path], Awaitable[None]], journal: Journal) -> None:
        self.logged = not (checkpoints.background or checkpoints.forgiving)
        self._checkpoints, self._write, self._journal = checkpoints, write, journal
        self._behind: asyncio.Task[None] | None = None

    async def save(self, cursor: Cursor, *, scheduled: bool, last: bool) -> None:
        """Save, or begin to, after the save before has ended. A run's ``last`` save is never forgiven."""
        await self.settle()
        self._journal.commit()
        forgiven = self._checkpoints.forgiving and not last
        with self._forgiving(cursor, forgiven):
            draft = await self._checkpoints.begin(cursor, self._write)
            if self._checkpoints.background:
                self._behind = asyncio.create_task(self._finish_behind(draft, forgiven), name=f"save {draft.name}")
                return
            self._tell(cursor, self._checkpoints.finish(draft), scheduled=scheduled and self.logged)

    async def settle(self, *, wait: bool = True) -> None:
        """Raise what a save in the background failed of, once it has ended; with ``wait``, wait for that."""
        if self._behind is not None and (wait or self._behind.done()):
            ended, self._behind = self._behind, None
            await ended

    async def let_go(self) -> None:
        """The run is failing: let a save under way end, unless it hangs, and let its own failure be the lesser one."""
        if self._behind is not None:
            self._checkpoints.hurry()
            with contextlib.suppress(CheckpointError):
                await self.settle()

    async def _finish_behind(self, draft: Draft, forgiven: bool) -> None:
        with self._forgiving(draft.cursor, forgiven):
            name = await _in_thread(lambda: self._checkpoints.finish(draft), name=f"finish {draft.name}")
            self._tell(draft.cursor, name, scheduled=False)

    def _tell(self, cursor: Cursor, name: str, *, scheduled: bool) -> None:
        self._journal(Saved(step=cursor.step, name=name, scheduled=scheduled))

    @contextlib.contextmanager
    def _forgiving(self, cursor: Cursor, forgiven: bool) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if not forgiven:
                raise
            self._journal(SaveFailed(step=cursor.step, why=f"{error}; the run goes on (--save-failure warn)"))


def _in_thread(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """The result of ``work``, done by a thread that a program which ends does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failed)

    Thread(target=run, name=name, daemon=True).start()
    return future
