"""Monitor of a running program: feeds its stdin, collects its output, kills it at a limit or on cancellation.

::

    stdin  --> program --> stdout, stderr       every 20 ms: time, processes, memory, CPU, scratch
    control (closed by the caller) -----------> kill at once, send no result
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from miles.rollout.sandbox.process_tree import ProcessTree
from miles.rollout.sandbox.protocol import KilledBy, SandboxLimits, SandboxResult

_PERIOD_MS = 20
_CHUNK = 1 << 16


class Cancelled(Exception):
    """The caller no longer waits for the result."""


class PipeStreams:
    """Our ends of the program's three pipes, and the control pipe."""

    def __init__(self, *, stdin: int, stdout: int, stderr: int, control: int, text: bytes, max_output: int) -> None:
        self._stdin: int | None = stdin
        self._text = memoryview(text)
        self._control = control
        self._remaining = max_output
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

    def watch_fd(self, descriptor: int) -> None:
        """Also return from ``serve`` when this descriptor is readable."""
        self._poll.register(descriptor, select.POLLIN)

    def serve(self) -> None:
        """Wait up to one period, and move available data."""
        for pipe, _ in self._poll.poll(_PERIOD_MS):
            if pipe == self._control:
                raise Cancelled
            if pipe == self._stdin:
                self._feed(pipe)
            elif pipe in self.written:
                self._collect(pipe)

    def drain(self) -> None:
        """Read what is left in the pipes, after all writers are gone."""
        for pipe in self.written:
            while self._collect(pipe):
                pass

    def _close_pipe(self, pipe: int) -> None:
        if pipe in self._open:
            self._open.remove(pipe)
            self._poll.unregister(pipe)

    def _feed(self, pipe: int) -> None:
        try:
            self._text = self._text[os.write(pipe, self._text[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._text = self._text[:0]  # the program closed its stdin
        if not self._text:
            self._poll.unregister(pipe)
            self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    def _collect(self, pipe: int) -> bool:
        try:
            chunk = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._close_pipe(pipe)
            return False
        self.overflowed |= len(chunk) > self._remaining
        self.written[pipe] += chunk[: self._remaining]
        self._remaining = max(0, self._remaining - len(chunk))
        return True


class ScratchFolder(NamedTuple):
    """The scratch folder: the bytes of memory it takes, and whether it exceeds its limit."""

    memory: Callable[[], int]
    is_full: Callable[[], bool]


def monitor(
    child: int, streams: PipeStreams, limits: SandboxLimits, tree: ProcessTree, scratch: ScratchFolder
) -> SandboxResult:
    """Monitor the program until it ends."""
    start = time.monotonic()
    status_of_child = _ExitStatus(child)
    status_of_child.register(streams)
    killed_by: KilledBy | None = None
    while killed_by is None and not status_of_child.poll():
        streams.serve()
        killed_by = _find_exceeded_limit(limits, time.monotonic() - start, streams, tree, scratch)
    seconds = time.monotonic() - start
    if not status_of_child.poll():
        os.kill(child, signal.SIGKILL)
        status_of_child.wait()
    tree.kill()
    streams.drain()
    if killed_by is None:
        killed_by = "output" if streams.overflowed else status_of_child.find_cause(limits)
    stdout, stderr = (bytes(written) for written in streams.written.values())
    return SandboxResult(status_of_child.exit, status_of_child.signal, killed_by, seconds, stdout=stdout, stderr=stderr)


def _find_exceeded_limit(
    limits: SandboxLimits, seconds: float, streams: PipeStreams, tree: ProcessTree, scratch: ScratchFolder
) -> KilledBy | None:
    if streams.overflowed:
        return "output"
    if seconds > limits.wall:
        return "wall"
    usage = tree.usage()
    if usage.tasks > limits.processes:
        return "processes"
    if usage.memory + scratch.memory() > limits.memory:
        return "memory"
    if usage.cpu > limits.cpu:
        return "cpu"
    return "output" if scratch.is_full() else None


class _ExitStatus:
    """Exit status of the program's first process."""

    def __init__(self, child: int) -> None:
        self._child = child
        self._cpu = 0.0
        self.exit: int | None = None
        self.signal: int | None = None

    def register(self, streams: PipeStreams) -> None:
        try:
            streams.watch_fd(os.pidfd_open(self._child))
        except OSError:
            return  # refused in some containers; the exit is then noticed at the next poll

    def poll(self) -> bool:
        """Whether it has exited. Also reaps orphans, which this process adopts as subreaper."""
        while self.exit is None and self.signal is None:
            pid, status, rusage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return False
            if pid == self._child:
                self._record(status, rusage)
        return True

    def wait(self) -> None:
        _, status, rusage = os.wait4(self._child, 0)
        self._record(status, rusage)

    def find_cause(self, limits: SandboxLimits) -> KilledBy | None:
        """``cpu`` where the kernel enforced the CPU limit, which is set slightly higher than ours."""
        used_up = self.signal == signal.SIGKILL and self._cpu >= limits.cpu
        return "cpu" if used_up or self.signal == signal.SIGXCPU else None

    def _record(self, status: int, rusage: resource.struct_rusage) -> None:
        self._cpu = rusage.ru_utime + rusage.ru_stime
        code = os.waitstatus_to_exitcode(status)
        self.exit, self.signal = (code, None) if code >= 0 else (None, -code)
