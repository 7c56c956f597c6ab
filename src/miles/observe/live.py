"""Live view: progress bars at the bottom of the terminal, and one line per step scrolling above them."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from miles.core import events
from miles.core.events import Event
from miles.observe.formatting import ParityStatus, format_duration
from miles.observe.step_line import GAP, Cell, RunProgress, fit
from miles.observe.view import ProgressStage, supports_unicode

COLOURS = {ParityStatus.OK: "green", ParityStatus.WARN: "yellow", ParityStatus.RED: "bold red"}


class LiveView:
    """Bars for work in progress, lines for events. ``close`` restores the terminal."""

    def __init__(self, stream: TextIO, *, parity_tolerance: float = 0.01, console: Console | None = None) -> None:
        self._console = Console(file=stream, highlight=False) if console is None else console
        self._unicode = supports_unicode(stream)
        self._progress = RunProgress(parity_tolerance=parity_tolerance, unicode=self._unicode)
        self._bars = Progress(
            SpinnerColumn("dots" if self._unicode else "line", finished_text=" "),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=28 if self._console.width >= 60 else 10),
            _Fraction(),
            _Note(table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self._console,
            refresh_per_second=5,
            transient=True,
        )
        self._steps: TaskID | None = None
        self._bars.start()

    def stage(self, name: str, total: int | None = None) -> ProgressStage:
        return _LiveStage(self._bars, self, name, total)

    def __call__(self, event: Event) -> None:
        self.event(event)

    def event(self, event: Event) -> None:
        self._progress.update(event)
        match event:
            case events.RunStarted():
                self._print_message(self._progress.message(event))
                self._steps = self._bars.add_task("steps", total=event.steps, completed=event.step, note="")
            case events.Progress():
                self._update(f"rollout {event.done}/{event.total}")
            case events.BatchTaken():
                self._update("training")
            case events.StepFinished():
                self._print_line(self._progress.step_cells(event), self._progress.step_cells(event, brief=True))
                self._print_message(self._progress.explain_no_learning(event))
                self._update("", completed=event.step)
            case events.Evaluated():
                cells = self._progress.eval_cells(event)
                self._print_line(cells, cells, style="bold cyan")
            case events.RunEnded():
                self._print_message(self._progress.message(event))
                self._remove_steps()
            case _:
                self._print_message(self._progress.message(event))

    def note(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        self._remove_steps()
        self._bars.stop()

    def _print_message(self, message: str | None) -> None:
        if message is not None:
            self._console.print(Text(message, style="dim"), soft_wrap=True)

    def _print_line(self, wide: list[Cell], brief: list[Cell], style: str = "") -> None:
        cells, dot = fit(wide, brief, self._console.width), "●" if self._unicode else "*"
        pieces = [_render_cell(cell, style, dot) for cell in cells]
        self._console.print(Text(GAP).join(pieces), no_wrap=True, overflow="ellipsis", crop=True)

    def _update(self, activity: str, completed: int | None = None) -> None:
        if self._steps is not None:
            seconds_left = self._progress.eta()
            eta = f"eta {format_duration(seconds_left)}" if seconds_left is not None else ""
            note = GAP.join(part for part in (activity, eta) if part)
            self._bars.update(self._steps, completed=completed, note=note)

    def _remove_steps(self) -> None:
        if self._steps is not None:
            self._bars.remove_task(self._steps)
            self._steps = None


def _render_cell(cell: Cell, style: str, dot: str) -> Text:
    text = Text()
    if cell.label:
        text.append(f"{cell.label} ", style="dim")
    if cell.status is not None:
        # without colour the word tells what the dot would
        text.append(f"{dot} ", style=COLOURS[cell.status])
        text.append(cell.value if cell.status is ParityStatus.OK else f"{cell.status} {cell.value}")
    else:
        text.append(cell.value, style=style or ("bold" if cell.label == "reward" else ""))
    return text


class _LiveStage:
    def __init__(self, bars: Progress, view: LiveView, name: str, total: int | None) -> None:
        self._bars = bars
        self._view = view
        self._name = name
        self._total = total
        self._count = 0
        self._task: TaskID | None = bars.add_task(name, total=total, note="")

    def __call__(self, n: int = 1, note: str = "") -> None:
        self._count += n
        if self._task is None:
            return
        if self._total is not None and self._count >= self._total:
            self.finish(note)
        else:
            self._bars.update(self._task, completed=self._count, note=note)

    def finish(self, note: str = "") -> None:
        if self._task is None:
            return
        elapsed = self._bars.tasks[self._bars.task_ids.index(self._task)].elapsed or 0.0
        self._bars.remove_task(self._task)
        self._task = None
        self._view.note(f"{self._name}: done in {format_duration(elapsed)}" + (f", {note}" if note else ""))

    def __enter__(self) -> ProgressStage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None


class _Fraction(ProgressColumn):
    """Completed of total; empty if the total is unknown."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}", style="dim")


class _Note(ProgressColumn):
    """The current activity."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get("note", "")), style="dim", overflow="ellipsis", no_wrap=True)
