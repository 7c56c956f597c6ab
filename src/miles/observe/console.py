"""Plain view: one line per step, for logs, pipes and terminals without cursor movement."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from miles.core.events import Evaluated, Event, StepFinished
from miles.observe.formatting import format_duration, format_number
from miles.observe.step_line import GAP, RunProgress
from miles.observe.view import ProgressStage, supports_unicode


class PlainView:
    """Writes plain lines; stops writing when the stream is closed by its reader."""

    def __init__(self, stream: TextIO, *, parity_tolerance: float = 0.01) -> None:
        self._stream = stream
        self._progress = RunProgress(parity_tolerance=parity_tolerance, unicode=supports_unicode(stream))
        self._closed = False

    def stage(self, name: str, total: int | None = None) -> ProgressStage:
        return _PlainStage(self, name, total)

    def __call__(self, event: Event) -> None:
        self.event(event)

    def event(self, event: Event) -> None:
        self._progress.update(event)
        match event:
            case StepFinished():
                seconds_left = self._progress.eta()
                eta = [] if seconds_left is None else [f"eta {format_duration(seconds_left)}"]
                self.note(GAP.join([*(cell.text() for cell in self._progress.step_cells(event)), *eta]))
                if reason := self._progress.explain_no_learning(event):
                    self.note(reason)
            case Evaluated():
                self.note(GAP.join(cell.text() for cell in self._progress.eval_cells(event)))
            case _:
                message = self._progress.message(event)
                if message is not None:
                    self.note(message)

    def note(self, text: str) -> None:
        if self._closed:
            return
        encoding = getattr(self._stream, "encoding", None) or "ascii"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except BrokenPipeError:  # the reader is gone; the run continues
            self._closed = True

    def close(self) -> None: ...


class _PlainStage:
    """Prints a line at the start, at each further quarter, and at the end."""

    def __init__(self, view: PlainView, name: str, total: int | None) -> None:
        self._view = view
        self._name = name
        self._total = total
        self._count = 0
        self._quarter = 0
        self._finished = False
        view.note(f"{name} ..." if total is None else f"{name} ... (0/{total})")

    def __call__(self, n: int = 1, note: str = "") -> None:
        self._count += n
        if self._finished or not self._total:
            return
        if self._count >= self._total:
            self.finish(note)
        elif (quarter := 4 * self._count // self._total) > self._quarter:
            self._quarter = quarter
            self._print(f"{format_number(100 * self._count / self._total, 2)}% ({self._count}/{self._total})", note)

    def finish(self, note: str = "") -> None:
        if not self._finished:
            self._finished = True
            self._print("done", note)

    def _print(self, state: str, note: str) -> None:
        self._view.note(f"{self._name} ... {state}" + (f": {note}" if note else ""))

    def __enter__(self) -> ProgressStage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
