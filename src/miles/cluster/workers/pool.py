"""Worker pool: dispatches each request to the least loaded worker, and retries it elsewhere if that worker is lost.

    call --> acquire (waits for a free worker) --> worker --> response
                     ^                               |
                     +------------- lost ------------+      its process, its actor or its node ended

Each worker has a task of its own, which starts it, waits for its end, and restarts it. Who waits for whom: a request
for a free worker and for its response, with no timeout but the caller's; the tasks for their workers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Protocol

from miles.cluster.process import restart_delay
from miles.core.errors import MilesError

# How many workers may be lost with a request before the request is taken for the cause.
_MAX_TRIES = 3
# How often in a row a worker may end without a response before it is given up.
_MAX_FAILURES = 5
_MAX_DELAY = 30.0
# Seconds in which a worker must stop a cancelled request.
_CANCEL_SECONDS = 5.0


class WorkerLost(Exception):
    """A worker has ended, and its requests are lost."""


class AllWorkersLost(MilesError):
    """No worker is left, and none will be restarted."""


class WorkerHost(Protocol):
    """Runs a worker. ``open`` starts it, any number of times, and raises ``WorkerLost`` if it cannot."""

    name: str

    async def open(self) -> None: ...
    async def call(self, number: int, request: bytes) -> bytes: ...
    def cancel(self, number: int) -> None: ...
    async def wait_ended(self) -> str: ...
    async def close(self) -> None: ...


class _RunningWorker:
    """A worker from its start to its end. ``ended_by_pool``: because of another request, which it did not cancel."""

    def __init__(self, host: WorkerHost) -> None:
        self.host = host
        self.load = 0
        self.num_responses = 0
        self.ended_by_pool = False
        self.end_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def end(self, reason: str, *, by_pool: bool = False) -> None:
        if not self.end_reason.done():
            self.end_reason.set_result(reason)
            self.ended_by_pool = by_pool


class WorkerPool:
    """Sends each worker at most ``max_concurrency`` requests at once. Workers start with the first request.

    ``log`` is called with a sentence about each worker that is lost.
    """

    def __init__(self, hosts: Sequence[WorkerHost], *, max_concurrency: int, log: Callable[[str], None]) -> None:
        self._hosts = tuple(hosts)
        self._max_concurrency = max_concurrency
        self._log = log
        self._workers: list[_RunningWorker] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._given_up: dict[WorkerHost, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._cancelling: set[asyncio.Task[None]] = set()
        self._numbers = count()

    async def call(self, request: bytes) -> bytes:
        """The response; ``WorkerLost`` if several workers were lost with it, ``AllWorkersLost`` if none is left."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._supervise(host), name=f"worker {host.name}") for host in self._hosts
            ]
        tries = 0
        while True:
            worker = await self._acquire()
            try:
                return await self._call_worker(worker, request)
            except WorkerLost as error:
                worker.end(str(error))
                tries += not worker.ended_by_pool
                if tries == _MAX_TRIES:
                    raise WorkerLost(f"{tries} workers were lost with it, the last because {error}") from error

    async def close(self) -> None:
        """End all workers; their requests are lost."""
        tasks = [*self._tasks, *self._cancelling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for host in self._hosts:
            self._given_up.setdefault(host, f"{host.name} was ended")
        self._workers.clear()
        await asyncio.gather(*(host.close() for host in self._hosts))
        self._wake(len(self._waiting))

    # -- one request ------------------------------------------------------------------------

    async def _call_worker(self, worker: _RunningWorker, request: bytes) -> bytes:
        number = next(self._numbers)
        call = asyncio.ensure_future(worker.host.call(number, request))
        try:
            response = await asyncio.shield(call)
        except asyncio.CancelledError:
            worker.host.cancel(number)
            task = asyncio.create_task(self._wait_cancelled(worker, call))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)
            raise
        except WorkerLost:
            self._release(worker)
            raise
        worker.num_responses += 1
        self._release(worker)
        return response

    async def _wait_cancelled(self, worker: _RunningWorker, call: asyncio.Future[bytes]) -> None:
        """End a worker that does not stop a cancelled request."""
        try:
            await asyncio.wait_for(call, _CANCEL_SECONDS)
        except TimeoutError:
            worker.end(f"{worker.host.name} did not stop a cancelled request and was ended", by_pool=True)
        except WorkerLost as error:
            worker.end(str(error))
        finally:
            self._release(worker)

    async def _acquire(self) -> _RunningWorker:
        """The least loaded worker with a free place; requests that waited longer come first."""
        waited = False
        while True:
            worker = None if self._waiting and not waited else self._least_loaded()
            if worker is not None:
                worker.load += 1
                return worker
            if len(self._given_up) == len(self._hosts):
                raise AllWorkersLost("no worker is left: " + "; ".join(self._given_up[host] for host in self._hosts))
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            (self._waiting.appendleft if waited else self._waiting.append)(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake(1)  # pass the turn on
                raise
            waited = True

    def _least_loaded(self) -> _RunningWorker | None:
        limit = self._max_concurrency
        free = [worker for worker in self._workers if worker.load < limit and not worker.end_reason.done()]
        return min(free, key=lambda worker: worker.load, default=None)

    def _release(self, worker: _RunningWorker) -> None:
        worker.load -= 1
        self._wake(1)

    def _wake(self, turns: int) -> None:
        while turns and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                turns -= 1

    # -- one worker -------------------------------------------------------------------------

    async def _supervise(self, host: WorkerHost) -> None:
        failures = 0
        while True:
            try:
                await host.open()
            except (WorkerLost, MilesError) as error:
                reason = str(error)
                failures += 1
            else:
                worker = _RunningWorker(host)
                reason = await self._run(worker)
                failures = 0 if worker.num_responses else failures + 1
            if failures == _MAX_FAILURES:
                break
            self._log(f"{reason}; it is restarted.")
            await asyncio.sleep(restart_delay(failures, longest=_MAX_DELAY))
        self._log(f"{host.name} is given up: {reason}.")
        self._given_up[host] = reason
        await host.close()
        self._wake(len(self._waiting))

    async def _run(self, worker: _RunningWorker) -> str:
        """Dispatch requests to a worker until it ends; returns why it ended."""
        self._workers.append(worker)
        self._wake(self._max_concurrency)
        ended = asyncio.ensure_future(worker.host.wait_ended())
        try:
            await asyncio.wait((ended, worker.end_reason), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                worker.end(ended.result())
        finally:
            ended.cancel()
            with suppress(asyncio.CancelledError):
                await ended
        self._workers.remove(worker)
        await worker.host.close()
        return worker.end_reason.result()
