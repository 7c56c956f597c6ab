"""Hook watchdog: ends a user hook that blocks the main thread, at ``--stall-timeout`` or after a stop signal.

    watchdog thread:  how long has the main thread been in a hook? -> signal to it -> (still in the hook: os._exit)
    main thread:      handler raises inside the hook -> the run ends, or drops the tracker, as after any error of it

The event loop stands still while a hook blocks the main thread, so no deadline of the loop can end it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from miles.core.errors import HookRuntimeError
from miles.hooks.guard import RunningHook, get_running_hook
from miles.launch.runtime.signals import StopSignal, exit_code_from_signal

_INTERRUPT = signal.SIGURG
"""Sent to the main thread to have its handler raise; without a handler it is ignored."""
STOP_SECONDS = 5.0
"""How long a hook may still block after a stop signal."""
_EXIT_SECONDS = 5.0  # from the exception in the hook until the process is ended
_MAX_INTERVAL = 1.0


class HookWatchdog:
    """Watches hooks in the main thread. ``get_stop_signal`` returns the first stop signal; ``report`` prints a line."""

    def __init__(
        self, seconds: float, get_stop_signal: Callable[[], int | None], report: Callable[[str], None]
    ) -> None:
        self._seconds = seconds
        self._get_stop_signal = get_stop_signal
        self._report = report
        self._main_thread = threading.main_thread().ident or 0
        self._ended = threading.Event()
        self._target: tuple[RunningHook, float] | None = None
        self._stopped_at: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the main thread, which this must be; elsewhere no hook is interrupted."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handler = signal.signal(_INTERRUPT, self._interrupt)
        threading.Thread(target=self._poll, name="hook watchdog", daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()
            signal.signal(_INTERRUPT, handler)

    def _poll(self) -> None:
        while not self._ended.wait(min(_MAX_INTERVAL, self._seconds / 4)):
            running, now = get_running_hook(self._main_thread), time.monotonic()
            stop = self._get_stop_signal()
            if stop is not None and self._stopped_at is None:
                self._stopped_at = now
            if running is None or not self._is_late(running, now):
                continue
            if self._target is None or self._target[0] is not running:
                self._target = running, now
                signal.pthread_kill(self._main_thread, _INTERRUPT)
            elif now - self._target[1] > _EXIT_SECONDS:  # it caught the exception, or blocks in foreign code
                self._report(f"miles: {self._describe(running, now)}")
                os._exit(1 if stop is None else exit_code_from_signal(stop))

    def _is_late(self, running: RunningHook, now: float) -> bool:
        if now - running.started >= self._seconds:
            return True
        return self._stopped_at is not None and now - max(self._stopped_at, running.started) >= STOP_SECONDS

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        running = get_running_hook(self._main_thread)
        if running is None or self._target is None or running is not self._target[0]:
            return  # it has just returned
        stop = self._get_stop_signal()
        text = self._describe(running, time.monotonic())
        if stop is None:
            raise HookRuntimeError(text)
        self._report(f"miles: {text}")
        raise StopSignal(stop)

    def _describe(self, running: RunningHook, now: float) -> str:
        blocked = f"{running.source} has blocked the run for {now - running.started:.0f} s"
        if self._get_stop_signal() is None:
            advice = "give what it waits for a time limit, and the same command resumes the run"
            return f"{blocked} (--stall-timeout); {advice}"
        return f"{blocked} and the run was asked to stop; the same command resumes from the last checkpoint"
