"""A worker's process: it makes what answers, then answers question after question until its line ends.

    parent --ask 7--> thread --> loop: answer(question)  --answer 7-->
           --cut 7--> thread: not begun: let go at once; begun: its task is cancelled

The thread hears what is said while an answer holds the loop, and ends the process with its line.
"""

from __future__ import annotations

import asyncio
import ctypes
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

from miles.cluster import stacks
from miles.core.errors import MilesError
from miles.core.wire import Codec

Answer = Callable[[bytes], Awaitable[bytes]]
"""What a worker does; what it raises is its process's end, so that it tells of errors in what it gives back."""

CODEC = Codec(())
LENGTH = struct.Struct("<Q")
"""Messages are the codec's, each behind its length."""
LET_GO = b""
"""The answer to a question that is not wanted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What a worker is told before its first question: ``make``, pickled, gives its ``Answer``.

    It looks for modules where its parent does and then in ``path``, stands in ``folder`` where there is one, and has
    ``environment`` beside its own. It goes from a parent to its child, and is never read from anyone else.
    """

    name: str
    make: bytes
    path: tuple[str, ...] = ()
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def main(descriptor: int) -> None:
    """Until the line ends."""
    # Ctrl-C and SIGTERM are the parent's to act on; should it be killed, the kernel ends this process too.
    for told in (signal.SIGINT, signal.SIGTERM):
        signal.signal(told, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    line = Line(socket.socket(fileno=descriptor))
    try:
        answer = _made(pickle.loads(line.hear()))
    except Exception as error:  # whatever a module of the user's may raise when it is imported
        kind = "" if isinstance(error, MilesError) else f"{type(error).__name__}: "
        line.say("failed", kind + str(error))
        return
    line.say("ready")
    asyncio.run(Desk(line, answer).serve())


def _made(life: Life) -> Answer:
    sys.path += [place for place in life.path if place not in sys.path]
    if os.path.isdir(life.folder):
        os.chdir(life.folder)
    os.environ.update(life.environment)
    stacks.register(life.name)
    return pickle.loads(life.make)()


class Line:
    """The child's end: heard by one thread, spoken on by any."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._turn = end, threading.Lock()
        self._reading = end.makefile("rb")

    def hear(self) -> bytes:
        """The next message; EOFError when there is none to come."""
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return self._exactly(length)

    def say(self, verb: str, content: Any = None) -> None:
        message = CODEC.pack(verb, content)
        with self._turn:
            self._end.sendall(LENGTH.pack(len(message)) + message)

    def _exactly(self, size: int) -> bytes:
        found = self._reading.read(size)
        if len(found) < size:
            raise EOFError
        return found


class Desk:
    """Questions under way, by their numbers; None is one that has not begun."""

    def __init__(self, line: Line, answer: Answer) -> None:
        self._line, self._answer = line, answer
        self._tasks: dict[int, asyncio.Task[None] | None] = {}
        self._turn = threading.Lock()

    async def serve(self) -> None:
        """Never returns: the process ends with its line."""
        threading.Thread(target=self._hear, args=(asyncio.get_running_loop(),), name="hears", daemon=True).start()
        await asyncio.Event().wait()

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                verb, content = CODEC.unpack(self._line.hear())
            except (EOFError, OSError):
                os._exit(0)
            if verb == "ask":
                number, question = content
                with self._turn:
                    self._tasks[number] = None
                loop.call_soon_threadsafe(self._begin, number, question)
            else:
                self._cut(loop, content)

    def _cut(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        with self._turn:
            task = self._tasks.get(number)
        if task is not None:
            loop.call_soon_threadsafe(task.cancel)
        else:
            self._give(number, LET_GO)

    def _begin(self, number: int, question: bytes) -> None:
        with self._turn:
            if number in self._tasks:
                self._tasks[number] = asyncio.create_task(self._answered(number, question))

    async def _answered(self, number: int, question: bytes) -> None:
        try:
            answer = await self._answer(question)
        except asyncio.CancelledError:
            answer = LET_GO
        except BaseException:  # not told of in the answer, as it should be: nothing here can be relied on
            traceback.print_exc()
            os._exit(1)
        self._give(number, answer)

    def _give(self, number: int, answer: bytes) -> None:
        with self._turn:
            if number not in self._tasks:  # answered, or let go of, before
                return
            del self._tasks[number]
        self._line.say("answer", (number, answer))


if __name__ == "__main__":
    main(int(sys.argv[1]))
