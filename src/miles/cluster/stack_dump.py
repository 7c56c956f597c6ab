"""Stack dumps of every process of a run: a signal has each process write the stacks of its threads to a file.

Only processes with a file in the directory of ``DUMP_DIR_ENV`` are signalled, because the signal would end any other.
The file name has the process id, its start time and its name.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CoroutineType
from typing import IO

DUMP_DIR_ENV = "MILES_STACKS"
DUMP_SIGNAL = signal.SIGUSR1
_DUMP_SECONDS = 3.0
_POLL_SECONDS = 0.05
_SAMPLE_SECONDS = 30.0
# Process states of /proc that explain why a process writes no stacks.
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in the kernel", "Z": "dead"}
_open_files: list[IO[str]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDump:
    """The stacks of all threads of one process; ``error`` is why there are none."""

    name: str
    pid: int
    text: str = ""
    error: str = ""

    @property
    def innermost(self) -> str:
        """The innermost frame of its main thread, which is dumped last."""
        lines = self.text.rpartition("hread 0x")[2].splitlines()
        return lines[1].strip() if len(lines) > 1 else self.error or "no stack was written"


def create_dump_dir(folder: Path, name: str) -> None:
    """Create an empty dump directory, which this process, called ``name``, and its children use from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink(missing_ok=True)
    os.environ[DUMP_DIR_ENV] = str(folder.resolve())
    register_process(name)


def remove_dump_dir() -> None:
    """Remove the dump directory; no process is signalled any more."""
    folder = os.environ.pop(DUMP_DIR_ENV, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    if _open_files:
        faulthandler.unregister(DUMP_SIGNAL)
    while _open_files:
        _open_files.pop().close()


def register_process(name: str) -> None:
    """Let this process dump its stacks on the signal, if the run has a dump directory."""
    folder = os.environ.get(DUMP_DIR_ENV)
    started = _start_time(os.getpid())
    if folder is None or started is None or not Path(folder).is_dir():
        return
    file = (Path(folder) / f"{os.getpid()}-{started}-{name.replace(' ', '-')}.txt").open("w")
    _open_files.append(file)
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True, chain=False)


def dump_all_processes(folder: Path | None = None) -> list[StackDump]:
    """The current stacks of all registered processes, of this run or of the one with this dump directory."""
    if folder is None:
        folder = Path(os.environ[DUMP_DIR_ENV]) if DUMP_DIR_ENV in os.environ else None
    if folder is None:
        return []
    signalled: list[tuple[Path, int, str, int]] = []
    for path, pid, name in _list_registered(folder):
        signalled.append((path, pid, name, path.stat().st_size))
        with suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)
    deadline = time.monotonic() + _DUMP_SECONDS
    return [_read_dump(path, pid, name, size, deadline) for path, pid, name, size in signalled]


def _list_registered(folder: Path) -> list[tuple[Path, int, str]]:
    """The file, process id and name of each registered process that is alive."""
    found: list[tuple[Path, int, str]] = []
    for path in sorted(folder.glob("*-*-*.txt")):
        pid, started, name = path.stem.split("-", 2)
        if _start_time(int(pid)) == int(started):  # else it has ended, and the id may be another's
            found.append((path, int(pid), name.replace("-", " ")))
    return found


def sample_all_processes(folder: Path, command: Sequence[str]) -> list[StackDump]:
    """The stacks of all processes of a run, registered or begun by one that is, as py-spy prints them.

    ``command`` is that of py-spy, to which the process id is added. A process that it may not read has an error.
    """
    names = {pid: name for _, pid, name in _list_registered(folder)}
    for pid in _list_descendants(set(names)):
        if pid not in names and "python" in _read_command(pid):
            names[pid] = _read_command(pid)[:80]
    dumps: list[StackDump] = []
    for pid, name in names.items():
        line = [*command, "--pid", str(pid)]
        try:
            done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=_SAMPLE_SECONDS)
        except subprocess.TimeoutExpired:
            problem = f"py-spy did not answer within {_SAMPLE_SECONDS:.0f} seconds"
            dumps.append(StackDump(name=name, pid=pid, text="", error=problem))
            continue
        problem = (done.stderr.strip().splitlines() or [f"py-spy ended with status {done.returncode}"])[-1]
        error = problem if done.returncode else ""
        dumps.append(StackDump(name=name, pid=pid, text="" if error else done.stdout, error=error))
    return dumps


def _list_descendants(roots: set[int]) -> list[int]:
    """The ids of all processes that were begun, directly or not, by ``roots``."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _read_stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    known = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in known and pid not in known}:
        known |= more
    return sorted(known - roots)


def _read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def dump_own_threads() -> str:
    """The stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Where each task of an event loop waits; the loop may run on another thread."""
    for _ in range(5):
        with suppress(RuntimeError):  # the set of tasks changed meanwhile
            lines = []
            for task in asyncio.all_tasks(loop):
                lines.append(f"{task.get_name()}: {' < '.join(reversed(_await_chain(task.get_coro())))}")
            return "\n".join(sorted(lines))
    return "the tasks changed while they were listed"


def _await_chain(coroutine: object) -> list[str]:
    """The frames of a coroutine and of what it awaits, outermost first."""
    frames: list[str] = []
    while isinstance(coroutine, CoroutineType):
        frame = coroutine.cr_frame
        if frame is not None:
            frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        coroutine = coroutine.cr_await
    return frames


def _read_dump(path: Path, pid: int, name: str, before: int, deadline: float) -> StackDump:
    """What a process wrote to its file, once that has stopped growing."""
    size = before
    while True:
        current = path.stat().st_size
        if current > before and current == size:
            with path.open("rb") as file:
                file.seek(before)
                return StackDump(name=name, pid=pid, text=file.read().decode(errors="replace"))
        if time.monotonic() > deadline and current == before:
            fields = _read_stat(pid)
            error = _STATES.get(fields[0], "it did not respond") if fields else "it has just ended"
            return StackDump(name=name, pid=pid, error=error)
        size = current
        time.sleep(_POLL_SECONDS)


def _start_time(pid: int) -> int | None:
    """The start time of a process in kernel ticks; None if there is no such process, or no /proc."""
    fields = _read_stat(pid)
    return int(fields[19]) if fields else None


def _read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
