"""The dashboard beside a run: a process of its own, which ends with the run however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from miles.core.errors import MilesError
from miles.launch.commands.view import view
from miles.launch.config import ViewOptions
from miles.observe.config import ObserveConfig

_END_SECONDS = 5.0


class DashboardProcess:
    """A running dashboard. Its standard input is a pipe of the run, so it ends also when the run is killed."""

    def __init__(self, run: Path, host: str, port: int, note: Callable[[str], None]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "miles.launch.dashboard.process", str(run), host, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for the run
        )
        self._reader = threading.Thread(target=self._report, args=(note,), name="dashboard", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_END_SECONDS)

    def _report(self, note: Callable[[str], None]) -> None:
        """Report what the process prints: its address, or why it cannot start."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                note(line.rstrip())


def start_dashboard(options: ObserveConfig, run: Path, note: Callable[[str], None]) -> DashboardProcess | None:
    """Start the dashboard if --dashboard asks for it; a run goes on without one that cannot start."""
    if not options.dashboard:
        return None
    if find_spec("aiohttp") is None:
        note("--dashboard needs aiohttp: pip install 'miles-rl[dashboard]'; the run goes on without it.")
        return None
    return DashboardProcess(run, options.dashboard_bind_host, options.dashboard_bind_port, note)


def _end_with_parent() -> None:
    """End this process when its standard input is closed."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def main(argv: list[str]) -> int:
    """Serve the dashboard of a run until standard input is closed."""
    run, host, port = argv
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        return view([Path(run)], ViewOptions(host=host, port=int(port)))
    except MilesError as error:
        print(f"The dashboard cannot start, and the run goes on without it: {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
