"""Service store: the state of the service and its journal; a change is durable before it is visible.

Who waits for whom: ``commit`` waits for the journal, then changes the state and wakes those who wait for a request to
end. ``compact`` waits until no commit is under way and holds new ones, so that no record is lost between the state and
the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from miles.backends.service.journal import Record, RequestJournal
from miles.backends.service.state import ServiceRequest, ServiceState

__all__ = ["ServiceStore"]


class ServiceStore:
    """State and journal of the service in ``folder``. Used on one event loop."""

    def __init__(self, folder: Path, *, clock: Callable[[], float], state: ServiceState | None = None) -> None:
        self.folder = folder
        self.clock = clock
        self.state = state or ServiceState()
        self.journal = RequestJournal(folder)
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._accepting: dict[str, asyncio.Future[None]] = {}
        self._commits = 0
        self._changed = asyncio.Condition()
        self._is_held = False

    def open(self) -> list[Record]:
        """Read the journal into the state; returns its records."""
        records = self.journal.open()
        for record in records:
            self.state.apply(record)
        return records

    async def commit(self, *records: Record) -> None:
        """Make records durable, then take them over."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_held)
            self._commits += 1
        try:
            await self.journal.append(*records)
            for record in records:
                self.state.apply(record)
                self._wake(record)
        finally:
            async with self._changed:
                self._commits -= 1
                self._changed.notify_all()

    async def accept(self, request_id: str, *records: Record) -> bool:
        """Commit a request once, also if it arrives twice at the same time; returns whether this call did it."""
        if request_id in self.state.requests:
            return False
        if (first := self._accepting.get(request_id)) is not None:
            await asyncio.shield(first)
            return False
        done = self._accepting[request_id] = asyncio.get_running_loop().create_future()
        try:
            await self.commit(*records)
            return True
        finally:
            del self._accepting[request_id]
            done.set_result(None)

    async def compact(self, prepare: Callable[[], Awaitable[None]]) -> None:
        """Shorten the journal to what builds the current state; ``prepare`` runs when nothing else is committed."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_held)
            self._is_held = True
            await self._changed.wait_for(lambda: not self._commits)
        try:
            await prepare()
            await self.journal.rewrite(self.state.dump())
        finally:
            async with self._changed:
                self._is_held = False
                self._changed.notify_all()

    async def wait(self, request: ServiceRequest, seconds: float) -> bool:
        """Wait until a request has ended; returns whether it has."""
        if request.is_pending:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(request.id, []).append(waiter)
            try:
                await asyncio.wait_for(waiter, seconds)
            except TimeoutError:
                waiting = self._waiters.get(request.id, [])
                if waiter in waiting:
                    waiting.remove(waiter)
        return not request.is_pending

    def _wake(self, record: Record) -> None:
        if record.kind == "result":
            ended = [record.content["id"]]
        elif record.kind == "pass":
            ended = [request_id for request_id, _, _, _, is_last in record.content["parts"] if is_last]
        else:
            return
        for request_id in ended:
            for waiter in self._waiters.pop(request_id, ()):
                if not waiter.done():
                    waiter.set_result(None)

    def close(self) -> None:
        """Close the journal."""
        self.journal.close()
