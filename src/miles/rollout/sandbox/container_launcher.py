"""Container launcher: the first process of a sandbox container, which runs one program and reports how it ended.

Its source is executed by the Python of the image, so it imports the standard library only. Standard input carries a
request (see protocol.encode_request) and stays open until the result is on standard output; its end cancels the run.
When this process exits, the kernel kills every other process of the container.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

_LENGTH = struct.Struct("<Q")
_POLL_SECONDS = 0.02
_PIPE_BYTES = 1 << 16
_FIRST_FREE = 16  # descriptors from here on are not those that a program is given
_OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_PIDS_COUNTERS = ("/sys/fs/cgroup/pids.events", "/sys/fs/cgroup/pids/pids.events")
_PR_SET_DUMPABLE = 4  # of prctl(2)


class Limits(NamedTuple):
    """The limits of a request that this process checks; those of memory, files and processes are the container's."""

    wall: float
    cpu: float
    memory: int
    processes: int
    file: int
    scratch: int
    output: int


class Ending(NamedTuple):
    """How the program ended: the status of waitpid, or the limit for which it is killed."""

    status: int | None
    killed_by: str | None


def read_exactly(size: int) -> bytes:
    """Read ``size`` bytes of standard input; EOFError when it ends before."""
    pieces: list[bytes] = []
    while size:
        piece = os.read(0, min(size, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def write_files(folder: str, files: Sequence[tuple[str, bytes]]) -> None:
    """Write the files of a request, for every user of the container."""
    os.umask(0)
    for name, body in files:
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(body)


def start(argv: Sequence[str], streams: Sequence[int], folder: str, user: int | None) -> tuple[int, str]:
    """Start a command with ``streams`` as its descriptors 0, 1, ...; returns its id, or why it could not start."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(write_end)
        with os.fdopen(read_end, "rb") as file:
            return child, file.read().decode(errors="replace")
    try:
        moved = [fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for stream in streams]
        for number, stream in enumerate(moved):
            os.dup2(stream, number)
        _set_traceable(True)  # for the next line alone: exec decides for the program
        _make_first_victim()
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        os.chdir(folder)
        os.setsid()
        environment = {"HOME": folder, "TMPDIR": folder, "PATH": os.environ.get("PATH", os.defpath)}
        environment.update(PYTHONHASHSEED="0", LANG="C.UTF-8")
        os.execvpe(argv[0], list(argv), environment)
    except BaseException as error:  # the parent reports it
        os.write(write_end, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(127)


def _set_traceable(traceable: bool) -> None:
    """Whether processes of the same user may trace this one, or open its descriptors and write a result to them."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, int(traceable), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")


def _make_first_victim() -> None:
    """Have the kernel kill the program, not its launcher, when the container is out of memory."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:  # the largest process is killed, which is the program in most cases
        return


def read_counter(paths: Sequence[str], key: str) -> int:
    """A counter of the container's control group; 0 where the container does not see it."""
    for path in paths:
        try:
            with open(path, encoding="ascii") as file:
                found = [line.split() for line in file]
        except OSError:
            continue
        return next((int(words[1]) for words in found if len(words) == 2 and words[0] == key), 0)
    return 0


def measure_cpu_seconds() -> float:
    """CPU time of all other processes of the container: of the running ones, and of those that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = used.ru_utime + used.ru_stime
    mine, ticks = os.getpid(), os.sysconf("SC_CLK_TCK")
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == mine:
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / ticks
    return total


class Monitor:
    """Feeds the program its standard input, collects its output and checks the limits until it ends."""

    def __init__(self, child: int, pipes: dict[str, int], text: bytes, limits: Limits) -> None:
        self._child = child
        self._text = memoryview(text)
        self._limits = limits
        self._stdin: int | None = pipes["stdin"]
        self._open = {pipes["stdout"]: "stdout", pipes["stderr"]: "stderr"}
        self.output = {"stdout": bytearray(), "stderr": bytearray()}
        self._size = 0
        for descriptor in pipes.values():
            os.set_blocking(descriptor, False)

    def run(self) -> Ending:
        """Wait for the end. EOFError when standard input ended, which cancels the run."""
        begin, before = time.monotonic(), (self._count_ooms(), self._count_refused())
        while True:
            status = self._reap()
            self._exchange(0.0 if status is not None else _POLL_SECONDS)
            if self._size > self._limits.output:
                return Ending(None, "output")
            if status is not None:
                killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9
                return Ending(status, "memory" if killed and self._count_ooms() > before[0] else None)
            if time.monotonic() - begin > self._limits.wall:
                return Ending(None, "wall")
            if self._count_refused() > before[1]:
                return Ending(None, "processes")
            if measure_cpu_seconds() > self._limits.cpu:
                return Ending(None, "cpu")

    def _count_ooms(self) -> int:
        return read_counter(_OOM_COUNTERS, "oom_kill")

    def _count_refused(self) -> int:
        return read_counter(_PIDS_COUNTERS, "max")

    def _reap(self) -> int | None:
        """Wait for all processes that have ended, orphans too; the status of the program, if it is one of them."""
        while True:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if ended in (0, self._child):
                return status if ended else None

    def _exchange(self, seconds: float) -> None:
        """Move bytes until nothing is ready; waits ``seconds`` for the first."""
        while True:
            writable = [] if self._stdin is None else [self._stdin]
            ready, feeds, _ = select.select([0, *self._open], writable, [], seconds)
            if 0 in ready and not os.read(0, 1):
                raise EOFError
            for descriptor in set(ready) - {0}:
                self._read(descriptor)
            if feeds:
                self._feed()
            if (not feeds and not set(ready) - {0}) or self._size > self._limits.output:
                return
            seconds = 0.0

    def _read(self, descriptor: int) -> None:
        data = os.read(descriptor, _PIPE_BYTES)
        if not data:
            os.close(descriptor)
            del self._open[descriptor]
            return
        room = self._limits.output - self._size
        self.output[self._open[descriptor]] += data[: max(room, 0)]
        self._size += len(data)

    def _feed(self) -> None:
        assert self._stdin is not None
        try:
            self._text = self._text[os.write(self._stdin, self._text[:_PIPE_BYTES]) :] if self._text else self._text
        except BrokenPipeError:
            self._text = self._text[:0]
        if not self._text:
            os.close(self._stdin)
            self._stdin = None


def run_program(head: dict[str, Any], text: bytes, folder: str, users: Sequence[int]) -> tuple[list[Any], bytes, bytes]:
    """Run the program of a request, and its companion; the fields of a SandboxResult (see protocol)."""
    limits = Limits(*head["limits"])
    ends = {name: os.pipe() for name in ("stdin", "stdout", "stderr", "calls", "answers")}
    program_user, companion_user = (users[0], users[1]) if users else (None, None)
    begin = time.monotonic()
    fault = ""
    if head["companion"]:
        streams = (ends["calls"][0], ends["answers"][1], ends["stderr"][1])
        _, fault = start(head["companion"], streams, folder, companion_user)
    streams = (ends["stdin"][0], ends["stdout"][1], ends["stderr"][1])
    if head["companion"]:
        streams = (*streams, ends["answers"][0], ends["calls"][1])
    child, problem = (0, fault) if fault else start(head["argv"], streams, folder, program_user)
    if problem:
        return [None, None, None, 0.0, problem], b"", b""
    for descriptor in (ends["stdin"][0], ends["stdout"][1], ends["stderr"][1], *ends["calls"], *ends["answers"]):
        os.close(descriptor)
    ours = {"stdin": ends["stdin"][1], "stdout": ends["stdout"][0], "stderr": ends["stderr"][0]}
    monitor = Monitor(child, ours, text, limits)
    status, killed_by = monitor.run()
    code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
    signal = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
    fields = [code, signal, killed_by, time.monotonic() - begin, ""]
    return fields, bytes(monitor.output["stdout"]), bytes(monitor.output["stderr"])


def main() -> None:
    """The arguments are the scratch folder, and where the program and its companion get users of their own, these."""
    folder, users = sys.argv[1], [int(word) for word in sys.argv[2:]]
    _set_traceable(False)
    try:
        head = json.loads(read_exactly(_LENGTH.unpack(read_exactly(_LENGTH.size))[0]))
        write_files(folder, [(name, read_exactly(size)) for name, size in head["files"]])
        fields, stdout, stderr = run_program(head, read_exactly(head["stdin"]), folder, users)
    except EOFError:
        return
    answer = json.dumps([*fields, len(stdout), len(stderr)]).encode()
    data = memoryview(b"".join((_LENGTH.pack(len(answer)), answer, stdout, stderr)))
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
