"""Child processes: spawn in a new process group, parent-death guard, log tail, kill the process tree, restart backoff.

Standard library only: this file is also the program that guards a child,

    python process.py DESCRIPTOR COMMAND ...

It runs the command and kills it, with everything the command started, when the parent is gone. The descriptor is the
read end of a pipe that the parent holds open: however the parent ends, the pipe closes. SIGTERM is forwarded.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

_TAIL_LINES = 15
_TAIL_BYTES = 16384


class ChildProcess:
    """A subprocess in a session of its own: it gets no Ctrl-C of the terminal, and is killed with its children.

    ``guarded`` puts the guard program between this process and the command, so that the command does not outlive this
    process even if that is killed; ``pid`` is the guard's then.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        guarded: bool = False,
    ) -> None:
        self._guard_pipe: int | None = None
        read_end: int | None = None
        if guarded:
            read_end, self._guard_pipe = os.pipe()
            argv = [sys.executable, "-I", os.path.abspath(__file__), str(read_end), *argv]
            pass_fds = (*pass_fds, read_end)
        try:
            self._popen = subprocess.Popen(
                list(argv),
                env=None if env is None else dict(env),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=tuple(pass_fds),
                bufsize=0,
                start_new_session=True,
            )
        except OSError:
            self._close_guard_pipe()
            raise
        finally:
            if read_end is not None:
                os.close(read_end)
        self.pid = self._popen.pid
        self.stdin = self._popen.stdin
        self.stdout = self._popen.stdout

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._popen.poll()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended; raises ``subprocess.TimeoutExpired``."""
        return self._popen.wait(timeout)

    def send_signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def terminate(self, grace: float) -> None:
        """Send SIGTERM, and kill what is left of it after ``grace`` seconds."""
        if self.poll() is None:
            self.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + grace
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """Kill it with everything it started, and return when it has ended."""
        if self._guard_pipe is not None:
            self._close_guard_pipe()  # the guard, if it still runs, kills the command's process group
        else:
            kill_process_group(self.pid)
        self._popen.wait()
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                pipe.close()

    def _close_guard_pipe(self) -> None:
        if self._guard_pipe is not None:
            os.close(self._guard_pipe)
            self._guard_pipe = None


def kill_process_group(group: int, number: int = signal.SIGKILL) -> None:
    """Signal every process of a group; a group that has ended is no error."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def describe_exit(code: int) -> str:
    """How a process ended: its exit code, or the signal that ended it, which a guard reports as 128 + signal.

    >>> describe_exit(1), describe_exit(-9), describe_exit(137)
    ('exit code 1', 'SIGKILL', 'SIGKILL')
    """
    number = -code if code < 0 else code - 128
    if number in {each.value for each in signal.Signals}:
        return signal.Signals(number).name
    return f"exit code {code}"


def python_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child interpreter that imports what this one does, with single-threaded numeric libraries.

    Many such children run side by side; OMP_NUM_THREADS and OPENBLAS_NUM_THREADS of this process take precedence.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**threads, **os.environ, "PYTHONPATH": path, **(extra or {})}


def restart_delay(failures: int, *, base: float = 1.0, longest: float = 60.0, immediate: int = 1) -> float:
    """Exponential backoff: seconds before the restart after ``failures`` in a row; the first ``immediate`` are at once.

    >>> [restart_delay(n) for n in range(1, 5)]
    [0.0, 1.0, 2.0, 4.0]
    """
    return 0.0 if failures <= immediate else min(longest, base * 2 ** (failures - 1 - immediate))


def read_log_tail(path: Path, start: int = 0) -> str:
    """The last lines of a log file, from byte ``start`` on, indented for an error message."""
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]) or "  (the log is empty)"


def find_free_port(host: str) -> int:
    """A port on which no process listens now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        return free.getsockname()[1]


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run_guard(descriptor: int, argv: Sequence[str]) -> int:
    """Run a command until it ends or the pipe closes; its exit code, or minus the signal that ended it."""
    child = subprocess.Popen(
        list(argv), stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent, close_fds=True
    )

    def forward(number: int, frame: FrameType | None) -> None:
        kill_process_group(child.pid, number)

    def wait_for_parent() -> None:
        os.read(descriptor, 1)  # nothing is ever written: this returns when nobody holds the write end
        kill_process_group(child.pid)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait_for_parent, daemon=True).start()
    code = child.wait()
    kill_process_group(child.pid)  # processes that the command left behind
    return code


if __name__ == "__main__":
    exit_code = run_guard(int(sys.argv[1]), sys.argv[2:])
    sys.exit(exit_code if exit_code >= 0 else 128 - exit_code)
