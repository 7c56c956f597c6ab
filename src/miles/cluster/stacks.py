"""The stacks of every process of a run, each asked by a signal to write its own down.

A process that may be asked has a file in the folder that ``FOLDER`` names, called by its id, when it began, and who it
is: a signal sent to any other would end it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CoroutineType
from typing import IO

FOLDER = "MILES_STACKS"
ASK = signal.SIGUSR1
_ANSWER_SECONDS = 3.0
_LOOK = 0.05
# What /proc calls the states a process can be in, of those that explain why it says nothing.
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in the kernel", "Z": "dead"}
_held: list[IO[str]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What one process said of all its threads; ``silence`` says why it did not."""

    name: str
    pid: int
    text: str = ""
    silence: str = ""

    @property
    def innermost(self) -> str:
        """Where its main thread is: a line of the text. The main thread is told of last."""
        last = self.text.rpartition("hread 0x")[2].splitlines()
        return last[1].strip() if len(last) > 1 else self.silence or "nothing was said"


def open_folder(folder: Path) -> None:
    """This process's children put their files there from now on, and it is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink(missing_ok=True)
    os.environ[FOLDER] = str(folder.resolve())


def close_folder() -> None:
    """Nobody is asked any more."""
    folder = os.environ.pop(FOLDER, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def register(name: str) -> None:
    """Let this process be asked, where its run wants that."""
    folder = os.environ.get(FOLDER)
    began = _began(os.getpid())
    if folder is None or began is None or not Path(folder).is_dir():
        return
    file = (Path(folder) / f"{os.getpid()}-{began}-{name.replace(' ', '-')}.txt").open("w")
    _held.append(file)
    faulthandler.register(ASK, file=file, all_threads=True, chain=False)


def others() -> list[Stack]:
    """What all registered processes that live say now."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return []
    asked: list[tuple[Path, int, str, int]] = []
    for path in sorted(Path(folder).glob("*-*-*.txt")):
        pid, began, name = path.stem.split("-", 2)
        if _began(int(pid)) != int(began):
            path.unlink(missing_ok=True)  # its process is gone, and the number may be another's
            continue
        asked.append((path, int(pid), name.replace("-", " "), path.stat().st_size))
        with suppress(ProcessLookupError):
            os.kill(int(pid), ASK)
    deadline = time.monotonic() + _ANSWER_SECONDS
    return [_heard(*each, deadline) for each in asked]


def own() -> str:
    """All threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def tasks(loop: asyncio.AbstractEventLoop) -> str:
    """What each task of a loop waits at, which may be another thread's."""
    for _ in range(5):
        with suppress(RuntimeError):  # the set of tasks changed meanwhile
            lines = []
            for task in asyncio.all_tasks(loop):
                lines.append(f"{task.get_name()}: {' < '.join(reversed(_awaited(task.get_coro())))}")
            return "\n".join(sorted(lines))
    return "the tasks change too fast to be listed"


def _awaited(coroutine: object) -> list[str]:
    """Where a coroutine is, and where is what it awaits, and so on inwards."""
    places: list[str] = []
    while isinstance(coroutine, CoroutineType):
        frame = coroutine.cr_frame
        if frame is not None:
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        coroutine = coroutine.cr_await
    return places


def _heard(path: Path, pid: int, name: str, before: int, deadline: float) -> Stack:
    """Its answer, once it has stopped growing."""
    size = before
    while True:
        now = path.stat().st_size
        if now > before and now == size:
            with path.open("rb") as file:
                file.seek(before)
                return Stack(name=name, pid=pid, text=file.read().decode(errors="replace"))
        if time.monotonic() > deadline and now == before:
            state = _STATES.get(_stat(pid)[0], "it did not answer") if _stat(pid) else "it has just ended"
            return Stack(name=name, pid=pid, silence=state)
        size = now
        time.sleep(_LOOK)


def _began(pid: int) -> int | None:
    """When a process began, in the kernel's ticks; None where there is none, or no telling."""
    stat = _stat(pid)
    return int(stat[19]) if stat else None


def _stat(pid: int) -> list[str]:
    """What /proc says of a process, from its state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
