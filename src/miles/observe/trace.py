"""Trace of the loop's phases in Chrome trace format, for Perfetto and chrome://tracing: ``trace/loop.json``.

One track for the loop (rollout, train, publish, evaluate), one for the parts of a training step, and counters of
speculative decoding. The file is
a JSON array, closed when the process ends in order; readers of the format accept a missing closing bracket, so the
trace of a killed run can be read too. Each session of a resumed run is a process of the trace.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from miles.core.events import Evaluated, Event, RunStarted, StepFinished

_LOOP, _PARTS = 1, 2
_PHASES = ("rollout", "train", "publish")
_SEPARATOR = b",\n"


class LoopTrace:
    """A sink for finished steps and evaluations; ``clock`` reads seconds since some common start."""

    def __init__(self, folder: Path, *, clock: Callable[[], float]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "loop.json"
        self._clock = clock
        self._file = path.open("r+b" if path.exists() else "x+b")
        try:
            self._session = self._reopen()
        except BaseException:
            self._file.close()
            raise

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._write_name("process_name", 0, f"session {self._session}, from step {event.step}")
                self._write_name("thread_name", _LOOP, "loop")
                self._write_name("thread_name", _PARTS, "training step")
            case StepFinished():
                for line in self._step_spans(event.step, event.seconds):
                    self._write(line)
                for line in self._counters(event.seconds):
                    self._write(line)
            case Evaluated() if "evaluate" in event.seconds:
                start = self._clock() - event.seconds["evaluate"]
                self._write(self._span(f"evaluate {event.step}", _LOOP, start, event.seconds["evaluate"]))
            case _:
                pass

    def commit(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Close the array, so that the file is valid JSON."""
        try:
            end = self._file.seek(0, os.SEEK_END)
            self._file.seek(max(0, end - len(_SEPARATOR)))
            if self._file.read() == _SEPARATOR:
                self._file.seek(end - len(_SEPARATOR))
                self._file.truncate()
                self._file.write(b"\n]\n")
            else:  # nothing was recorded
                self._file.write(b"]\n")
        finally:
            self._file.close()

    def _reopen(self) -> int:
        """Continue the array after its last complete record; returns the number of this session."""
        data = self._file.read()
        if data.endswith(b"}\n]\n"):
            data = data.removesuffix(b"\n]\n") + _SEPARATOR
        complete = data[: data.rfind(_SEPARATOR) + len(_SEPARATOR)] if _SEPARATOR in data else b"[\n"
        self._file.seek(len(complete) - 2)
        self._file.write(complete[-2:])
        self._file.truncate()
        return complete.count(b'"process_name"') + 1

    def _step_spans(self, step: int, seconds: Mapping[str, float]) -> Iterator[dict[str, object]]:
        """Yield the phases of a step, ending now, and the parts of each phase."""
        start = self._clock() - sum(seconds.get(phase, 0.0) for phase in _PHASES)
        for phase in _PHASES:
            duration = seconds.get(phase, 0.0)
            yield self._span(f"{phase} {step}", _LOOP, start, duration)
            part_start = start
            for name, part in seconds.items():
                if name.startswith(f"{phase}/"):
                    yield self._span(name, _PARTS, part_start, part)
                    part_start += part
            start += duration

    def _counters(self, seconds: Mapping[str, float]) -> Iterator[dict[str, object]]:
        """Yield a counter for each metric of speculative decoding."""
        values = {name: value for name, value in seconds.items() if name.startswith("speculative/")}
        now = round(self._clock() * 1e6) if values else 0
        for name, value in values.items():
            yield {"name": name, "ph": "C", "pid": self._session, "ts": now, "args": {"value": value}}

    def _span(self, name: str, track: int, start: float, duration: float) -> dict[str, object]:
        """Build a span; its end is rounded, not its duration, so that it never overlaps the one that follows."""
        first, end = round(start * 1e6), round((start + duration) * 1e6)
        return {"name": name, "ph": "X", "pid": self._session, "tid": track, "ts": first, "dur": end - first}

    def _write_name(self, kind: str, track: int, name: str) -> None:
        self._write({"name": kind, "ph": "M", "pid": self._session, "tid": track, "args": {"name": name}})

    def _write(self, record: Mapping[str, object]) -> None:
        self._file.write(json.dumps(record).encode() + _SEPARATOR)
