"""A process's sign of life: a number in a file that a thread of it raises, and that someone else looks at.

Missed beats are counted in looks and not in seconds: whoever was itself frozen for a while blames no one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import count
from math import ceil
from pathlib import Path

_LONGEST = 1.0
_LOOKS = 4


def interval(patience: float) -> float:
    """Seconds between two beats, or two looks, of someone who is given up after ``patience``."""
    return min(_LONGEST, patience / _LOOKS)


def beat(path: Path, patience: float, also: Callable[[], None] = lambda: None) -> None:
    """Show from now on that this process lives, until it does not; ``also`` is called at every beat."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def keep_on() -> None:
        pause = threading.Event()
        for number in count(1):
            os.pwrite(file, number.to_bytes(8, "little"), 0)
            also()
            pause.wait(interval(patience))

    threading.Thread(target=keep_on, name="pulse", daemon=True).start()


class Pulse:
    """Another process's. ``look`` every ``interval``; before its first beat it is only starting."""

    def __init__(self, path: Path, patience: float) -> None:
        self._path = path
        self._most = max(_LOOKS, ceil(patience / interval(patience)))
        self._seen, self._missed = b"", 0

    def look(self) -> bool:
        """Does it live, as far as can be told?"""
        try:
            now = self._path.read_bytes()
        except FileNotFoundError:
            return True
        self._missed = 0 if now != self._seen or not now else self._missed + 1
        self._seen = now
        return self._missed < self._most
