"""Append-only logs that a resumed run continues exactly, with verification.

A checkpoint records the length of each log. A run killed later has written more; the resumed run
repeats the same events, and each is compared with the line already there:

    |---- confirmed ----|---- written before the kill, not yet repeated ----|~torn~|
    0               offset()                                                    end of file

Equal lines stay, so the file only ever grows. A differing line means that the run is not
deterministic: an error if ``strict``, otherwise the rest is moved to another file. Lines of events that need not
repeat (an engine joined or left) are skipped.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from miles.core.errors import ResumeError
from miles.core.events import NOT_REPLAYED, Event, Progress, PromptAdmitted, RunEnded
from miles.observe.event_records import Record, encode_line, event_record, metric_record, session_record, timing_record

_NOT_REPLAYED = frozenset(kind.__name__ for kind in NOT_REPLAYED)

Encode = Callable[[Event], Record | None]


class EventLog:
    """JSON lines of the events for which ``encode`` returns a record.

    ``resume_at`` is None for a new log, else the ``offset`` a checkpoint recorded (0 to start over
    in a directory that has no checkpoint yet). With ``strict`` an event that differs from what a
    previous process wrote raises ResumeError; without it the old rest is moved to a new file
    in ``undone`` (default: the folder ``logs`` beside the log).
    """

    def __init__(
        self,
        path: Path,
        *,
        resume_at: int | None,
        strict: bool = True,
        encode: Encode = event_record,
        undone: Path | None = None,
    ) -> None:
        self.path = path
        self._encode = encode
        self._strict = strict
        self._undone = path.parent / "logs" if undone is None else undone
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("r+b" if path.exists() else "x+b")
        try:
            self._offset, self._ahead = self._resume(resume_at)
        except BaseException:
            self._file.close()
            raise

    def __call__(self, event: Event) -> None:
        """Write the event, or confirm that it is already written."""
        record = self._encode(event)
        if record is not None:
            self.write(record)

    def write(self, record: Record) -> None:
        """Write a record, or confirm that it is already written."""
        new = encode_line(record)
        if record.get("event") in _NOT_REPLAYED and self._ahead:
            return  # it cannot be inserted between repeated lines; the session log has it
        while self._ahead and self._ahead[0] != new and _is_not_replayed(self._ahead[0]):
            self._offset += len(self._ahead.popleft())
        if self._ahead and self._ahead[0] != new:
            self._handle_mismatch(new)
        if self._ahead:
            self._ahead.popleft()
        else:
            self._file.write(new)
            self._file.flush()
        self._offset += len(new)

    def offset(self) -> int:
        """Return the number of confirmed bytes, which a checkpoint records."""
        return self._offset

    def ahead(self) -> int:
        """Return the number of lines of a previous process that are not yet repeated."""
        return len(self._ahead)

    def finish(self) -> None:
        """Move lines that a previous process wrote beyond the end of the run to another file."""
        if self._ahead:
            self._move_ahead_lines()

    def commit(self) -> None:
        """Return when everything written is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _resume(self, resume_at: int | None) -> tuple[int, deque[bytes]]:
        """Seek to ``resume_at`` and truncate a torn last line; returns the offset and the lines after it."""
        size = self._file.seek(0, os.SEEK_END)
        if resume_at is None and size:
            raise ResumeError(f"{self.path} already holds a run; resume that run or use a new directory.")
        start = resume_at or 0
        if start > size:
            raise ResumeError(
                f"{self.path} has {size} bytes but the checkpoint was taken at byte {start}, so the log was truncated "
                "or replaced; restore it or use a new run directory."
            )
        self._file.seek(max(0, start - 1))
        if start and self._file.read(1) != b"\n":
            raise ResumeError(
                f"{self.path} has no line end at byte {start}, where the checkpoint was taken, so the log was edited; "
                "restore it or use a new run directory."
            )
        ahead = deque(_complete_lines(self._file.read()))
        self._file.seek(start + sum(map(len, ahead)))
        self._file.truncate()
        return start, ahead

    def _handle_mismatch(self, new: bytes) -> None:
        old = self._ahead[0]
        if self._strict:
            self._file.seek(0)
            number = self._file.read(self._offset).count(b"\n") + 1
            raise ResumeError(
                f"{self.path} line {number}: the resumed run does not repeat what was written before the "
                f"interruption; before: {old.decode().strip()}; now: {new.decode().strip()}; the code, the data or the "
                "machine changed, or the run is not deterministic."
            )
        self._move_ahead_lines()

    def _move_ahead_lines(self) -> None:
        """Move the lines that were not repeated to a new file."""
        self._undone.mkdir(parents=True, exist_ok=True)
        number = 1
        while (target := self._undone / f"{self.path.stem}-undone-{number}.jsonl").exists():
            number += 1
        part = target.with_suffix(".part")
        with part.open("wb") as file:
            file.writelines(self._ahead)
            file.flush()
            os.fsync(file.fileno())
        part.rename(target)
        self._ahead.clear()
        self._file.seek(self._offset)
        self._file.truncate()


def _complete_lines(data: bytes) -> list[bytes]:
    """Return the lines up to the first incomplete one."""
    lines: list[bytes] = []
    for text in data.splitlines(keepends=True):
        if not text.endswith(b"\n") or not _is_record(text):
            break
        lines.append(text)
    return lines


def _is_record(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _is_not_replayed(text: bytes) -> bool:
    """Return whether a resumed run need not repeat the event of this line."""
    return json.loads(text).get("event") in _NOT_REPLAYED


class PlainLog:
    """A log of non-deterministic data, such as times: on resume it is truncated to the checkpoint's length."""

    def __init__(self, path: Path, *, resume_at: int | None, encode: Encode) -> None:
        self.path = path
        self._encode = encode
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        size = self._file.tell()
        # missing timings do not prevent a run from resuming
        self._file.truncate(min(size, resume_at or 0))
        self._file.seek(0, os.SEEK_END)

    def __call__(self, event: Event) -> None:
        record = self._encode(event)
        if record is not None:
            self._file.write(encode_line(record))
            self._file.flush()

    def offset(self) -> int:
        """Return the length, which a checkpoint records."""
        return self._file.tell()

    def commit(self) -> None:
        """Return when everything written is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class SessionLog:
    """Log of processes: when each started, saved and ended; only appended to."""

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("ab")
        self._file.write(b"\n" if torn else b"")
        self._clock = clock

    def __call__(self, event: Event) -> None:
        record = session_record(event)
        if record is not None:
            self._file.write(encode_line(record | {"time": self._clock()}))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class RunLogs:
    """All logs of a run directory as one observer, whose state is the length of each.

    ``resume_at`` is None for a new run, else the ``offsets`` at the checkpoint (empty
    to start over in a directory that has no checkpoint yet). Call ``commit`` before a checkpoint that
    records the ``offsets`` becomes visible.
    """

    def __init__(
        self, folder: Path, *, resume_at: Mapping[str, int] | None, strict: bool, clock: Callable[[], float]
    ) -> None:
        def start(name: str) -> int | None:
            return None if resume_at is None else resume_at.get(name, 0)

        self._sessions = SessionLog(folder / "logs" / "sessions.jsonl", clock=clock)
        self._logs: dict[str, EventLog | PlainLog] = {
            "events": EventLog(folder / "events.jsonl", resume_at=start("events"), strict=strict),
            "metrics": EventLog(
                folder / "metrics.jsonl", resume_at=start("metrics"), strict=strict, encode=metric_record
            ),
            "timings": PlainLog(folder / "timings.jsonl", resume_at=start("timings"), encode=timing_record),
        }

    def __call__(self, event: Event) -> None:
        if isinstance(event, PromptAdmitted | Progress):  # live only, and many
            return
        for log in self._logs.values():
            log(event)
            if isinstance(event, RunEnded) and event.finished and isinstance(log, EventLog):
                log.finish()
        self._sessions(event)

    def offsets(self) -> dict[str, int]:
        """Return the length of each log, for the checkpoint."""
        return {name: log.offset() for name, log in self._logs.items()}

    def commit(self) -> None:
        """Return when everything written is on disk."""
        for log in self._logs.values():
            log.commit()

    def close(self) -> None:
        with ExitStack() as stack:  # closes all, also if one fails
            for log in (self._sessions, *self._logs.values()):
                stack.callback(log.close)

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
