"""Servers as processes of this run, each with its own log; and servers that run elsewhere, which are only visited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from miles.backends.sglang.client import Client, Lost
from miles.backends.sglang.process import Command, Process

LOOPBACK = "127.0.0.1"

Connect = Callable[[str], Client]
"""A client of the server at an address."""


class Home(Protocol):
    """Where a server lives. ``open`` brings it about that it answers; ``alive`` says no when it is known to be gone."""

    async def open(self) -> Client: ...
    def alive(self) -> str | None: ...
    async def close(self) -> None: ...


class Launched:
    """A server that this run starts on this machine, and ends with it, however the run ends."""

    def __init__(self, name: str, command: Command, log: Path, connect: Connect, *, seconds: float) -> None:
        self.name = name
        self._command, self._connect, self._seconds = command, connect, seconds
        self._process = Process(name, log)
        self._client: Client | None = None

    @property
    def pid(self) -> int | None:
        """Of the program that guards it, the parent of the server's own."""
        return self._process.pid

    async def open(self) -> Client:
        """Start it, and wait until it answers; says with the end of its log why it does not."""
        await self.close()
        port = self._process.start(self._command, LOOPBACK)
        self._client = client = self._connect(f"http://{LOOPBACK}:{port}")
        deadline = time.monotonic() + self._seconds
        while True:
            if (why := self.alive()) is not None:
                raise Lost(f"{why} while it started; {self._said()}")
            if await client.healthy(5.0, generate=False) is None:
                await client.look()
                return client
            if time.monotonic() > deadline:
                said = self._said()
                await self.close()
                raise Lost(f"{self.name} was not ready within {self._seconds:g} s (--rollout-start-timeout); {said}")
            await asyncio.sleep(0.1)

    def alive(self) -> str | None:
        """How its process ended, if it did."""
        return self._process.alive()

    def _said(self) -> str:
        return f"the end of {self._process.log}:\n{self._process.tail()}"

    async def close(self) -> None:
        """End it, kindly first."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        await asyncio.to_thread(self._process.end)


class Visited:
    """A server that runs already, at ``url``; it is never started or ended here."""

    def __init__(self, name: str, url: str, connect: Connect, *, seconds: float) -> None:
        self.name = name
        self._url, self._connect, self._seconds = url, connect, seconds
        self._client: Client | None = None

    async def open(self) -> Client:
        """Wait until it answers."""
        await self.close()
        self._client = client = self._connect(self._url)
        deadline = time.monotonic() + self._seconds
        while (why := await client.healthy(5.0, generate=False)) is not None:
            if time.monotonic() > deadline:
                raise Lost(f"{self.name} at {self._url} does not answer: {why}")
            await asyncio.sleep(0.5)
        await client.look()
        return client

    def alive(self) -> str | None:
        return None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None
