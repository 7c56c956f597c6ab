"""Watches a running program: feeds it, collects what it writes, and ends it at a limit or when asked to.

::

    stdin  --> program --> stdout, stderr       every 20 ms: time, processes, memory, CPU, scratch
    control (closed by whoever asked) --------> end at once, answer nothing
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections.abc import Callable

from miles.rollout.sandbox.order import Answer, Bounds, KilledBy
from miles.rollout.sandbox.tree import Tree

_PERIOD_MS = 20
_PIECE = 1 << 16


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


class Streams:
    """The program's three pipes, as seen from outside, and the control pipe."""

    def __init__(self, *, stdin: int, stdout: int, stderr: int, control: int, text: bytes, most: int) -> None:
        self._stdin: int | None = stdin
        self._text = memoryview(text)
        self._control = control
        self._room = most
        self.written: dict[int, bytearray] = {stdout: bytearray(), stderr: bytearray()}
        self.overflowed = False
        self._open = {stdout, stderr}
        self._poll = select.poll()
        for pipe in (stdin, stdout, stderr):
            os.set_blocking(pipe, False)
        for pipe in (stdout, stderr, control):
            self._poll.register(pipe, select.POLLIN)
        if text:
            self._poll.register(stdin, select.POLLOUT)
        else:
            self._close_stdin()

    def also(self, waited: int) -> None:
        """Come back from ``serve`` when this has something to say, too."""
        self._poll.register(waited, select.POLLIN)

    def serve(self) -> None:
        """Wait a little, and move what can be moved."""
        for pipe, _ in self._poll.poll(_PERIOD_MS):
            if pipe == self._control:
                raise Cancelled
            if pipe == self._stdin:
                self._feed(pipe)
            elif pipe in self.written:
                self._collect(pipe)

    def drain(self) -> None:
        """Take what is left in the pipes; all who could write to them are gone."""
        for pipe in self.written:
            while self._collect(pipe):
                pass

    def _shut(self, pipe: int) -> None:
        if pipe in self._open:
            self._open.remove(pipe)
            self._poll.unregister(pipe)

    def _feed(self, pipe: int) -> None:
        try:
            self._text = self._text[os.write(pipe, self._text[:_PIECE]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._text = self._text[:0]  # it does not want to read the rest
        if not self._text:
            self._poll.unregister(pipe)
            self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    def _collect(self, pipe: int) -> bool:
        try:
            piece = os.read(pipe, _PIECE)
        except BlockingIOError:
            return False
        if not piece:
            self._shut(pipe)
            return False
        self.overflowed |= len(piece) > self._room
        self.written[pipe] += piece[: self._room]
        self._room = max(0, self._room - len(piece))
        return True


def watch(child: int, streams: Streams, bounds: Bounds, tree: Tree, crowded: Callable[[], bool]) -> Answer:
    """Until the program ends. ``crowded`` says the scratch folder holds too much."""
    began = time.monotonic()
    ended = _Ended(child)
    ended.announce(streams)
    killed_by: KilledBy | None = None
    while killed_by is None and not ended.seen():
        streams.serve()
        killed_by = _over(bounds, time.monotonic() - began, streams, tree, crowded)
    seconds = time.monotonic() - began
    if not ended.seen():
        os.kill(child, signal.SIGKILL)
        ended.wait()
    tree.kill()
    streams.drain()
    if killed_by is None:
        killed_by = "output" if streams.overflowed else ended.why(bounds)
    stdout, stderr = (bytes(written) for written in streams.written.values())
    return Answer(ended.exit, ended.signal, killed_by, seconds, stdout=stdout, stderr=stderr)


def _over(bounds: Bounds, seconds: float, streams: Streams, tree: Tree, crowded: Callable[[], bool]) -> KilledBy | None:
    if streams.overflowed:
        return "output"
    if seconds > bounds.wall:
        return "wall"
    usage = tree.usage()
    if usage.tasks > bounds.processes:
        return "processes"
    if usage.memory > bounds.memory:
        return "memory"
    if usage.cpu > bounds.cpu:
        return "cpu"
    return "output" if crowded() else None


class _Ended:
    """How the program's first process ended, once it has."""

    def __init__(self, child: int) -> None:
        self._child = child
        self._cpu = 0.0
        self.exit: int | None = None
        self.signal: int | None = None

    def announce(self, streams: Streams) -> None:
        try:
            streams.also(os.pidfd_open(self._child))
        except OSError:
            return  # refused in some containers; then the end is seen at the next look

    def seen(self) -> bool:
        """Also buries orphans that have ended, whose parent this process has become."""
        while self.exit is None and self.signal is None:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return False
            if pid == self._child:
                self._take(status, used)
        return True

    def wait(self) -> None:
        _, status, used = os.wait4(self._child, 0)
        self._take(status, used)

    def why(self, bounds: Bounds) -> KilledBy | None:
        """The kernel keeps the CPU limit as well, a little wider, and says so by a signal."""
        used_up = self.signal == signal.SIGKILL and self._cpu >= bounds.cpu
        return "cpu" if used_up or self.signal == signal.SIGXCPU else None

    def _take(self, status: int, used: resource.struct_rusage) -> None:
        self._cpu = used.ru_utime + used.ru_stime
        code = os.waitstatus_to_exitcode(status)
        self.exit, self.signal = (code, None) if code >= 0 else (None, -code)
