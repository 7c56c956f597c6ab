"""A gate with two sides: many answers may be under way at once; a change of weights waits for all and holds new ones.

Who waits for whom: ``passing`` waits while a change is waiting or under way; ``closed`` waits until nobody passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Used on one event loop. Whoever wants to change goes before those who come later."""

    def __init__(self) -> None:
        self._passing = 0
        self._changes = 0
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._turn = asyncio.Lock()

    @property
    def passing(self) -> int:
        """How many are under way."""
        return self._passing

    @asynccontextmanager
    async def pass_through(self) -> AsyncIterator[None]:
        """Be under way."""
        while not self._open.is_set():
            await self._open.wait()
        self._passing += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._passing -= 1
            if not self._passing:
                self._empty.set()

    @asynccontextmanager
    async def closed(self, *, at_once: bool = False) -> AsyncIterator[None]:
        """Change something: one at a time, when nobody is under way; ``at_once`` does not wait for those who are."""
        self._changes += 1
        self._open.clear()
        try:
            async with self._turn:
                if not at_once:
                    await self._empty.wait()
                yield
        finally:
            self._changes -= 1
            if not self._changes:
                self._open.set()

    async def empty(self) -> None:
        """Wait until nobody is under way."""
        await self._empty.wait()
