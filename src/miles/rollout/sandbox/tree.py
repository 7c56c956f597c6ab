"""All processes a program started, wherever they went: how many, how much they use, and the end of them."""

from __future__ import annotations

import os
import resource
import signal
import stat
from typing import NamedTuple

_TICK = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """What the processes use together; ``tasks`` are processes and threads."""

    tasks: int
    memory: int
    cpu: float


class Tree:
    """The descendants of this process, found in an open ``/proc``.

    ``first`` says this process is the first of a process namespace, ``own`` that the ``/proc`` shows that namespace
    and nobody else. Otherwise they are found from parent to child, orphans too, since this process adopts them.
    """

    def __init__(self, processes: int, *, first: bool, own: bool) -> None:
        self._processes = processes
        self._first = first
        self._own = own
        self._me = int(os.readlink("self", dir_fd=processes))
        self._lists_children = bool(self._listed(f"{self._me}/task/{self._me}", "children"))

    def usage(self) -> Usage:
        """Of those alive, and in CPU time of those that have ended too."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        tasks, memory, cpu = 0, 0, ended.ru_utime + ended.ru_stime
        for pid in self.pids():
            status = self._fields(pid)
            tasks += status.get("Threads", 0)
            memory += (status.get("RssAnon", 0) + status.get("RssShmem", 0)) << 10
            cpu += sum(map(int, self._stat(pid)[11:15])) / _TICK
        return Usage(tasks, memory, cpu)

    def hidden(self) -> int:
        """Bytes of files that have no name any more, but are held open."""
        held: dict[tuple[int, int], int] = {}
        for pid in self.pids():
            for number in self._listed(f"{pid}/fd"):
                try:
                    file = os.stat(f"{pid}/fd/{number}", dir_fd=self._processes)
                except OSError:
                    continue  # closed meanwhile
                if file.st_nlink == 0 and stat.S_ISREG(file.st_mode):
                    held[file.st_dev, file.st_ino] = file.st_blocks * 512
        return sum(held.values())

    def kill(self) -> None:
        """End and bury every one; comes back when none is left."""
        while True:
            living = [-1] if self._first else self.pids()  # the kernel knows all of a namespace
            for blow in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none has a child meanwhile
                for pid in living:
                    _strike(pid, blow)
            if not _bury(wait=self._first) and (self._first or not living):
                return

    def pids(self) -> list[int]:
        """Of all that are alive, as the ``/proc`` in hand numbers them."""
        if self._own:
            return [pid for pid in self._all() if pid != self._me]
        parents = (
            {} if self._lists_children else {pid: int(stat[1]) for pid in self._all() if (stat := self._stat(pid))}
        )
        found: list[int] = []
        ahead = [self._me]
        while ahead:
            parent = ahead.pop()
            children = (
                self._children(parent) if self._lists_children else [pid for pid in parents if parents[pid] == parent]
            )
            found += children
            ahead += children
        return found

    def _all(self) -> list[int]:
        return [int(name) for name in os.listdir(self._processes) if name.isdigit()]

    def _children(self, pid: int) -> list[int]:
        tasks = self._listed(f"{pid}/task")
        return [int(child) for task in tasks for child in self._read(f"{pid}/task/{task}/children").split()]

    def _stat(self, pid: int) -> list[bytes]:
        """From the state on; what is before may hold anything."""
        return self._read(f"{pid}/stat").rpartition(b")")[2].split()

    def _fields(self, pid: int) -> dict[str, int]:
        lines = (line.split() for line in self._read(f"{pid}/status").decode(errors="replace").splitlines())
        return {line[0][:-1]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}

    def _read(self, path: str) -> bytes:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._processes)
        except OSError:
            return b""  # it ended between being listed and being looked at
        try:
            return os.read(file, 1 << 16)
        except ProcessLookupError:
            return b""
        finally:
            os.close(file)

    def _listed(self, path: str, only: str | None = None) -> list[str]:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._processes)
        except OSError:
            return []
        try:
            return [name for name in os.listdir(folder) if only in (None, name)]
        except OSError:
            return []
        finally:
            os.close(folder)


def _strike(pid: int, blow: int) -> None:
    try:
        os.kill(pid, blow)
    except ProcessLookupError:
        return


def _bury(*, wait: bool) -> bool:
    """Reap what has ended; True while something is left to be reaped."""
    while True:
        try:
            pid, _ = os.waitpid(-1, 0 if wait else os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
