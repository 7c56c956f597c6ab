"""Supervisor of ``--max-restarts``: a parent process that restarts a run when it crashes, is killed or hangs.

    parent: start the run -> wait, check its heartbeat -> why did it end? -> pause -> start it again -> ...
    run:    write heartbeats, and stop when the parent is gone

The same command resumes a run, so restarting it is enough. A run that would end the same way again is not restarted:
bad input, a directory that cannot be resumed, and whatever the user stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from miles.cluster.heartbeat import HeartbeatMonitor, heartbeat_interval, start_heartbeat
from miles.cluster.oom_kill import OomKillMonitor
from miles.cluster.process import ChildProcess, restart_delay
from miles.core.errors import DataError, HookError, MilesError, ParityError, ResumeError, UsageError
from miles.launch.runtime.signals import STOP_SIGNALS, exit_code_from_signal
from miles.observe.output import print_error

HEARTBEAT_FILE = "MILES_SUPERVISED"
"""The environment variable with the heartbeat file of a supervised run."""
HEARTBEAT_TIMEOUT = "MILES_SUPERVISED_PATIENCE"

# The exit code of a supervised run that must not be restarted.
DO_NOT_RESTART = 78
_PERMANENT_ERRORS = (UsageError, ResumeError, DataError, HookError, ParityError)
_FINAL_CODES = (0, 2, *map(exit_code_from_signal, STOP_SIGNALS))
_POLL_INTERVAL = 1.0


def is_supervised() -> bool:
    """Whether this process is a run under a supervisor."""
    return HEARTBEAT_FILE in os.environ


def exit_code_from_error(error: MilesError) -> int:
    """The exit code of a run that ended with ``error``."""
    return DO_NOT_RESTART if is_supervised() and isinstance(error, _PERMANENT_ERRORS) else 1


def start_supervised_heartbeat() -> None:
    """In a supervised run: write heartbeats, and stop with SIGTERM when the parent is gone."""
    if not is_supervised():
        return
    parent = os.getppid()
    sent: list[int] = []

    def check_parent() -> None:
        if os.getppid() != parent and not sent:
            sent.append(parent)
            os.kill(os.getpid(), signal.SIGTERM)

    timeout = float(os.environ[HEARTBEAT_TIMEOUT]) or _POLL_INTERVAL
    start_heartbeat(Path(os.environ[HEARTBEAT_FILE]), timeout, check_parent)


class Supervisor:
    """Runs a command until it ends for good.

    ``max_restarts`` limits restarts without a new checkpoint in ``directory``; ``heartbeat_timeout`` is in seconds, 0
    for none. The first pause is ``backoff`` seconds long, each further one twice the one before.
    """

    def __init__(
        self,
        argv: Sequence[str],
        directory: Path,
        *,
        max_restarts: int,
        heartbeat_timeout: float,
        backoff: float = 1.0,
    ) -> None:
        self._argv = list(argv)
        self._directory = directory
        self._max_restarts = max_restarts
        self._heartbeat_timeout = heartbeat_timeout
        self._backoff = backoff
        self._child: ChildProcess | None = None
        self._stop_signal: int | None = None

    def run(self) -> int:
        """The exit code of the last process."""
        newest, restarts = self._find_newest_step(), 0
        with self._forward_signals():
            while True:
                code, reason = self._run_once()
                if code == DO_NOT_RESTART:
                    return 1
                if code in _FINAL_CODES or self._stop_signal is not None:
                    return code
                step = self._find_newest_step()
                restarts = restarts + 1 if step == newest else 1
                newest = step
                if restarts > self._max_restarts:
                    since = f"step {newest}" if newest else "its start"
                    _print(
                        f"the run {reason}; giving up after {self._max_restarts} restarts without a checkpoint after "
                        f"{since} (--max-restarts); fix the cause, and the same command resumes the run."
                    )
                    return code
                pause = restart_delay(restarts, base=self._backoff, immediate=0)
                count = f"restart {restarts} of at most {self._max_restarts} without a new checkpoint"
                _print(f"the run {reason}; it is restarted in {pause:g} s ({count}).")
                self._wait(pause)
                if self._stop_signal is not None:
                    return exit_code_from_signal(self._stop_signal)

    def _run_once(self) -> tuple[int, str]:
        """Run one process: its exit code, and how it ended in words."""
        with tempfile.TemporaryDirectory(prefix="miles-heartbeat-") as folder:
            file = Path(folder) / "beat"
            environment = {HEARTBEAT_FILE: str(file), HEARTBEAT_TIMEOUT: str(self._heartbeat_timeout)}
            # In a session of its own, so that the terminal's Ctrl-C reaches it once, through the parent.
            oom_kills = OomKillMonitor()
            self._child = child = ChildProcess(self._argv, env={**os.environ, **environment}, stdin=None)
            hung = self._watch(child, HeartbeatMonitor(file, self._heartbeat_timeout or _POLL_INTERVAL), oom_kills)
            code = child.wait()
            child.kill()  # what it left behind, such as a rank that hangs
            self._child = None
        if hung:
            timeout = f"{self._heartbeat_timeout:g} s (--heartbeat-timeout)"
            return 128 + signal.SIGKILL, f"sent no heartbeat for {timeout} and was killed"
        if code >= 0:
            return code, f"ended with exit code {code}"
        return 128 - code, f"was killed by {oom_kills.describe_exit(code)}"

    def _watch(self, child: ChildProcess, monitor: HeartbeatMonitor, oom_kills: OomKillMonitor) -> bool:
        """Return when the process has ended; true when it hung and was killed."""
        timeout = self._heartbeat_timeout
        while True:
            with suppress(subprocess.TimeoutExpired):
                child.wait(heartbeat_interval(timeout) if timeout else _POLL_INTERVAL)
                return False
            oom_kills.note_alive()
            if timeout and not monitor.is_alive():
                child.kill()
                return True

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._stop_signal is None and time.monotonic() < deadline:
            time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))

    def _find_newest_step(self) -> int:
        """The step of the newest checkpoint, 0 where there is none."""
        names = (path.name.removeprefix("step-") for path in self._directory.glob("checkpoints/step-*"))
        return max((int(name) for name in names if name.isdecimal()), default=0)

    @contextmanager
    def _forward_signals(self) -> Iterator[None]:
        """Forward Ctrl-C, SIGTERM and SIGHUP to the run, which is then not restarted."""

        def forward(number: int, frame: FrameType | None) -> None:
            self._stop_signal = number
            if self._child is not None:
                self._child.send_signal(number)

        handlers = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def supervise(argv: Sequence[str], directory: Path, *, max_restarts: int, heartbeat_timeout: float) -> int:
    """Run ``miles train`` with these arguments under a supervisor; the exit code of its last process."""
    command = [sys.executable, "-m", "miles.launch.main", "train", *argv]
    return Supervisor(command, directory, max_restarts=max_restarts, heartbeat_timeout=heartbeat_timeout).run()


def _print(text: str) -> None:
    print_error(f"miles: {text}")
