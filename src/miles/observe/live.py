"""The live view: bars at the foot of the terminal, and one line a step scrolling above them."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from miles.core import events
from miles.core.events import Event
from miles.observe.line import GAP, Cell, Story, fit
from miles.observe.text import Light, duration
from miles.observe.view import Stage, speaks_unicode

COLOURS = {Light.OK: "green", Light.WARN: "yellow", Light.RED: "bold red"}


class LiveView:
    """Bars for what has an end, lines for what happened. ``close`` gives the terminal back as it was."""

    def __init__(self, stream: TextIO, *, parity_tolerance: float = 0.01, console: Console | None = None) -> None:
        self._console = Console(file=stream, highlight=False) if console is None else console
        self._unicode = speaks_unicode(stream)
        self._story = Story(parity_tolerance=parity_tolerance, unicode=self._unicode)
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

    def stage(self, name: str, total: int | None = None) -> Stage:
        return _LiveStage(self._bars, self, name, total)

    def __call__(self, event: Event) -> None:
        self.event(event)

    def event(self, event: Event) -> None:
        self._story.see(event)
        match event:
            case events.RunStarted():
                self._say(self._story.sentence(event))
                self._steps = self._bars.add_task("steps", total=event.steps, completed=event.step, note="")
            case events.Progress():
                self._update(f"rollout {event.done}/{event.wanted}")
            case events.BatchTaken():
                self._update("training")
            case events.StepFinished():
                self._line(self._story.step_cells(event), self._story.step_cells(event, brief=True))
                self._update("", completed=event.step)
            case events.Evaluated():
                cells = self._story.eval_cells(event)
                self._line(cells, cells, style="bold cyan")
            case events.RunEnded():
                self._say(self._story.sentence(event))
                self._remove_steps()
            case _:
                self._say(self._story.sentence(event))

    def note(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        self._remove_steps()
        self._bars.stop()

    def _say(self, sentence: str | None) -> None:
        if sentence is not None:
            self._console.print(Text(sentence, style="dim"), soft_wrap=True)

    def _line(self, wide: list[Cell], brief: list[Cell], style: str = "") -> None:
        cells, dot = fit(wide, brief, self._console.width), "●" if self._unicode else "*"
        pieces = [_painted(cell, style, dot) for cell in cells]
        self._console.print(Text(GAP).join(pieces), no_wrap=True, overflow="ellipsis", crop=True)

    def _update(self, doing: str, completed: int | None = None) -> None:
        if self._steps is not None:
            left = self._story.eta()
            note = GAP.join(part for part in (doing, f"eta {duration(left)}" if left is not None else "") if part)
            self._bars.update(self._steps, completed=completed, note=note)

    def _remove_steps(self) -> None:
        if self._steps is not None:
            self._bars.remove_task(self._steps)
            self._steps = None


def _painted(cell: Cell, style: str, dot: str) -> Text:
    text = Text()
    if cell.label:
        text.append(f"{cell.label} ", style="dim")
    if cell.light is not None:
        # without colour the word says what the dot would
        text.append(f"{dot} ", style=COLOURS[cell.light])
        text.append(cell.value if cell.light is Light.OK else f"{cell.light} {cell.value}")
    else:
        text.append(cell.value, style=style or ("bold" if cell.label == "reward" else ""))
    return text


class _LiveStage:
    def __init__(self, bars: Progress, view: LiveView, name: str, total: int | None) -> None:
        self._bars, self._view, self._name, self._total = bars, view, name, total
        self._at = 0
        self._task: TaskID | None = bars.add_task(name, total=total, note="")

    def __call__(self, n: int = 1, note: str = "") -> None:
        self._at += n
        if self._task is None:
            return
        if self._total is not None and self._at >= self._total:
            self.done(note)
        else:
            self._bars.update(self._task, completed=self._at, note=note)

    def done(self, note: str = "") -> None:
        if self._task is None:
            return
        spent = self._bars.tasks[self._bars.task_ids.index(self._task)].elapsed or 0.0
        self._bars.remove_task(self._task)
        self._task = None
        self._view.note(f"{self._name}: done in {duration(spent)}" + (f", {note}" if note else ""))

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.done()
        elif self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None


class _Fraction(ProgressColumn):
    """Done of total, or nothing where nobody knows the total."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}", style="dim")


class _Note(ProgressColumn):
    """What goes on now."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get("note", "")), style="dim", overflow="ellipsis", no_wrap=True)
