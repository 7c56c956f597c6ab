"""Stall watchdog: detects a run without progress, reports what it waits for, and dumps the stacks of all processes.

It runs in a thread of its own, since the thread of the loop may be the one that hangs. ``miles stacks`` prints the
stacks of a run on demand.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from miles.cluster import stack_dump
from miles.core.errors import MilesError, UsageError
from miles.core.events import (
    BatchTaken,
    Evaluated,
    Event,
    GroupFinished,
    Progress,
    PromptAdmitted,
    RunStarted,
    Saved,
    StepFinished,
)
from miles.launch.config import StacksOptions

# The share of --stall-timeout after which stacks are dumped, before the run ends.
_DUMP_AT = 0.9
_MAX_TICKETS = 8


ListLoops = Callable[[], Iterable[asyncio.AbstractEventLoop]]


class StallWatchdog:
    """An observer of a run with ``seconds`` of ``--stall-timeout``; ``note`` is called for each stall."""

    def __init__(self, logs: Path, seconds: float, note: Callable[[str], None]) -> None:
        self._logs = logs
        self._seconds = seconds
        self._note = note
        self._since = time.monotonic()
        self._activity = "the run starts"
        self._waiting: dict[int, tuple[int, float]] = {}
        self._ended = threading.Event()
        self._list_loops: ListLoops = tuple
        self.report: Path | None = None

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, PromptAdmitted):
            self._waiting[event.ticket] = event.prompt_id, now
            return
        if isinstance(event, GroupFinished):
            self._waiting.pop(event.ticket, None)
        self._since = now
        self._activity = _describe_activity(event) or self._activity
        self.report = None

    @contextmanager
    def watching(self, list_loops: ListLoops = tuple) -> Iterator[None]:
        """Watch while the loop of this thread runs; an error it ends with then names the report, if there is one.

        ``list_loops`` returns further loops whose tasks are reported, those of user functions.
        """
        loop = asyncio.get_running_loop()
        self._list_loops = lambda: (loop, *list_loops())
        self._since = time.monotonic()
        threading.Thread(target=self._poll, name="watchdog", daemon=True).start()
        try:
            yield
        except MilesError as error:
            if self.report is None:
                raise
            raise MilesError(f"{error}; the stacks of all processes are in {self.report}") from error
        finally:
            self._ended.set()

    def _poll(self) -> None:
        while True:
            since = self._since
            left = since + _DUMP_AT * self._seconds - time.monotonic()
            if self._ended.wait(max(0.0, left) if self.report is None else self._seconds / 10):
                return
            if self.report is None and self._since == since:
                try:
                    self._write_report()
                except OSError as error:
                    self._note(f"The stacks of a stalled run could not be written: {error}")
                    return

    def _write_report(self) -> None:
        waited, activity = time.monotonic() - self._since, self._activity
        processes = [process for process in stack_dump.dump_all_processes() if process.pid != os.getpid()]
        frames = [f"{process.name} (process {process.pid}): {process.innermost}" for process in processes]
        tasks = "\n".join(stack_dump.describe_tasks(loop) for loop in self._list_loops())
        parts = [
            f"No progress for {waited:.0f} s: {activity}.",
            self._list_tickets(),
            "\n".join(["Innermost frame of each process:", *frames]),
            f"=== this process: tasks\n{tasks}",
            f"=== this process: threads\n{stack_dump.dump_own_threads()}",
            *(f"=== {process.name} (process {process.pid})\n{process.text or process.error}" for process in processes),
        ]
        self._logs.mkdir(parents=True, exist_ok=True)
        number = 1 + len(list(self._logs.glob("stall-*.txt")))
        path = self._logs / f"stall-{number}.txt"
        path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
        self.report = path
        silent = "".join(
            f"; {process.name} does not respond: {process.error}" for process in processes if process.error
        )
        self._note(f"For {waited:.0f} s {activity}{silent}; the stacks of all processes are in {path}.")

    def _list_tickets(self) -> str:
        now = time.monotonic()
        oldest = sorted(self._waiting.items(), key=lambda item: item[1][1])[:_MAX_TICKETS]
        lines = [f"  ticket {ticket}, prompt {prompt}, for {now - began:.0f} s" for ticket, (prompt, began) in oldest]
        return "\n".join([f"Prompts in rollout or waiting to be trained on: {len(self._waiting)}, the oldest:", *lines])


def print_stacks(run: Path, options: StacksOptions) -> int:
    """Print the stacks of all processes of a live run on this machine: ``miles stacks``."""
    folder = run / "logs" / "stacks"
    py_spy = shutil.which("py-spy")
    if py_spy is None and (options.native or options.locals or options.method == "py-spy"):
        raise UsageError("--native, --locals and --method py-spy need py-spy: pip install py-spy.")
    dumps: list[stack_dump.StackDump] = []
    if py_spy is not None and options.method != "signal":
        extra = [flag for flag, wanted in (("--native", options.native), ("--locals", options.locals)) if wanted]
        dumps = stack_dump.sample_all_processes(folder, [py_spy, "dump", *extra])
    if options.method != "py-spy" and (not dumps or all(dump.error for dump in dumps)):
        for dump in dumps[:1]:
            print(f"py-spy cannot read the processes ({dump.error}); they write their stacks themselves.\n")
        dumps = stack_dump.dump_all_processes(folder)
    if not dumps:
        raise MilesError(
            f"{run} has no live process on this machine; miles stacks reads those of a run that is running"
        )
    for dump in dumps:
        print(f"=== {dump.name} (process {dump.pid})\n{dump.text or dump.error}\n")
    return 0


def _describe_activity(event: Event) -> str | None:
    match event:
        case RunStarted():
            return "the engines wait for their first weights"
        case Progress():
            return f"step {event.step} waits for its next group ({event.done} of {event.total} are done)"
        case BatchTaken():
            return f"step {event.step} waits for the trainer, or for the weight update of the engines"
        case StepFinished():
            return f"step {event.step} is done, and the run waits for a checkpoint, an evaluation or the engines"
        case Evaluated() | Saved():
            return f"step {event.step} is done, and the run waits for the engines"
        case _:
            return None
