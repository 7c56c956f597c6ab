"""TensorBoard sink for all metrics; needs only the tensorboard package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from miles.core.events import Evaluated, Event, RunStarted, StepFinished


class TensorBoard:
    """Writes ``train/``, ``eval/``, ``seconds/`` and ``speculative/`` scalars.

    A resumed run hides the points it repeats.
    ``clock`` gives seconds since the epoch, which TensorBoard shows beside the step.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        # generated modules: their message classes exist only at run time
        self._events: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")
        self._clock = clock

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted() if event.step:
                self._void_after(event.step)
            case StepFinished() | Evaluated():
                self._write(event.step, scalars_from_event(event))
            case _:
                pass

    def commit(self) -> None:
        """Return when everything written is in the file."""
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        kind = self._summaries.Summary
        values = [kind.Value(tag=tag, simple_value=value) for tag, value in sorted(scalars.items())]
        self._add(step, summary=kind(value=values))

    def _void_after(self, step: int) -> None:
        """Mark what a previous process wrote beyond ``step`` as void."""
        kind = self._events.SessionLog
        self._add(step + 1, session_log=kind(status=kind.START))

    def _add(self, step: int, **payload: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=self._clock(), step=step, **payload))


def scalars_from_event(event: StepFinished | Evaluated) -> dict[str, float]:
    """Metrics and seconds of a step or an evaluation, by names with a section."""
    section = "train" if isinstance(event, StepFinished) else "eval"
    drafts = {name: value for name, value in event.seconds.items() if name.startswith("speculative/")}
    seconds = {name: value for name, value in event.seconds.items() if name not in drafts}
    return _add_section(event.metrics, section) | _add_section(seconds, "seconds") | _add_section(drafts, "speculative")


def _add_section(values: Mapping[str, float], section: str) -> dict[str, float]:
    """Prefix names with the section, by which charts are grouped."""
    return {
        name if name.startswith(f"{section}/") else f"{section}/{name}": float(value) for name, value in values.items()
    }
