"""The process tree of a program: number of processes, resource usage, and killing all of them."""

from __future__ import annotations

import os
import resource
import signal
import stat
from collections.abc import Iterator
from typing import NamedTuple

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_MEMORY_FIELDS = ("RssAnon", "RssShmem", "VmPTE")
# What the kernel holds for a full pipe, whose size a program cannot change, and for what was sent to a socket.
_BUFFER_BYTES = {stat.S_IFIFO: 64 << 10, stat.S_IFSOCK: 208 << 10}


class ResourceUsage(NamedTuple):
    """Usage of all processes together; ``tasks`` counts processes and threads."""

    tasks: int
    memory: int
    cpu: float


class ProcessTree:
    """The descendants of this process, found in an open ``/proc``.

    ``first`` says this process is the first of a PID namespace, ``own`` that the ``/proc`` shows only that namespace.
    Otherwise descendants are found from parent to child, orphans included, since this process adopts them.
    """

    def __init__(self, processes: int, *, first: bool, own: bool) -> None:
        self._processes = processes
        self._first = first
        self._own = own
        self._me = int(os.readlink("self", dir_fd=processes))
        self._lists_children = bool(self._list_directory(f"{self._me}/task/{self._me}", "children"))

    def usage(self) -> ResourceUsage:
        """Usage of the living processes; CPU time includes those that have ended.

        Memory includes page tables, and the buffers of pipes and sockets, each taken as full.
        """
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        tasks = 0
        memory = 0
        cpu = ended.ru_utime + ended.ru_stime
        buffers: dict[tuple[int, int], int] = {}
        for pid in self.pids():
            status = self._status_fields(pid)
            tasks += status.get("Threads", 0)
            memory += sum(status.get(name, 0) for name in _MEMORY_FIELDS) << 10
            cpu += sum(map(int, self._stat(pid)[11:15])) / _CLOCK_TICKS
            for file in self._open_files(pid):
                if size := _BUFFER_BYTES.get(stat.S_IFMT(file.st_mode)):
                    buffers[file.st_dev, file.st_ino] = size
        return ResourceUsage(tasks, memory + sum(buffers.values()), cpu)

    def hidden(self) -> int:
        """Bytes of deleted files that are still held open."""
        sizes: dict[tuple[int, int], int] = {}
        for pid in self.pids():
            for file in self._open_files(pid):
                if file.st_nlink == 0 and stat.S_ISREG(file.st_mode):
                    sizes[file.st_dev, file.st_ino] = file.st_blocks * 512
        return sum(sizes.values())

    def _open_files(self, pid: int) -> Iterator[os.stat_result]:
        for number in self._list_directory(f"{pid}/fd"):
            try:
                yield os.stat(f"{pid}/fd/{number}", dir_fd=self._processes)
            except OSError:
                continue  # closed meanwhile

    def kill(self) -> None:
        """Kill and reap every process; returns when none is left."""
        while True:
            living = [-1] if self._first else self.pids()  # -1: every process of the namespace
            for sig in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none can fork meanwhile
                for pid in living:
                    _send_signal(pid, sig)
            if not _reap(wait=self._first) and (self._first or not living):
                return

    def pids(self) -> list[int]:
        """Process ids of the living, as this ``/proc`` numbers them."""
        if self._own:
            return [pid for pid in self._all_pids() if pid != self._me]
        parents = (
            {} if self._lists_children else {pid: int(stat[1]) for pid in self._all_pids() if (stat := self._stat(pid))}
        )
        found: list[int] = []
        pending = [self._me]
        while pending:
            parent = pending.pop()
            children = (
                self._children(parent) if self._lists_children else [pid for pid in parents if parents[pid] == parent]
            )
            found += children
            pending += children
        return found

    def _all_pids(self) -> list[int]:
        return [int(name) for name in os.listdir(self._processes) if name.isdigit()]

    def _children(self, pid: int) -> list[int]:
        tasks = self._list_directory(f"{pid}/task")
        return [int(child) for task in tasks for child in self._read(f"{pid}/task/{task}/children").split()]

    def _stat(self, pid: int) -> list[bytes]:
        """The fields of ``stat`` after the command name, which may contain anything."""
        return self._read(f"{pid}/stat").rpartition(b")")[2].split()

    def _status_fields(self, pid: int) -> dict[str, int]:
        lines = (line.split() for line in self._read(f"{pid}/status").decode(errors="replace").splitlines())
        return {line[0][:-1]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}

    def _read(self, path: str) -> bytes:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._processes)
        except OSError:
            return b""  # it ended after it was listed
        try:
            return os.read(file, 1 << 16)
        except ProcessLookupError:
            return b""
        finally:
            os.close(file)

    def _list_directory(self, path: str, only: str | None = None) -> list[str]:
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


def _send_signal(pid: int, sig: int) -> None:
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return


def _reap(*, wait: bool) -> bool:
    """Reap ended children; True while living ones are left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, 0 if wait else os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
