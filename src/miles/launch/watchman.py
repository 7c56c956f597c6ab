"""Notices that a run stands still, says who waits for whom, and writes down the stacks of all its processes.

It looks from a thread of its own, for the one that runs the loop may be what stands still.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from miles.cluster import stacks
from miles.core.errors import MilesError
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

# At which part of the deadline for a group it is written down where everyone is: soon after, the run ends.
_SOON = 0.9
_NAMED = 8


class Watchman:
    """An observer of a run with ``seconds`` of ``--stall-timeout``; ``note`` is given a sentence of each stall."""

    def __init__(self, logs: Path, seconds: float, note: Callable[[str], None]) -> None:
        self._logs, self._seconds, self._note = logs, seconds, note
        self._since, self._doing = time.monotonic(), "the run begins"
        self._waiting: dict[int, tuple[int, float]] = {}
        self._ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.report: Path | None = None

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, PromptAdmitted):
            self._waiting[event.ticket] = event.prompt_id, now
            return
        if isinstance(event, GroupFinished):
            self._waiting.pop(event.ticket, None)
        self._since, self._doing, self.report = now, _doing(event) or self._doing, None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look while the loop of this thread runs; what it ends with then names the report, where there is one."""
        self._loop, self._since = asyncio.get_running_loop(), time.monotonic()
        threading.Thread(target=self._look, name="watchman", daemon=True).start()
        try:
            yield
        except MilesError as error:
            if self.report is None:
                raise
            raise MilesError(f"{error}; where each process stood is in {self.report}") from error
        finally:
            self._ended.set()

    def _look(self) -> None:
        while True:
            since = self._since
            left = since + _SOON * self._seconds - time.monotonic()
            if self._ended.wait(max(0.0, left) if self.report is None else self._seconds / 10):
                return
            if self.report is None and self._since == since:
                self._write()

    def _write(self) -> None:
        waited, doing = time.monotonic() - self._since, self._doing
        told = stacks.others()
        whom = [f"{one.name} (process {one.pid}): {one.innermost}" for one in told]
        loop = "" if self._loop is None else stacks.tasks(self._loop)
        parts = [
            f"For {waited:.0f} s nothing has happened: {doing}.",
            self._tickets(),
            "\n".join(["Where each process is:", *whom]),
            f"=== this process: its tasks\n{loop}",
            f"=== this process: its threads\n{stacks.own()}",
            *(f"=== {one.name} (process {one.pid})\n{one.text or one.silence}" for one in told),
        ]
        self._logs.mkdir(parents=True, exist_ok=True)
        number = 1 + len(list(self._logs.glob("stall-*.txt")))
        path = self._logs / f"stall-{number}.txt"
        path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
        self.report = path
        silent = "".join(f"; {one.name} says nothing: {one.silence}" for one in told if one.silence)
        self._note(f"For {waited:.0f} s {doing}{silent}; the stacks of all processes are in {path}.")

    def _tickets(self) -> str:
        now = time.monotonic()
        oldest = sorted(self._waiting.items(), key=lambda item: item[1][1])[:_NAMED]
        held = [f"  ticket {ticket}, prompt {prompt}, for {now - began:.0f} s" for ticket, (prompt, began) in oldest]
        return "\n".join([f"In the rollout plane or on the shelf: {len(self._waiting)} prompts, the oldest:", *held])


def _doing(event: Event) -> str | None:
    match event:
        case RunStarted():
            return "the engines wait for their first weights"
        case Progress():
            return f"step {event.step} waits for its next group ({event.done} of {event.wanted} are back)"
        case BatchTaken():
            return f"step {event.step} waits for the trainer, or for the engines to take its weights"
        case StepFinished():
            return f"step {event.step} is done, and the run waits for a checkpoint, an evaluation or the engines"
        case Evaluated() | Saved():
            return f"step {event.step} is behind the run, which waits for the engines"
        case _:
            return None
