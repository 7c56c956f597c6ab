"""The plain view: one line a step, for logs, pipes and terminals that cannot move a cursor."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from miles.core.events import Evaluated, Event, StepFinished
from miles.observe.line import GAP, Story
from miles.observe.text import duration, figure
from miles.observe.view import Stage, speaks_unicode


class PlainView:
    """Writes lines and nothing else; when nobody reads the stream any more it falls silent."""

    def __init__(self, stream: TextIO, *, parity_tolerance: float = 0.01) -> None:
        self._stream = stream
        self._story = Story(parity_tolerance=parity_tolerance, unicode=speaks_unicode(stream))
        self._gone = False

    def stage(self, name: str, total: int | None = None) -> Stage:
        return _PlainStage(self, name, total)

    def __call__(self, event: Event) -> None:
        self.event(event)

    def event(self, event: Event) -> None:
        self._story.see(event)
        match event:
            case StepFinished():
                left = self._story.eta()
                eta = [] if left is None else [f"eta {duration(left)}"]
                self.note(GAP.join([*(cell.text() for cell in self._story.step_cells(event)), *eta]))
            case Evaluated():
                self.note(GAP.join(cell.text() for cell in self._story.eval_cells(event)))
            case _:
                sentence = self._story.sentence(event)
                if sentence is not None:
                    self.note(sentence)

    def note(self, text: str) -> None:
        if self._gone:
            return
        encoding = getattr(self._stream, "encoding", None) or "ascii"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except BrokenPipeError:  # whoever was reading has left: the run goes on without them
            self._gone = True

    def close(self) -> None: ...


class _PlainStage:
    """A line at the start, one each further quarter of the way, and one at the end."""

    def __init__(self, view: PlainView, name: str, total: int | None) -> None:
        self._view, self._name, self._total = view, name, total
        self._at, self._quarter, self._over = 0, 0, False
        view.note(f"{name} ..." if total is None else f"{name} ... (0/{total})")

    def __call__(self, n: int = 1, note: str = "") -> None:
        self._at += n
        if self._over or not self._total:
            return
        if self._at >= self._total:
            self.done(note)
        elif (quarter := 4 * self._at // self._total) > self._quarter:
            self._quarter = quarter
            self._say(f"{figure(100 * self._at / self._total, 2)}% ({self._at}/{self._total})", note)

    def done(self, note: str = "") -> None:
        if not self._over:
            self._over = True
            self._say("done", note)

    def _say(self, state: str, note: str) -> None:
        self._view.note(f"{self._name} ... {state}" + (f": {note}" if note else ""))

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.done()
