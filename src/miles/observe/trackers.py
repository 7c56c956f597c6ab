"""Experiment trackers: Weights & Biases, MLflow, Trackio, TensorBoard, Prometheus and OpenTelemetry, several at once.

    loop ──record──▶ bounded queue ──thread──▶ TensorBoard, Prometheus, OpenTelemetry
    loop ──record──▶ bounded queue ──thread──▶ process (tracker_worker) ──▶ wandb, MLflow, Trackio

The loop never waits for a tracker: it appends to the queue, and drops the record where the queue is full. A tracker
that fails is tried again, later and later, and reported once; how many records it missed is reported at the end.
Packages with threads and connections of their own run in a process, which can be ended whatever they do.

A run keeps its ids there in ``trackers.json`` of the run directory, so that a resumed run continues the same curves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from miles.core.errors import MilesError, describe_error
from miles.core.events import Event
from miles.observe.tracker_records import RecordBuilder, TrackerRecord, encode_record, hide_secrets

_CAPACITY = 2000
"""Records of a step, a few KiB each, that wait for a slow tracker."""
_ATTEMPTS = 3
_LONGEST_DELAY = 60.0
_CLOSE_SECONDS = 60.0
_END_SECONDS = 5.0


class Tracker(Protocol):
    """Somewhere to log to. All methods but ``kill`` are called by one thread, and may raise or take long."""

    name: str

    def open(self) -> str:
        """Connect, or connect again after an error; returns one line that says where to look."""
        ...

    def log(self, record: TrackerRecord) -> None: ...

    def close(self) -> None:
        """End the run there, with everything sent."""
        ...

    def kill(self) -> None:
        """Make a call that hangs return, from another thread."""
        ...


def choose_delay(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row.

    >>> [choose_delay(failures) for failures in (1, 3, 10)]
    [2.0, 8.0, 60.0]
    """
    return min(_LONGEST_DELAY, 2.0**failures)


class TrackerQueue:
    """A tracker on a thread of its own, behind a bounded queue; ``delay`` gives the pause after failures in a row."""

    def __init__(
        self, tracker: Tracker, *, capacity: int = _CAPACITY, delay: Callable[[int], float] = choose_delay
    ) -> None:
        self._tracker = tracker
        self._capacity = capacity
        self._delay = delay
        self._records: deque[TrackerRecord] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_abandoned = False
        self._has_warned = False
        self._messages: deque[str] = deque()
        self._num_records = 0
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"tracker-{tracker.name}", daemon=True)
        self._thread.start()

    def put(self, record: TrackerRecord) -> None:
        """Append a record, or drop it if the queue is full; never waits."""
        with self._changed:
            self._num_records += 1
            if len(self._records) >= self._capacity:
                self._num_dropped += 1
                self._warn(f"is slow: {self._capacity} records wait for it, and further ones are dropped")
            else:
                self._records.append(record)
                self._changed.notify()

    def take_messages(self) -> list[str]:
        """Return what there is to report, once."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def finish(self) -> None:
        """Say that no record follows, and return at once."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def join(self, seconds: float) -> None:
        """Wait for the records to be sent, for ``seconds`` at most; then count what was not."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._is_abandoned = True
            self._tracker.kill()
            self._thread.join(_END_SECONDS)
        with self._changed:
            missed = self._num_dropped + len(self._records)
        if missed:
            self._messages.append(f"{self._tracker.name}: {missed} of {self._num_records} records were not sent.")

    def _warn(self, what: str) -> None:
        """Report the first problem of the tracker."""
        if not self._has_warned:
            self._has_warned = True
            text = f"The tracker {self._tracker.name} {what}; the run goes on."
            self._messages.append(hide_secrets(text, os.environ))

    def _run(self) -> None:
        """Send records until the queue is finished; what the tracker raises stays here."""
        is_open = False
        failures = attempts = 0
        while True:
            with self._changed:
                while (is_open or failures) and not (self._records or self._is_closing):
                    self._changed.wait()
                record = self._records[0] if self._records else None
            if record is None and (is_open or failures):
                break
            try:
                if not is_open:
                    self._messages.append(self._tracker.open())
                    is_open = True
                if record is not None:
                    self._tracker.log(record)
                failures = attempts = 0
            except Exception as error:  # whatever the package raises: no network, no key, a wrong id
                failures, attempts = failures + 1, attempts + is_open  # a record waits for a tracker to open
                is_open = is_open and not isinstance(error, TrackerProcessError)
                self._warn(f"failed and is tried again ({describe_error(error)})")
            if not self._settle(record, failures, attempts):
                break
            attempts = 0 if attempts >= _ATTEMPTS else attempts
        self._close_tracker(is_open)

    def _settle(self, record: TrackerRecord | None, failures: int, attempts: int) -> bool:
        """Remove a record that was sent or tried often enough, and wait after a failure; False to give up."""
        with self._changed:
            if record is not None and (not failures or attempts >= _ATTEMPTS):
                self._records.popleft()
                self._num_dropped += bool(failures)
            if failures and not self._is_closing:
                self._changed.wait_for(lambda: self._is_closing, self._delay(failures))
                return not self._is_abandoned
            # at the end, a first failure is tried again at once, and one of a tracker that was failing is the last
            return failures < 2 and not self._is_abandoned

    def _close_tracker(self, is_open: bool) -> None:
        try:
            if is_open:
                self._tracker.close()
            else:
                self._tracker.kill()
        except Exception as error:
            self._warn(f"failed at the end ({describe_error(error)})")


class Trackers:
    """Sends records to all trackers of a run; ``clock`` reads seconds, for the deadline at the end."""

    def __init__(
        self,
        trackers: Sequence[Tracker],
        build_record: RecordBuilder,
        *,
        note: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._trackers = tuple(trackers)
        self._queues: list[TrackerQueue] = []
        self._build_record = build_record
        self._note = note
        self._clock = clock

    def __call__(self, event: Event) -> None:
        if not self._queues:  # the first event: a run that cannot start begins no run elsewhere
            self._queues = [TrackerQueue(tracker) for tracker in self._trackers]
        record = self._build_record(event) if self._queues else None
        for queue in self._queues:
            if record is not None:
                queue.put(record)
        self._report()

    def close(self) -> None:
        """Send what waits, for a minute at most, and report what was not sent."""
        for queue in self._queues:
            queue.finish()
        deadline = self._clock() + _CLOSE_SECONDS
        for queue in self._queues:
            queue.join(deadline - self._clock())
        self._report()

    def _report(self) -> None:
        """Report here, on the thread of the loop, what the trackers' threads have to say."""
        for queue in self._queues:
            for message in queue.take_messages():
                self._note(message)


class TrackerIds:
    """The ids of a run in its trackers: ``trackers.json`` of the run directory."""

    def __init__(self, run: Path) -> None:
        self._path = run / "trackers.json"
        self._lock = threading.Lock()

    def read(self) -> dict[str, str]:
        """Return all ids by name."""
        return json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else {}

    def update(self, ids: Mapping[str, str]) -> None:
        """Add ids, atomically."""
        with self._lock:
            old = self.read()
            if old | dict(ids) != old:
                part = self._path.with_name(f"{self._path.name}.part")
                part.write_text(json.dumps(old | dict(ids), indent=1, sort_keys=True), encoding="utf-8")
                part.replace(self._path)


class TrackerProcessError(MilesError):
    """The process of a tracker ended, or could not open the tracker; it must be opened again."""


class TrackerProcess:
    """A tracker in a process of its own, ``miles.observe.tracker_worker``, which answers each line with one line.

    ``settings`` are the tracker's, and ``environment`` is added to that of this process: keys are passed there only.
    What the process prints is written to ``log_path``.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        *,
        ids: TrackerIds,
        log_path: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self._settings = dict(settings)
        self._ids = ids
        self._log_path = log_path
        self._environment = dict(environment)
        self._process: subprocess.Popen[str] | None = None

    def open(self) -> str:
        """Start the process and open the tracker, under the ids that the run has there."""
        self.kill()
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "miles.observe.tracker_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env={**os.environ, **self._environment},
                start_new_session=True,  # Ctrl-C in the terminal is for the run
            )
        opening = {"tracker": self.name, "settings": self._settings, "ids": self._ids.read()}
        try:
            answer = self._ask(json.dumps(opening, default=str))
        except MilesError as error:
            raise TrackerProcessError(str(error)) from error
        self._ids.update(answer["ids"])
        return str(answer["message"])

    def log(self, record: TrackerRecord) -> None:
        """Send a record, and return when the package has taken it."""
        self._ask(encode_record(record))

    def close(self) -> None:
        """End the tracker's run, and the process."""
        self._ask("")
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self.kill()

    def kill(self) -> None:
        """End the process and those it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _ask(self, line: str) -> dict[str, Any]:
        """Send a line and return the answer; an empty line ends the run there."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except (OSError, ValueError) as error:
            raise TrackerProcessError(f"its process ended; see {self._log_path}") from error
        if not answer:
            raise TrackerProcessError(f"its process ended; see {self._log_path}")
        values: dict[str, Any] = json.loads(answer)
        if "error" in values:
            raise MilesError(values["error"])
        return values
