"""OOM killer: whether the kernel killed a process for its memory, by the ``oom_kill`` counter of the memory cgroup.

The counter is in ``memory.events`` of cgroup v2 and in ``memory.oom_control`` of v1. It does not say which processes of
the cgroup were killed; one that ended by SIGKILL while the counter moved is taken for one of them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from miles.cluster.process import describe_exit

OOM_KILLED = "the kernel killed it because"
"""In every description of a process that the OOM killer ended."""
_SAMPLE_SECONDS = 10.0  # a kill is counted before the process has ended, but seldom that long before
_UNLIMITED = 1 << 60  # v1 has no word for it, but a number of about 2**63
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """The memory cgroup of this process: its folder, and the root of the hierarchy."""

    folder: Path
    root: Path

    @classmethod
    def find(cls, proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> MemoryCgroup | None:
        """The cgroup of this process; None where there is none with a counter."""
        rows = [line.split(":", 2) for line in _read(proc / "self" / "cgroup").splitlines()]
        paths = {controllers: path for _, controllers, path in (row for row in rows if len(row) == 3)}
        v1 = next((paths[names] for names in paths if "memory" in names.split(",")), None)
        root, path = (mount / "memory", v1) if v1 is not None else (mount, paths.get("", "/"))
        # In a container the path may be that of the host, while the mount begins at the container's cgroup.
        for folder in (root / path.lstrip("/"), root):
            if cls(folder, root).count_kills() is not None:
                return cls(folder, root)
        return None

    def count_kills(self) -> int | None:
        """How many processes of it the OOM killer has killed; None where that is unknown."""
        for name in ("memory.events", "memory.oom_control"):
            for line in _read(self.folder / name).splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.isdecimal():
                    return int(value)
        return None

    def read_limit(self) -> int | None:
        """The bytes that its processes may use: the lowest limit of it and its parents; None without one."""
        limits: list[int] = []
        for folder in (self.folder, *self.folder.parents):
            for name in ("memory.max", "memory.limit_in_bytes"):
                text = _read(folder / name).strip()
                limits += [int(text)] if text.isdecimal() and int(text) < _UNLIMITED else []
            if folder == self.root:
                break
        return min(limits, default=None)


class OomKillMonitor:
    """Describes how child processes ended. Created before them; ``note_alive`` is called while they run."""

    def __init__(self, cgroup: MemoryCgroup | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._cgroup = cgroup or MemoryCgroup.find()
        self._now = now
        self._sampled = now()
        self._before = self._latest = self._count()

    def note_alive(self) -> None:
        """Kills of more than a few seconds ago are those of other processes."""
        if self._now() - self._sampled >= _SAMPLE_SECONDS:
            self._sampled = self._now()
            self._before, self._latest = self._latest, self._count()

    def describe_exit(self, code: int) -> str:
        """How a process ended: its exit code or its signal, and for SIGKILL whether the kernel sent it."""
        ended = describe_exit(code)
        if ended != signal.SIGKILL.name:
            return ended
        kills = self._count()
        if self._cgroup is None or kills is None or self._before is None:
            return f"{ended} (the kernel does this when memory runs out)"
        if kills <= self._before:
            return f"{ended}, which another process sent"
        limit = self._cgroup.read_limit()
        if limit is None:
            return f"{ended}: {OOM_KILLED} the host's memory was used up"
        return f"{ended}: {OOM_KILLED} the cgroup's memory limit of {limit / _GIB:.3g} GiB was reached"

    def _count(self) -> int | None:
        return None if self._cgroup is None else self._cgroup.count_kills()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError):  # ValueError: a path with a zero byte
        return ""
