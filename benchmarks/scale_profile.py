"""Sampling profiler of the driver: CPU time by component, by the innermost known file on the stack."""

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
    ("benchmarks/scale_simulation.py", frozenset({"request"}), "publish"),
    ("benchmarks/scale_simulation.py", frozenset({"_build_response"}), _ALL),
    ("benchmarks/scale_simulation.py", None, SIMULATED),
    ("schedule/admission.py", None, "admission"),
    ("rollout/data/dataset.py", None, "admission"),
    ("schedule/loop.py", frozenset({"_produce", "_next_prompt", "_enter"}), "admission"),
    ("schedule/loop.py", frozenset({"_finish_group"}), "filter and advantages"),
    ("schedule/loop.py", frozenset({"_build_cursor"}), "cursor"),
    ("schedule/loop.py", None, "reorder buffer and batch"),
    ("schedule/reorder_buffer.py", None, "reorder buffer and batch"),
    ("schedule/checkpoint_writer.py", None, "cursor"),
    ("schedule/checkpoints.py", None, "cursor"),
    ("rollout/group_rollout.py", frozenset({"_await_reward", "_check_reward", "_score_together"}), "scoring"),
    ("rollout/group_rollout.py", None, "rollout"),
    ("rollout/seeds.py", None, "rollout"),
    ("rollout/generate/single_turn.py", None, "rollout"),
    ("rollout/filters.py", None, "filter and advantages"),
    ("miles/algo/", None, "filter and advantages"),
    ("miles/observe/metric.py", None, "step metrics"),
    ("miles/observe/", None, "event log"),
    ("remote/pool/engine_pool.py", frozenset({"_choose", "generate"}), "load balancing"),
    ("least_loaded.py", None, "load balancing"),
    ("remote/client.py", frozenset({"generate", "_body"}), "requests"),
    ("remote/response_stitching.py", None, "requests"),
    ("remote/response.py", None, "requests"),
    ("miles/backends/remote/", None, "publish"),
    ("miles/sync/", None, "publish"),
)


class ComponentProfile:
    """CPU seconds by part while it is entered; time collecting garbage is a part of its own."""

    def __init__(self, every: float = 0.001) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.longest_collection = 0.0
        self._every, self._last = every, 0.0
        self._began: float | None = None
        self._known: dict[CodeType, str | None] = {}

    def __enter__(self) -> ComponentProfile:
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
                self._known[code] = _find_part(code)
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


def _find_part(code: CodeType) -> str | None:
    path = code.co_filename.replace("\\", "/")
    for ending, names, part in _PARTS:
        fits = ending in path if ending.endswith("/") else path.endswith(ending)
        if fits and (names is None or code.co_name in names):
            return part
    return None
