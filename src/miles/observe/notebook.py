"""Notebook view: a progress bar and the last step lines as one HTML output of the cell, updated in place."""

from __future__ import annotations

import sys
from collections import deque
from html import escape
from types import TracebackType
from typing import Any

from miles.core import events
from miles.core.events import Event
from miles.observe.formatting import format_duration
from miles.observe.step_line import GAP, RunProgress
from miles.observe.view import ProgressStage

_LINES = 8


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


class NotebookView:
    """A bar for the steps, the last lines below it. ``display`` shows HTML and returns a handle that replaces it."""

    def __init__(self, display: Any = None, *, parity_tolerance: float = 0.01) -> None:
        self._progress = RunProgress(parity_tolerance=parity_tolerance)
        self._activity = ""
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._display = display or _display_html
        self._handle: Any = None

    def stage(self, name: str, total: int | None = None) -> ProgressStage:
        return _NotebookStage(self, name, total)

    def __call__(self, event: Event) -> None:
        self.event(event)

    def event(self, event: Event) -> None:
        self._progress.update(event)
        match event:
            case events.Progress():
                self.show(f"rollout {event.done}/{event.total}")
            case events.BatchTaken():
                self.show("training")
            case events.StepFinished():
                self.note(GAP.join(cell.text() for cell in self._progress.step_cells(event)))
                if reason := self._progress.explain_no_learning(event):
                    self.note(reason)
            case events.Evaluated():
                self.note(GAP.join(cell.text() for cell in self._progress.eval_cells(event)))
            case _:
                message = self._progress.message(event)
                if message is not None:
                    self.note(message)

    def note(self, text: str) -> None:
        self._lines.append(text)
        self.show(self._activity)

    def show(self, activity: str) -> None:
        """Replace the output of the cell."""
        self._activity = activity
        html = self._render()
        if self._handle is None:
            self._handle = self._display(html)
        else:
            self._handle.update(html)

    def close(self) -> None:
        self.show("")

    def _render(self) -> Any:
        progress = self._progress
        seconds_left = progress.eta()
        eta = "" if seconds_left is None else f"eta {format_duration(seconds_left)}"
        state = GAP.join(part for part in (f"{progress.step}/{progress.steps}", self._activity, eta) if part)
        bar = f'<progress value="{progress.step}" max="{max(1, progress.steps)}" style="width:24em"></progress>'
        lines = "\n".join(escape(line) for line in self._lines)
        return f'<div>{bar} <code>{escape(state)}</code><pre style="margin:0">{lines}</pre></div>'


def _display_html(html: str) -> Any:
    from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

    handle: Any = display(HTML(html), display_id=True)

    class Handle:
        def update(self, html: str) -> None:
            handle.update(HTML(html))

    return Handle()


class _NotebookStage:
    """Progress of a piece of work as the activity beside the bar."""

    def __init__(self, view: NotebookView, name: str, total: int | None) -> None:
        self._view = view
        self._name = name
        self._total = total
        self._count = 0
        view.show(name)

    def __call__(self, n: int = 1, note: str = "") -> None:
        self._count += n
        share = "" if self._total is None else f" {self._count}/{self._total}"
        self._view.show(f"{self._name}{share}" + (f", {note}" if note else ""))

    def finish(self, note: str = "") -> None:
        self._view.show("")

    def __enter__(self) -> ProgressStage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
