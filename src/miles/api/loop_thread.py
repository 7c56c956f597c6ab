"""An event loop in a thread of its own: plain and async callers, with or without a running loop, use it alike.

plain caller    run(work) ---> task on the loop ---> result; an interrupt cancels the task
async caller    await wait(work) ---> task on the loop ---> result; cancelling it cancels the task
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from miles.core.errors import UsageError

T = TypeVar("T")
_POLL_SECONDS = 0.2


class LoopThread:
    """Runs coroutines on its own event loop until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work()`` and return its result."""
        future = self._submit(work)
        try:
            return wait_for(future)
        except KeyboardInterrupt:
            future.cancel()
            raise

    async def wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await ``work()``, which runs on this loop."""
        return await asyncio.wrap_future(self._submit(work))

    def close(self) -> None:
        """Stop the loop; closing it again does nothing."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        if self._loop.is_closed():
            raise UsageError("this policy is closed; open another one.")
        if threading.current_thread() is self._thread:
            raise UsageError("a verb of a policy cannot be called from inside another one; call it after that returns.")
        return asyncio.run_coroutine_threadsafe(work(), self._loop)


def wait_for(future: Future[T]) -> T:
    """The result of a future; unlike a wait without a limit, it can be interrupted on every platform."""
    while not future.done():
        try:
            return future.result(_POLL_SECONDS)
        except TimeoutError:
            continue
    return future.result()
