"""Executors of blocking work: inline on the event loop's thread, or on a thread of their own.

``InlineExecutor`` blocks everything else meanwhile, so the order of all events depends on the program alone and a run
is bitwise reproducible. ``ThreadExecutor`` has one thread of its own, so that rollout and training overlap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Executor(Protocol):
    """Runs a blocking function and awaits its result; ``is_threaded``: on another thread than the caller's."""

    @property
    def is_threaded(self) -> bool: ...
    async def __call__(self, work: Callable[[], T]) -> T: ...
    def close(self) -> None: ...


class InlineExecutor:
    """Runs work at once on the calling thread."""

    is_threaded = False

    async def __call__(self, work: Callable[[], T]) -> T:
        result = work()
        await asyncio.sleep(0)  # let all who waited for the result run before the next work
        return result

    def close(self) -> None: ...


class ThreadExecutor:
    """Runs work in order on one thread of its own."""

    is_threaded = True

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def __call__(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
