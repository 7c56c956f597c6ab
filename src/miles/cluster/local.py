"""The local runtime: everything in this process. Two ways to run a blocking piece of work.

``Inline`` runs it on the event loop's own thread: nothing else moves meanwhile, so the order of all
that happens is a function of the program alone and a run repeats to the bit. ``Threaded`` gives the
owner one thread of its own, so that the planes overlap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Run(Protocol):
    """Execute a blocking function and await its result. ``apart``: on another thread than who awaits it."""

    @property
    def apart(self) -> bool: ...
    async def __call__(self, work: Callable[[], T]) -> T: ...
    def close(self) -> None: ...


class Inline:
    """Work happens here and now."""

    apart = False

    async def __call__(self, work: Callable[[], T]) -> T:
        result = work()
        await asyncio.sleep(0)  # let everyone who waited for the result move before the next piece
        return result

    def close(self) -> None: ...


class Threaded:
    """Work happens on one thread of the owner's, a piece at a time, in order."""

    apart = True

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def __call__(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
