"""Stop signals of a run: the first ends it after the current step, the second ends the process.

    signal -> wakeup descriptor -> thread: 1. stop the loop, then print   2. print, flush, os._exit

The thread reads what the interpreter's C handler writes, so that a signal is obeyed whatever the main thread, the event
loop or a user's function is doing. Printing may block or fail, and comes after the stop. GNU timeout signals both its
child and its process group: the same signal again within an instant is the first one.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PRINT_SECONDS = 1.0
_REPEAT_SECONDS = 0.2  # within it, the same signal again was sent by the same sender


class StopSignal(KeyboardInterrupt):
    """A stop signal that arrived while no loop was running."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code_from_signal(number: int) -> int:
    """The exit status of a process that a signal stopped, as shells have it: 130 for Ctrl-C, 143 for SIGTERM.

    >>> exit_code_from_signal(signal.SIGHUP)
    129
    """
    return 128 + number


class StopSignals:
    """Handles Ctrl-C, SIGTERM and SIGHUP; a signal that was ignored when the process started stays ignored.

    ``received`` is the first signal. ``note`` is called with what to print, and ``close`` before the process is ended.
    """

    def __init__(self, note: Callable[[str], None], close: Callable[[], None] = lambda: None) -> None:
        self.received: int | None = None
        self._received_at = 0.0
        self._notice: threading.Thread | None = None
        self._stopped = threading.Event()
        self._note = note
        self._close = close
        self._stop: Callable[[], None] | None = None

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle the signals; before and after ``stopping``, the first one raises StopSignal in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        read_end, write_end = socket.socketpair()
        write_end.setblocking(False)
        threading.Thread(target=self._read, args=(read_end,), name="signals", daemon=True).start()
        wakeup = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        handlers = {number: signal.signal(number, self._interrupt) for number in numbers}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            write_end.close()  # ends the thread

    def stop(self) -> None:
        """Stop the run after its current step, as the first signal does; for a run in another thread."""
        self.received = self.received or signal.SIGINT
        if self._stop is not None:
            self._stop()

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call ``stop`` at the first signal, or now if the run was asked to stop before."""
        self._stop = stop
        if self.received is not None:
            stop()
        try:
            yield
        finally:
            self._stop = None
            self._stopped.set()
            if self._notice is not None:
                self._notice.join(_PRINT_SECONDS)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._stop is None:
            raise StopSignal(number)

    def _read(self, read_end: socket.socket) -> None:
        with read_end:
            while numbers := read_end.recv(64):
                for number in numbers:
                    if number in STOP_SIGNALS:
                        self._receive(number)

    def _receive(self, number: int) -> None:
        if number == self.received and time.monotonic() - self._received_at < _REPEAT_SECONDS:
            return
        if self.received is not None:
            _run_briefly(self._end)
            os._exit(exit_code_from_signal(number))
        self.received, self._received_at = number, time.monotonic()
        if self._stop is not None:
            self._notice = _start_thread(self._say_stopping)
            self._stop()

    def _say_stopping(self) -> None:
        self._stopped.wait(_REPEAT_SECONDS)  # whoever reads the line and signals again is obeyed
        self._note("Stopping: this step is finished and saved first (a second signal, or Ctrl-C again, drops it).")

    def _end(self) -> None:
        self._note("Ended by a second signal; the same command resumes from the last checkpoint.")
        self._close()


def _run_briefly(work: Callable[[], None]) -> None:
    """Run what may block, and wait for it at most a moment."""
    _start_thread(work).join(_PRINT_SECONDS)


def _start_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
