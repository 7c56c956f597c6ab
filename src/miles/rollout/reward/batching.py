"""Dynamic request batching: requests that arrive while the server is busy are sent together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from miles.rollout.reward.types import GradingError, NonRetryableError

SendBatch = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]


class RequestBatcher:
    """Groups requests into calls of ``send`` with at most ``size`` each, at most ``concurrency`` calls at once.

    The first request is sent at once. A batch is whatever arrived while all calls were in flight; there is no timer.
    """

    def __init__(self, send: SendBatch, *, size: int, concurrency: int) -> None:
        self._send = send
        self._size = size
        self._concurrency = concurrency
        self._waiting: deque[tuple[Any, asyncio.Future[Any]]] = deque()
        self._calls: set[asyncio.Task[None]] = set()

    async def submit(self, request: Any) -> Any:
        """Send entry request and return its answer."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if len(self._calls) < self._concurrency:
            call = asyncio.create_task(self._drain())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return await answer

    async def _drain(self) -> None:
        """Send batch after batch until no request waits."""
        await asyncio.sleep(0)  # let requests of this loop iteration join
        while self._waiting:
            entries = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
            batch = [(request, answer) for request, answer in entries if not answer.done()]
            if batch:
                await self._send_batch(batch)

    async def _send_batch(self, batch: Sequence[tuple[Any, asyncio.Future[Any]]]) -> None:
        try:
            answers = await self._send([request for request, _ in batch])
            if len(answers) != len(batch):
                raise GradingError(f"the server gave {len(answers)} answers for {len(batch)} requests")
        except NonRetryableError as error:
            if len(batch) == 1:
                _fail(batch, error)
            else:  # entry request may be the cause; the others must not fail with it
                for entry in batch:
                    await self._send_batch([entry])
            return
        except Exception as error:  # every caller gets the error
            _fail(batch, error)
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)


def _fail(batch: Sequence[tuple[Any, asyncio.Future[Any]]], error: Exception) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
