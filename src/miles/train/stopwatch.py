"""Stopwatch of a rank's own compute time, without the time it waits for others."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class Stopwatch:
    """Measures time inside ``with`` (nesting counts once); on an accelerator by CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._depth = 0
        self._seconds = 0.0
        self._started = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if self._device.type == "cpu":
            self._started = time.perf_counter()
        else:
            self._pairs.append((self._now(), torch.cuda.Event(enable_timing=True)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._device.type == "cpu":
            self._seconds += time.perf_counter() - self._started
        else:
            self._pairs[-1][1].record()

    def wrap(self, work: Callable[P, T]) -> Callable[P, T]:
        """Return ``work`` with timing."""

        @functools.wraps(work)
        def timed_work(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return work(*args, **kwargs)

        return timed_work

    def read_and_reset(self) -> float:
        """Return the seconds since the last call; synchronises the device."""
        if self._pairs:
            self._pairs[-1][1].synchronize()
            self._seconds += sum(start.elapsed_time(end) for start, end in self._pairs) / 1000
            self._pairs = []
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
