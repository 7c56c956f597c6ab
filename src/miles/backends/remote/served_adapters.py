"""LoRA adapters of one server: the version that new requests name, and older ones until they are unused.

SGLang unloads an adapter only when all requests that name it have ended, and takes no other adapter until then. It does
not count a request as ended that was aborted while it waited to be scheduled (seen in 0.5.18): an unload would wait for
ever. Requests are therefore aborted when they have sampled a token, and an adapter with a request that was aborted
otherwise stays loaded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from miles.core.errors import EngineError

Unload = Callable[[str], Awaitable[None]]

# Longer than the request of an unload may take.
_UNLOAD_SECONDS = 90.0


class ServedAdapters:
    """``unload`` removes an adapter from the server. ``current`` is the name that new requests use.

    The last ``keep`` adapters stay, that one included: other programs may name them in requests of their own.
    """

    def __init__(self, unload: Unload) -> None:
        self._unload = unload
        self._requests: Counter[str] = Counter()
        self._retired: set[str] = set()
        self._kept: list[str] = []
        self.keep = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self.current: str | None = None
        self.stuck: set[str] = set()
        """Adapters that the server cannot unload."""
        self.on_stuck: Callable[[str], None] = lambda name: None

    def acquire(self) -> str | None:
        """The adapter of a new request, which must be released."""
        if self.current is not None:
            self._requests[self.current] += 1
        return self.current

    def release(self, name: str | None, *, is_counted: bool) -> None:
        """A request has ended; ``is_counted`` if the server knows that."""
        if name is None:
            return
        self._requests[name] -= 1
        if not is_counted and name not in self.stuck:
            self.stuck.add(name)
            self.on_stuck(name)
        self._unload_unused()

    def switch(self, name: str) -> None:
        """New requests use another adapter; the one before is unloaded as soon as no request uses it."""
        if self.current not in (None, name):
            assert self.current is not None
            self._kept.append(self.current)
        self._kept = [each for each in self._kept if each != name]
        num_old = max(0, len(self._kept) - self.keep + 1)
        self._retired |= set(self._kept[:num_old])
        del self._kept[:num_old]
        self.current = name
        self._unload_unused()

    async def wait_unloaded(self) -> None:
        """Wait for unloads that have begun: SGLang takes no adapter meanwhile."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_UNLOAD_SECONDS)

    def _unload_unused(self) -> None:
        for name in [each for each in self._retired if not self._requests[each]]:
            self._retired.discard(name)
            del self._requests[name]
            if name not in self.stuck:
                task = asyncio.create_task(self._unload_one(name), name=f"unload adapter {name}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _unload_one(self, name: str) -> None:
        try:
            await self._unload(name)
        except EngineError:
            self.stuck.add(name)
            self.on_stuck(name)

    async def unload_current(self) -> None:
        """Unload the adapters that are left, if no request uses them: the server goes on without this run."""
        names = [*self._kept, *([] if self.current is None else [self.current])]
        self._kept, self.current = [], None
        for name in names:
            if name not in self.stuck and not self._requests[name]:
                await self.wait_unloaded()
                await self._unload_one(name)

    async def close(self) -> None:
        """Wait for nothing more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
