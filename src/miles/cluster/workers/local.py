"""Local worker: a child process that handles requests of its parent, which is a run or a Ray actor."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from miles.cluster.oom_kill import OomKillMonitor
from miles.cluster.process import ChildProcess, python_environment
from miles.cluster.workers.pool import WorkerLost
from miles.cluster.workers.process import CODEC, LENGTH, WorkerSpec


class LocalWorker:
    """Implements ``WorkerHost``. It has ``seconds`` to start and to build its handler."""

    def __init__(self, spec: WorkerSpec, *, seconds: float) -> None:
        self.name = spec.name
        self._spec = spec
        self._seconds = seconds
        self._process: ChildProcess | None = None
        self._oom_kills = OomKillMonitor()
        self._writer: asyncio.StreamWriter | None = None
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._end_reason: asyncio.Future[str] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def open(self) -> None:
        await self.close()
        parent_end, child_end = socket.socketpair()
        with child_end:
            argv = [sys.executable, "-m", "miles.cluster.workers.process", str(child_end.fileno())]
            self._oom_kills = OomKillMonitor()
            try:
                self._process = ChildProcess(argv, env=python_environment(), pass_fds=(child_end.fileno(),))
            except OSError as error:
                parent_end.close()
                raise WorkerLost(f"{self.name} cannot be started: {error}") from error
        reader, self._writer = await asyncio.open_connection(sock=parent_end)
        self._send(pickle.dumps(self._spec))
        try:
            async with asyncio.timeout(self._seconds):
                verb, content = CODEC.unpack(await _read_message(reader))
        except TimeoutError as error:
            await self.close()
            raise WorkerLost(f"{self.name} was not ready within {self._seconds:g} s") from error
        except (OSError, EOFError) as error:
            ending = await self._describe_end()
            await self.close()
            raise WorkerLost(f"{self.name} ended with {ending} while it started") from error
        if verb != "ready":
            await self.close()
            raise WorkerLost(f"{self.name} cannot start: {content}")
        self._end_reason = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(reader, self._end_reason), name=f"read {self.name}")

    async def call(self, number: int, request: bytes) -> bytes:
        if self._reading is None or self._reading.done():
            raise WorkerLost(f"{self.name} has ended")
        self._oom_kills.note_alive()
        self._pending[number] = response = asyncio.get_running_loop().create_future()
        self._send(CODEC.pack("call", (number, request)))
        try:
            return await response
        finally:
            self._pending.pop(number, None)

    def cancel(self, number: int) -> None:
        if number in self._pending:
            self._send(CODEC.pack("cancel", number))

    async def wait_ended(self) -> str:
        assert self._end_reason is not None, "open comes first"
        return await asyncio.shield(self._end_reason)

    async def close(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.wait((reading,))
        self._fail_pending(f"{self.name} was ended")
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()
            self._writer = None
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    async def _read(self, reader: asyncio.StreamReader, end_reason: asyncio.Future[str]) -> None:
        try:
            while True:
                _, (number, response) = CODEC.unpack(await _read_message(reader))
                if (waiting := self._pending.get(number)) is not None and not waiting.done():
                    waiting.set_result(response)
        except (OSError, EOFError):
            reason = f"{self.name} ended with {await self._describe_end()}"
            end_reason.set_result(reason)
            self._fail_pending(reason)

    def _fail_pending(self, reason: str) -> None:
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_exception(WorkerLost(reason))

    def _send(self, message: bytes) -> None:
        assert self._writer is not None
        self._writer.write(LENGTH.pack(len(message)))
        self._writer.write(message)

    async def _describe_end(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):  # its connection has closed: it has ended, or is about to
            return self._oom_kills.describe_exit(await asyncio.to_thread(self._process.wait, 1.0))
        return "its connection closed"


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise EOFError from error


def build_worker_spec(name: str, factory: Any, environment: Mapping[str, str]) -> WorkerSpec:
    """The spec of a worker that imports what this process does; ``factory`` must be picklable by reference."""
    return WorkerSpec(
        name=name,
        factory=pickle.dumps(factory),
        path=tuple(os.path.abspath(entry) for entry in sys.path),
        cwd=os.getcwd(),
        environment=environment,
    )
