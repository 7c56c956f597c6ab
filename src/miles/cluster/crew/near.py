"""A worker that is a child process: how its parent, a run or an actor on a node, starts it and speaks to it."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from miles.cluster.crew.asked import Lost
from miles.cluster.crew.child import CODEC, LENGTH, Life

# Many processes side by side need no thread pools of numeric libraries, unless the user wants them.
_ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Near:
    """Implements ``Home``. It has ``seconds`` to start and to make what answers."""

    def __init__(self, life: Life, *, seconds: float) -> None:
        self.name, self._life, self._seconds = life.name, life, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._hearing: asyncio.Task[None] | None = None
        self._why: asyncio.Future[str] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def open(self) -> None:
        await self.close()
        here, there = socket.socketpair()
        with there:
            words = [sys.executable, "-m", "miles.cluster.crew.child", str(there.fileno())]
            path = os.pathsep.join(place for place in sys.path if place)
            around = {**_ALONE, **os.environ, "PYTHONPATH": path}
            try:
                self._process = subprocess.Popen(
                    words,
                    env=around,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(there.fileno(),),
                    start_new_session=True,  # Ctrl-C on the terminal is the parent's to act on
                )
            except OSError as error:
                here.close()
                raise Lost(f"{self.name} cannot be started: {error}") from error
        reader, self._writer = await asyncio.open_connection(sock=here)
        self._send(pickle.dumps(self._life))
        try:
            async with asyncio.timeout(self._seconds):
                verb, said = CODEC.unpack(await _message(reader))
        except TimeoutError as error:
            await self.close()
            raise Lost(f"{self.name} was not ready within {self._seconds:g} s") from error
        except (OSError, EOFError) as error:
            how = await self._ending()
            await self.close()
            raise Lost(f"{self.name} ended with {how} while it started") from error
        if verb != "ready":
            await self.close()
            raise Lost(f"{self.name} cannot begin: {said}")
        self._why = asyncio.get_running_loop().create_future()
        self._hearing = asyncio.create_task(self._hear(reader, self._why), name=f"hears {self.name}")

    async def ask(self, number: int, question: bytes) -> bytes:
        if self._hearing is None or self._hearing.done():
            raise Lost(f"{self.name} has ended")
        self._asked[number] = answer = asyncio.get_running_loop().create_future()
        self._send(CODEC.pack("ask", (number, question)))
        try:
            return await answer
        finally:
            self._asked.pop(number, None)

    def cut(self, number: int) -> None:
        if number in self._asked:
            self._send(CODEC.pack("cut", number))

    async def ended(self) -> str:
        assert self._why is not None, "it was opened before"
        return await asyncio.shield(self._why)

    async def close(self) -> None:
        hearing, self._hearing = self._hearing, None
        if hearing is not None:
            hearing.cancel()
            await asyncio.wait((hearing,))
        self._lose(f"{self.name} was ended")
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()
            self._writer = None
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.wait()

    async def _hear(self, reader: asyncio.StreamReader, why: asyncio.Future[str]) -> None:
        try:
            while True:
                _, (number, answer) = CODEC.unpack(await _message(reader))
                if (waiting := self._asked.get(number)) is not None and not waiting.done():
                    waiting.set_result(answer)
        except (OSError, EOFError):
            said = f"{self.name} ended with {await self._ending()}"
            why.set_result(said)
            self._lose(said)

    def _lose(self, why: str) -> None:
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(Lost(why))

    def _send(self, message: bytes) -> None:
        assert self._writer is not None
        self._writer.write(LENGTH.pack(len(message)))
        self._writer.write(message)

    async def _ending(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            code = await asyncio.to_thread(self._process.wait, 1.0)  # its line has ended: so has it, or is about to
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return "its line closed"


async def _message(reader: asyncio.StreamReader) -> bytes:
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise EOFError from error


def life_of(name: str, make: Any, environment: Mapping[str, str]) -> Life:
    """A worker's that finds what this process would: ``make`` is a function of a module, or a partial of one."""
    return Life(
        name=name,
        make=pickle.dumps(make),
        path=tuple(os.path.abspath(place) for place in sys.path),
        folder=os.getcwd(),
        environment=environment,
    )
