"""A server on a node of a Ray cluster: an actor there starts and guards its process, and tells its address.

The run speaks HTTP to it as to any other. The actor ends with the run, and the server with the actor; when the node is
gone, the server is started on another that has room.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from miles.backends.sglang.client import Client, Lost
from miles.backends.sglang.launch import Connect
from miles.backends.sglang.process import GRACE_SECONDS, Command, Process
from miles.cluster.ray.reserve import Reserved, Spot, actor_at, device_ids
from miles.core.errors import EngineError

# Seconds an actor may take for a word of its own, beside what its server takes.
_WORD = 10.0


class Warden:
    """Has one server's process on the node it is on."""

    def __init__(self, name: str, log: Path) -> None:
        self._process = Process(name, log)

    def start(self, command: Command) -> tuple[str, int]:
        """Start the server where other nodes reach it; its address."""
        host = ray.util.get_node_ip_address()
        if not command.words[0]:  # whatever runs here
            command = replace(command, words=(sys.executable, *command.words[1:]))
        return host, self._process.start(command, host)

    def wait(self) -> str:
        """How it ended, when it has."""
        return self._process.wait()

    def tail(self) -> str:
        return self._process.tail()

    def end(self) -> None:
        self._process.end()


class Hosted:
    """Implements ``Home``: engine ``number`` of those that were placed."""

    def __init__(
        self, name: str, number: int, command: Command, log: Path, connect: Connect, reserved: Reserved, seconds: float
    ) -> None:
        self.name = name
        words = ("", *command.words[1:]) if command.words[0] == sys.executable else command.words
        self._number, self._command, self._log = number, replace(command, words=words), log.resolve()
        self._connect, self._reserved, self._seconds = connect, reserved, seconds
        self._actor: ActorHandle[Any] | None = None
        self._ended: Future[str] | None = None
        self._client: Client | None = None
        self._host = ""

    async def open(self) -> Client:
        """Start it where there is room, and wait until it answers; says with the end of its log why it does not."""
        await self.close()
        deadline = time.monotonic() + self._seconds
        try:
            spot = await asyncio.to_thread(self._reserved.engine, self._number)
            command = replace(self._command, environment={**self._command.environment, **await self._devices(spot)})
            self._actor = actor_at(spot, self._reserved.need.kind, Warden, self.name, self._log, threads=4)
            self._host, port = await self._said("start", command, seconds=deadline - time.monotonic())
        except (RayError, TimeoutError) as error:
            await self.close()
            raise Lost(f"{self.name} could not be started on the cluster: {_first(error)}") from error
        assert self._actor is not None
        self._ended = self._actor.wait.remote().future()
        self._client = client = self._connect(f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}")
        while True:
            if (why := self.alive()) is not None:
                raise Lost(f"{why} while it started; {await self._tail()}")
            if await client.healthy(5.0, generate=False) is None:
                await client.look()
                return client
            if time.monotonic() > deadline:
                said = await self._tail()
                await self.close()
                raise Lost(f"{self.name} was not ready within {self._seconds:g} s (--rollout-start-timeout); {said}")
            await asyncio.sleep(0.1)

    def alive(self) -> str | None:
        """How its process ended, or that its actor did."""
        if self._ended is None or not self._ended.done():
            return None
        error = self._ended.exception()
        if error is None:
            return f"{self._ended.result()} on {self._host}"
        return f"{self.name} was lost with its actor on {self._host}: {_first(error)}"

    async def close(self) -> None:
        """End it, kindly first where its actor still answers."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        actor, ended = self._actor, self._ended
        if actor is not None:
            if ended is not None and not ended.done():
                with suppress(RayError, TimeoutError):
                    await self._said("end", seconds=GRACE_SECONDS + _WORD)
            self._actor = self._ended = None
            ray.kill(actor)

    async def _said(self, verb: str, *content: Any, seconds: float) -> Any:
        """What the actor answers."""
        assert self._actor is not None
        answer = getattr(self._actor, verb).remote(*content).future()
        return await asyncio.wait_for(asyncio.wrap_future(answer), seconds)

    async def _tail(self) -> str:
        try:
            return f"the end of {self._log} on {self._host}:\n{await self._said('tail', seconds=_WORD)}"
        except (RayError, TimeoutError) as error:
            return f"its log on {self._host} cannot be read: {_first(error)}"

    async def _devices(self, spot: Spot) -> dict[str, str]:
        if self._reserved.need.kind == "CPU":
            return {}
        found = await asyncio.to_thread(device_ids, spot)
        if len(found) != spot.count:
            raise EngineError(f"{self.name} is to have {spot.count} devices, and Ray gave it {', '.join(found)}")
        # ROCm reads both, and Ray has set the second for the actor alone.
        return dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), ",".join(found))


def _first(error: BaseException) -> str:
    """An error in a line: Ray goes on for many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
