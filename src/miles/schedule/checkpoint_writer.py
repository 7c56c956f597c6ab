"""Checkpoint saves of the loop: synchronous or in the background, one at a time.

save   ──begin──┬─────────────── training runs ──────────────►  save   ──begin──
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
from miles.schedule.checkpoints import CheckpointDirectory, CheckpointDraft, Cursor

T = TypeVar("T")


class CheckpointWriter:
    """Saves checkpoints written by ``write`` and reports each to the ``journal`` when it is complete.

    The time at which a background save completes, and whether a save that may fail succeeds, are not deterministic:
    such saves are reported as live events and not ``logged`` among the events that a resumed run repeats.
    """

    def __init__(
        self, checkpoints: CheckpointDirectory, write: Callable[[Path], Awaitable[None]], journal: Journal
    ) -> None:
        self.logged = not (checkpoints.background or checkpoints.forgiving)
        self._checkpoints = checkpoints
        self._write = write
        self._journal = journal
        self._background: asyncio.Task[None] | None = None

    async def save(self, cursor: Cursor, *, scheduled: bool, last: bool) -> None:
        """Save, or start a background save, after the previous save ended. The ``last`` save of a run must succeed."""
        await self.settle()
        self._journal.commit()
        may_fail = self._checkpoints.forgiving and not last
        with self._tolerate_failure(cursor, may_fail):
            draft = await self._checkpoints.begin(cursor, self._write)
            if self._checkpoints.background:
                self._background = asyncio.create_task(
                    self._finish_in_background(draft, may_fail), name=f"save {draft.name}"
                )
                return
            self._report_saved(cursor, self._checkpoints.finish(draft), scheduled=scheduled and self.logged)

    async def settle(self, *, wait: bool = True) -> None:
        """Raise the error of a finished background save, if any; with ``wait``, wait for it to finish."""
        if self._background is not None and (wait or self._background.done()):
            task, self._background = self._background, None
            await task

    async def drain_after_failure(self) -> None:
        """Let a background save finish when the run is failing, with a shorter timeout, ignoring its own failure."""
        if self._background is not None:
            self._checkpoints.shorten_timeout()
            with contextlib.suppress(CheckpointError):
                await self.settle()

    async def _finish_in_background(self, draft: CheckpointDraft, may_fail: bool) -> None:
        with self._tolerate_failure(draft.cursor, may_fail):
            name = await _run_in_thread(lambda: self._checkpoints.finish(draft), name=f"finish {draft.name}")
            self._report_saved(draft.cursor, name, scheduled=False)

    def _report_saved(self, cursor: Cursor, name: str, *, scheduled: bool) -> None:
        self._journal(Saved(step=cursor.step, name=name, scheduled=scheduled))

    @contextlib.contextmanager
    def _tolerate_failure(self, cursor: Cursor, may_fail: bool) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if not may_fail:
                raise
            self._journal(SaveFailed(step=cursor.step, reason=f"{error}; the run continues (--save-failure warn)"))


def _run_in_thread(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Run ``work`` in a daemon thread, for which program exit does not wait."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    Thread(target=run, name=name, daemon=True).start()
    return future
