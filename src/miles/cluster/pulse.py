"""A process's sign of life: a number in a file that a thread of it raises, and that someone else looks at.

Missed beats are counted in looks and not in seconds: whoever was itself frozen for a while blames no one.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from itertools import count
from math import ceil
from pathlib import Path

_LONGEST = 1.0
_LOOKS = 4
# Seconds a process may take to its first beat, with all that it imports before, or to its end.
_STARTING = 600.0


def interval(patience: float) -> float:
    """Seconds between two beats, or two looks, of someone who is given up after ``patience``."""
    return min(_LONGEST, patience / _LOOKS)


def beat(path: Path, patience: float, also: Callable[[], None] = lambda: None) -> None:
    """Show from now on that this process lives, until it does not; ``also`` is called at every beat."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def show(number: int) -> None:
        os.pwrite(file, number.to_bytes(8, "little"), 0)

    def keep_on() -> None:
        pause = threading.Event()
        for number in count(1):
            pause.wait(interval(patience))
            show(number)
            also()

    show(0)
    atexit.register(path.unlink, missing_ok=True)  # on its way out no thread beats
    threading.Thread(target=keep_on, name="pulse", daemon=True).start()


class Pulse:
    """Another process's, to ``look`` at every ``interval``. Its first beat, and its end after the last, take longer."""

    def __init__(self, path: Path, patience: float) -> None:
        self._path = path
        self._most = max(_LOOKS, ceil(patience / interval(patience)))
        self._starting = ceil(_STARTING / interval(patience))
        self._seen, self._missed = b"", 0

    def look(self) -> bool:
        """Does it live, as far as can be told?"""
        try:
            now = self._path.read_bytes()
        except FileNotFoundError:
            now = b""
        self._missed = 0 if now != self._seen else self._missed + 1
        self._seen = now
        return self._missed < (self._most if now else max(self._most, self._starting))
