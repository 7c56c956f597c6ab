"""What a program may use, and what came of running it."""

from __future__ import annotations

from dataclasses import dataclass

from miles.core.errors import MilesError
from miles.rollout.sandbox.order import KilledBy

MIB = 1 << 20


class SandboxError(MilesError):
    """The sandbox itself failed; the program was not run, or its outcome is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one run. Seconds of ``wall`` and ``cpu``, memory and ``processes`` are those of all its processes.

    ``processes`` counts threads too. ``file`` is the largest file, ``scratch`` all files together,
    ``output`` standard output and standard error together, all in bytes like ``memory``.
    """

    wall: float = 20.0
    cpu: float = 10.0
    memory: int = 512 * MIB
    processes: int = 16
    file: int = 64 * MIB
    scratch: int = 64 * MIB
    output: int = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended: its exit status, or the signal that ended it, and the limit it ran into, if one.

    A program that was refused something (memory, a file, a socket) was told so, and ended as it chose.
    """

    exit: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    killed_by: KilledBy | None = None

    @property
    def fine(self) -> bool:
        """It ran to its end and said all was well."""
        return self.exit == 0
