"""Worker process: builds its handler, then handles requests until its connection closes.

    parent --call 7----> thread --> event loop: handler(request)  --response 7-->
           --cancel 7--> thread: dropped at once if not started, else its task is cancelled

The thread reads messages while a handler blocks the event loop, and ends the process with its connection.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles.cluster import stack_dump
from miles.cluster.process import die_with_parent
from miles.core.errors import MilesError
from miles.core.serialization import Codec

WorkerHandler = Callable[[bytes], Awaitable[bytes]]
"""Handles one request. An exception ends the process: expected errors are part of the response."""

CODEC = Codec(())
LENGTH = struct.Struct("<Q")
"""Each message is encoded by the codec, and preceded by its length."""
CANCELLED = b""
"""The response to a cancelled request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker is sent before its first request: ``factory``, pickled, returns its ``WorkerHandler``.

    It imports modules from where its parent does and then from ``path``, runs in ``cwd`` if that exists, and has
    ``environment`` beside its own. It is sent from a parent to its child, and never read from anyone else.
    """

    name: str
    factory: bytes
    path: tuple[str, ...] = ()
    cwd: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def main(descriptor: int) -> None:
    """Handle requests until the connection closes."""
    # Ctrl-C and SIGTERM are handled by the parent; if that is killed, the kernel ends this process too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    channel = WorkerChannel(socket.socket(fileno=descriptor))
    try:
        handler = _build_handler(pickle.loads(channel.receive()))
    except Exception as error:  # whatever a user's module raises on import
        kind = "" if isinstance(error, MilesError) else f"{type(error).__name__}: "
        channel.send("failed", kind + str(error))
        return
    channel.send("ready")
    asyncio.run(WorkerRequestLoop(channel, handler).serve())


def _build_handler(spec: WorkerSpec) -> WorkerHandler:
    sys.path += [entry for entry in spec.path if entry not in sys.path]
    if os.path.isdir(spec.cwd):
        os.chdir(spec.cwd)
    os.environ.update(spec.environment)
    stack_dump.register_process(spec.name)
    return pickle.loads(spec.factory)()


class WorkerChannel:
    """The child's end of the connection: read by one thread, written by any."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._file = connection.makefile("rb")

    def receive(self) -> bytes:
        """The next message; EOFError when the connection has closed."""
        (length,) = LENGTH.unpack(self._read_exactly(LENGTH.size))
        return self._read_exactly(length)

    def send(self, verb: str, content: Any = None) -> None:
        message = CODEC.pack(verb, content)
        with self._lock:
            self._connection.sendall(LENGTH.pack(len(message)) + message)

    def _read_exactly(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError
        return data


class WorkerRequestLoop:
    """In-flight requests by number; the task of one that has not started is None."""

    def __init__(self, channel: WorkerChannel, handler: WorkerHandler) -> None:
        self._channel = channel
        self._handler = handler
        self._tasks: dict[int, asyncio.Task[None] | None] = {}
        self._lock = threading.Lock()

    async def serve(self) -> None:
        """Never returns: the process ends with its connection."""
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), name="reader", daemon=True).start()
        await asyncio.Event().wait()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                verb, content = CODEC.unpack(self._channel.receive())
            except (EOFError, OSError):
                os._exit(0)
            if verb == "call":
                number, request = content
                with self._lock:
                    self._tasks[number] = None
                loop.call_soon_threadsafe(self._start, number, request)
            else:
                self._cancel(loop, content)

    def _cancel(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        with self._lock:
            task = self._tasks.get(number)
        if task is not None:
            loop.call_soon_threadsafe(task.cancel)
        else:
            self._respond(number, CANCELLED)

    def _start(self, number: int, request: bytes) -> None:
        with self._lock:
            if number in self._tasks:
                self._tasks[number] = asyncio.create_task(self._handle(number, request))

    async def _handle(self, number: int, request: bytes) -> None:
        try:
            response = await self._handler(request)
        except asyncio.CancelledError:
            response = CANCELLED
        except BaseException:  # a handler reports errors in its response, so this process is in an unknown state
            traceback.print_exc()
            os._exit(1)
        self._respond(number, response)

    def _respond(self, number: int, response: bytes) -> None:
        with self._lock:
            if number not in self._tasks:  # responded or cancelled before
                return
            del self._tasks[number]
        self._channel.send("response", (number, response))


if __name__ == "__main__":
    main(int(sys.argv[1]))
