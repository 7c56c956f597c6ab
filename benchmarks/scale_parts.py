"""Where a process spends its CPU time, by part of the driver: the innermost file on the stack that is known."""

from __future__ import annotations

import gc
import signal
import time
from collections import defaultdict
from types import CodeType, FrameType
from typing import Any

SIMULATED, LOOP, GARBAGE = "simulated", "event loop", "garbage"
_ALL = "simulated, with all that is called"

# Files (by how their path ends) and, where one file does several things, functions; the first that fits counts.
_PARTS: tuple[tuple[str, frozenset[str] | None, str], ...] = (
    ("benchmarks/scale_world.py", frozenset({"ask"}), "publish"),
    ("benchmarks/scale_world.py", frozenset({"_told"}), _ALL),
    ("benchmarks/scale_world.py", None, SIMULATED),
    ("schedule/gate.py", None, "admission"),
    ("rollout/source.py", None, "admission"),
    ("schedule/loop.py", frozenset({"_produce", "_draw", "_enter"}), "admission"),
    ("schedule/loop.py", frozenset({"_one"}), "filter and credit"),
    ("schedule/loop.py", frozenset({"_cursor_at"}), "cursor"),
    ("schedule/loop.py", None, "shelf and batch"),
    ("schedule/shelf.py", None, "shelf and batch"),
    ("schedule/saver.py", None, "cursor"),
    ("schedule/recover.py", None, "cursor"),
    ("rollout/produce.py", frozenset({"_in_time", "_checked", "_score_together"}), "scoring"),
    ("rollout/produce.py", None, "producing"),
    ("rollout/seeds.py", None, "producing"),
    ("rollout/generate/single_turn.py", None, "producing"),
    ("rollout/filters.py", None, "filter and credit"),
    ("miles/algo/", None, "filter and credit"),
    ("miles/observe/metric.py", None, "step metrics"),
    ("miles/observe/", None, "journal"),
    ("sglang/fleet.py", frozenset({"_choose", "generate"}), "choosing"),
    ("sglang/loads.py", None, "choosing"),
    ("sglang/client.py", frozenset({"attempt", "_body"}), "requests"),
    ("sglang/parts.py", None, "requests"),
    ("sglang/reply.py", None, "requests"),
    ("miles/backends/sglang/", None, "publish"),
    ("miles/sync/", None, "publish"),
)


class Parts:
    """CPU seconds by part while it is entered; time collecting garbage is a part of its own."""

    def __init__(self, every: float = 0.001) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.longest_collection = 0.0
        self._every, self._last = every, 0.0
        self._began: float | None = None
        self._known: dict[CodeType, str | None] = {}

    def __enter__(self) -> Parts:
        self._last = time.process_time()
        gc.callbacks.append(self._collecting)
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, self._every, self._every)
        return self

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        gc.callbacks.remove(self._collecting)

    def _look(self, number: int, frame: FrameType | None) -> None:
        if self._began is not None:  # a collection under way is counted when it ends
            return
        part = None
        while frame is not None:
            code = frame.f_code
            if code not in self._known:
                self._known[code] = _part_of(code)
            found, frame = self._known[code], frame.f_back
            if found == _ALL:
                part = SIMULATED
            part = part or found
        self._count(part or LOOP)

    def _collecting(self, phase: str, info: dict[str, Any]) -> None:
        """What was spent up to here is not the collection's: it is left to whoever is seen next."""
        if phase == "start":
            self._began = time.process_time()
            return
        assert self._began is not None
        spent, self._began = time.process_time() - self._began, None
        self.longest_collection = max(self.longest_collection, spent)
        self.seconds[GARBAGE] += spent
        self._last += spent

    def _count(self, part: str) -> None:
        now = time.process_time()
        self.seconds[part] += now - self._last
        self._last = now


def _part_of(code: CodeType) -> str | None:
    path = code.co_filename.replace("\\", "/")
    for ending, names, part in _PARTS:
        fits = ending in path if ending.endswith("/") else path.endswith(ending)
        if fits and (names is None or code.co_name in names):
            return part
    return None
