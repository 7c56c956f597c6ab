"""Where the time went, as a trace that Perfetto and chrome://tracing open: ``trace/loop.json``.

One track for the loop (rollout, train, publish, evaluate), one for the parts of a training step. The file is
a JSON array that is only ever appended to; readers of the format do not ask for its closing bracket, so a
killed run leaves a trace too. Each life of a run is a process of its own in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from miles.core.events import Evaluated, Event, RunStarted, StepFinished

_LOOP, _PARTS = 1, 2
_PHASES = ("rollout", "train", "publish")


class Trace:
    """A sink for finished steps and evaluations; ``clock`` reads seconds since some common start."""

    def __init__(self, folder: Path, *, clock: Callable[[], float]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "loop.json"
        self._clock = clock
        self._life = path.read_text().count('"process_name"') + 1 if path.exists() else 1
        self._file = path.open("a")
        self._file.write("" if self._life > 1 else "[\n")

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._name("process_name", 0, f"life {self._life}, from step {event.step}")
                self._name("thread_name", _LOOP, "loop")
                self._name("thread_name", _PARTS, "training step")
            case StepFinished():
                for line in self._step(event.step, event.seconds):
                    self._write(line)
            case Evaluated() if "evaluate" in event.seconds:
                start = self._clock() - event.seconds["evaluate"]
                self._write(self._span(f"evaluate {event.step}", _LOOP, start, event.seconds["evaluate"]))
            case _:
                pass

    def commit(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _step(self, step: int, seconds: Mapping[str, float]) -> Iterator[dict[str, object]]:
        """The phases of a step end to end, back from now; the trainer's own parts under its phase."""
        start = self._clock() - sum(seconds.get(phase, 0.0) for phase in _PHASES)
        for phase in _PHASES:
            spent = seconds.get(phase, 0.0)
            yield self._span(f"{phase} {step}", _LOOP, start, spent)
            inner = start
            for name, part in seconds.items():
                if name.startswith(f"{phase}/"):
                    yield self._span(name, _PARTS, inner, part)
                    inner += part
            start += spent

    def _span(self, name: str, track: int, start: float, spent: float) -> dict[str, object]:
        return {
            "name": name,
            "ph": "X",
            "pid": self._life,
            "tid": track,
            "ts": round(start * 1e6),
            "dur": round(spent * 1e6),
        }

    def _name(self, kind: str, track: int, name: str) -> None:
        self._write({"name": kind, "ph": "M", "pid": self._life, "tid": track, "args": {"name": name}})

    def _write(self, record: Mapping[str, object]) -> None:
        self._file.write(json.dumps(record) + ",\n")
