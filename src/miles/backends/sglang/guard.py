"""A program between a run and a server: it ends the server, and all that it started, when the run is gone.

    python guard.py DESCRIPTOR COMMAND ...

The descriptor is the reading end of a pipe that the run holds open: however the run ends, the pipe does. SIGTERM is
given on. It needs nothing but the standard library, so that it runs beside whatever the server runs with.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from types import FrameType


def main(descriptor: int, words: list[str]) -> int:
    """Run the command; its exit status, or minus the signal that ended it."""
    child = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent, close_fds=True
    )

    def give_on(number: int, frame: FrameType | None) -> None:
        _signal_all(child.pid, number)

    signal.signal(signal.SIGTERM, give_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(descriptor, child.pid), daemon=True).start()
    code = child.wait()
    _signal_all(child.pid, signal.SIGKILL)  # what it left behind
    return code


def _watch(descriptor: int, group: int) -> None:
    os.read(descriptor, 1)  # nothing is ever written: this returns when no one holds the other end
    _signal_all(group, signal.SIGKILL)


def _signal_all(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _die_with_parent() -> None:
    """On Linux the kernel ends the server should this program be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    ended = main(int(sys.argv[1]), sys.argv[2:])
    sys.exit(ended if ended >= 0 else 128 - ended)
