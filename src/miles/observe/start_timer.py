"""Start-up timer: wall-clock phases from the start of the process to the end of its first training step.

    config, imports, run_dir, tokenizer, prompts, weights, engine, trainer, loop    until the loop is built
    kernels                                      waiting for kernels that are compiled in other processes
    first_sync                                   the first weights of the engines, and evaluation before training
    first_rollout, first_offload, first_train, first_publish    the first step

Phases follow each other and add up to ``start/total``. Compiling kernels and capturing CUDA graphs happen inside of
phases, mostly in the first rollout and the first training step, and are counted apart.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

LOOP_PHASES = ("rollout", "offload", "train", "publish")


class StartTimer:
    """Measures the start of a run; ``age`` is how long the process had run when the timer was made."""

    def __init__(self, *, age: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = self._last = clock() - age
        self._phases: dict[str, float] = {}
        self._parts: dict[str, float] = {}
        self._lock = threading.Lock()

    def lap(self, phase: str) -> None:
        """End ``phase``, which began where the one before it ended."""
        now = self._clock()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now

    def add(self, part: str, value: float) -> None:
        """Count something that happens inside of phases, in any thread."""
        with self._lock:
            self._parts[part] = self._parts.get(part, 0.0) + value

    def finish(self, laps: Mapping[str, float]) -> dict[str, float]:
        """Return all phases when the first step, which took ``laps``, has ended."""
        total = self._clock() - self._began
        first = {f"first_{name}": laps[name] for name in LOOP_PHASES if name in laps}
        sync = total - sum(self._phases.values()) - sum(first.values())
        with self._lock:
            found = {**self._phases, "first_sync": sync, **first, "total": total, **self._parts}
        return {f"start/{name}": value for name, value in found.items()}


def read_process_age() -> float:
    """Return the seconds since this process was started; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
