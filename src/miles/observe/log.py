"""Append-only logs that continue exactly where a killed run was, and prove that they did.

A checkpoint remembers how long each log was. A run killed later has written more; the run that takes
over repeats the same events, and each is held against the line already there:

    |---- confirmed ----|---- written before the kill, not yet repeated ----|~torn~|
    0               offset()                                                    end of file

Equal lines are left as they are, so the file only ever grows. A line that differs is the end of the
deterministic promise: an error where that was promised, otherwise the rest is set aside. Lines of what need not happen
again (an engine came or went) are passed over.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from miles.core.errors import ResumeError
from miles.core.events import UNREPEATED, Event, RunEnded
from miles.observe.record import Record, event_record, line, metric_record, session_record, timing_record

_UNREPEATED = frozenset(kind.__name__ for kind in UNREPEATED)

Encode = Callable[[Event], Record | None]


class EventLog:
    """One JSON object a line, from the events ``encode`` keeps.

    ``resume_at`` is None for a new log, else the ``offset`` a checkpoint recorded (0 to start over
    in a directory that has no checkpoint yet). With ``strict`` an event that differs from what an
    earlier life of the run wrote raises ResumeError; without it the old rest goes to a file of its own
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
            self._offset, self._ahead = self._take_up(resume_at)
        except BaseException:
            self._file.close()
            raise

    def __call__(self, event: Event) -> None:
        """Write the event, or confirm that it is written."""
        record = self._encode(event)
        if record is not None:
            self.write(record)

    def write(self, record: Record) -> None:
        """Write a record, or confirm that it is written."""
        new = line(record)
        if record.get("event") in _UNREPEATED and self._ahead:
            return  # there is no place for it between lines that are repeated; the log of sessions has it
        while self._ahead and self._ahead[0] != new and _unrepeated(self._ahead[0]):
            self._offset += len(self._ahead.popleft())
        if self._ahead and self._ahead[0] != new:
            self._disagree(new)
        if self._ahead:
            self._ahead.popleft()
        else:
            self._file.write(new)
            self._file.flush()
        self._offset += len(new)

    def offset(self) -> int:
        """How many bytes of the log this run stands behind; what a checkpoint records."""
        return self._offset

    def ahead(self) -> int:
        """How many lines an earlier life of the run wrote that this one has not come to yet."""
        return len(self._ahead)

    def settle(self) -> None:
        """The run is over: what an earlier life wrote beyond its end is set aside."""
        if self._ahead:
            self._set_aside()

    def commit(self) -> None:
        """Return when everything written is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _take_up(self, resume_at: int | None) -> tuple[int, deque[bytes]]:
        """Go to ``resume_at``; cut what is torn; give the offset and the lines after it."""
        size = self._file.seek(0, os.SEEK_END)
        if resume_at is None and size:
            raise ResumeError(f"{self.path} already holds a run; continue that run or give this one a new directory.")
        start = resume_at or 0
        if start > size:
            raise ResumeError(
                f"{self.path} has {size} bytes but the checkpoint was taken at byte {start}, so the log was cut or "
                "replaced since; restore it or start a new run directory."
            )
        self._file.seek(max(0, start - 1))
        if start and self._file.read(1) != b"\n":
            raise ResumeError(
                f"{self.path} has no line end at byte {start}, where the checkpoint was taken, so the log was edited "
                "since; restore it or start a new run directory."
            )
        ahead = deque(_whole_lines(self._file.read()))
        self._file.seek(start + sum(map(len, ahead)))
        self._file.truncate()
        return start, ahead

    def _disagree(self, new: bytes) -> None:
        old = self._ahead[0]
        if self._strict:
            self._file.seek(0)
            number = self._file.read(self._offset).count(b"\n") + 1
            raise ResumeError(
                f"{self.path} line {number}: the continued run does not repeat what was written before it was "
                f"interrupted; before: {old.decode().strip()}; now: {new.decode().strip()}; the code, the data or the "
                "machine changed, or the run is not deterministic."
            )
        self._set_aside()

    def _set_aside(self) -> None:
        """Keep the lines that were not repeated in a file of their own, then cut them off the log."""
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


def _whole_lines(data: bytes) -> list[bytes]:
    """The lines up to the first that a kill or a power cut left unfinished."""
    whole: list[bytes] = []
    for one in data.splitlines(keepends=True):
        if not one.endswith(b"\n") or not _is_record(one):
            break
        whole.append(one)
    return whole


def _is_record(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _unrepeated(text: bytes) -> bool:
    """Is it of an event that a run which is continued need not have again?"""
    return json.loads(text).get("event") in _UNREPEATED


class PlainLog:
    """A log of what never repeats, such as seconds: on resume it is cut back to the checkpoint and grows again."""

    def __init__(self, path: Path, *, resume_at: int | None, encode: Encode) -> None:
        self.path = path
        self._encode = encode
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        size = self._file.tell()
        # what is missing of a log of seconds is no reason to refuse a run
        self._file.truncate(min(size, resume_at or 0))
        self._file.seek(0, os.SEEK_END)

    def __call__(self, event: Event) -> None:
        record = self._encode(event)
        if record is not None:
            self._file.write(line(record))
            self._file.flush()

    def offset(self) -> int:
        """The length a checkpoint records."""
        return self._file.tell()

    def commit(self) -> None:
        """Return when everything written is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class SessionLog:
    """When a process took the run up, saved it and left it; only ever appended to."""

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("ab")
        self._file.write(b"\n" if torn else b"")
        self._clock = clock

    def __call__(self, event: Event) -> None:
        record = session_record(event)
        if record is not None:
            self._file.write(line(record | {"time": self._clock()}))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class RunLogs:
    """All logs of a run directory as one observer, whose state is a length for each.

    ``resume_at`` is None for a new run, else what ``marks`` gave when the checkpoint was taken (empty
    to start over in a directory that has no checkpoint yet). Call ``commit`` before a checkpoint that
    records ``marks`` becomes visible.
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
        for log in self._logs.values():
            log(event)
            if isinstance(event, RunEnded) and event.finished and isinstance(log, EventLog):
                log.settle()
        self._sessions(event)

    def marks(self) -> dict[str, int]:
        """How long each log is, for the checkpoint."""
        return {name: log.offset() for name, log in self._logs.items()}

    def commit(self) -> None:
        """Return when everything written is on the disk."""
        for log in self._logs.values():
            log.commit()

    def close(self) -> None:
        for log in self._logs.values():
            log.close()
        self._sessions.close()

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
