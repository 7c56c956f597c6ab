"""Heartbeats: a thread of a process increments a number in a file, and another process monitors that file.

Missed heartbeats are counted in checks and not in seconds, so that a monitor which was itself suspended blames no one.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from itertools import count
from math import ceil
from pathlib import Path

_MAX_INTERVAL = 1.0
_MIN_CHECKS = 4
# Seconds a process may take to its first heartbeat, with all its imports, or to its end.
_START_SECONDS = 600.0


def heartbeat_interval(timeout: float) -> float:
    """Seconds between two heartbeats, or two checks, of a process that is given up after ``timeout``."""
    return min(_MAX_INTERVAL, timeout / _MIN_CHECKS)


def start_heartbeat(path: Path, timeout: float, on_beat: Callable[[], None] = lambda: None) -> None:
    """Write heartbeats of this process to a file until it ends; ``on_beat`` is called at each."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def write(number: int) -> None:
        os.pwrite(file, number.to_bytes(8, "little"), 0)

    def beat() -> None:
        pause = threading.Event()
        for number in count(1):
            pause.wait(heartbeat_interval(timeout))
            write(number)
            on_beat()

    write(0)
    atexit.register(path.unlink, missing_ok=True)  # no thread runs while the interpreter exits
    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


class HeartbeatMonitor:
    """Checks another process's heartbeat file, once per interval; its start and its exit may take longer."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._path = path
        self._max_missed = max(_MIN_CHECKS, ceil(timeout / heartbeat_interval(timeout)))
        self._max_missed_at_start = max(self._max_missed, ceil(_START_SECONDS / heartbeat_interval(timeout)))
        self._last = b""
        self._missed = 0

    def is_alive(self) -> bool:
        """Check the file: has the process written a heartbeat within the timeout?"""
        try:
            current = self._path.read_bytes()
        except FileNotFoundError:
            current = b""
        self._missed = 0 if current != self._last else self._missed + 1
        self._last = current
        return self._missed < (self._max_missed if current else self._max_missed_at_start)
