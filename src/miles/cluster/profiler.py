"""PyTorch profiles of chosen steps, and CUDA memory snapshots: files in the ``profiles`` folder of a run.

A profile is a Chrome trace of operators and kernels, ``step-000010-train_overall-rank-0.json.gz``, for Perfetto. A
memory snapshot, ``step-000010-memory-rank-0.pickle``, is read by https://docs.pytorch.org/memory_viz.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch._C._profiler import _ExperimentalConfig

from miles.core.errors import UsageError
from miles.core.events import BatchTaken, Event, RunEnded, RunStarted, StepFinished

ProfileTarget = Literal["train_overall", "train_actor", "train_log_probs", "rollout"]
_MAX_EVENTS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """What is profiled: ``targets`` of the steps from ``first`` to before ``end``, written to ``folder``.

    With ``memory_steps`` the allocations on the accelerator are recorded, and a snapshot is written after every so many
    steps and when memory runs out.
    """

    folder: Path
    targets: frozenset[ProfileTarget] = frozenset()
    first: int = 0
    end: int = 0
    memory_folder: Path | None = None
    memory_steps: int | None = None


NO_PROFILE = ProfileSettings(folder=Path())


class StepProfiler:
    """Profiles training steps of one process, which is called ``name`` in the names of files."""

    def __init__(self, settings: ProfileSettings = NO_PROFILE, name: str = "rank-0") -> None:
        self._settings = settings
        self._name = name
        self._step = 0
        if settings.memory_steps is not None:
            if not torch.cuda.is_available():
                raise UsageError(
                    "--record-memory-history records the memory of an accelerator, and torch sees none here."
                )
            torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS)
            allocator: Any = torch._C  # builds without an accelerator lack the function
            allocator._cuda_attach_out_of_memory_observer(lambda *_: self._write_snapshot("out-of-memory"))

    @contextmanager
    def profile_step(self, step: int) -> Iterator[None]:
        """Profile a whole training step, if it is one of those asked for."""
        self._step = step
        with self._profile("train_overall"):
            yield
        every = self._settings.memory_steps
        if every is not None and step % every == 0:
            self._write_snapshot(f"step-{step:06d}")

    @contextmanager
    def profile_part(self, target: ProfileTarget) -> Iterator[None]:
        """Profile a part of the step; a profile of the whole step marks the part instead, since only one can run."""
        whole = "train_overall" in self._settings.targets and self._is_chosen()
        with torch.profiler.record_function(target) if whole else self._profile(target):
            yield

    def _is_chosen(self) -> bool:
        return self._settings.first <= self._step < self._settings.end

    @contextmanager
    def _profile(self, target: ProfileTarget) -> Iterator[None]:
        if target not in self._settings.targets or not self._is_chosen():
            yield
            return
        profile = start_profile()
        try:
            yield
        finally:
            write_profile(profile, find_profile_path(self._settings.folder, self._step, target, self._name))

    def _write_snapshot(self, label: str) -> None:
        folder = self._settings.memory_folder or self._settings.folder
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(folder / f"{label}-memory-{self._name}.pickle"))


class RolloutProfiler:
    """An observer that profiles what engines of this process do while the loop waits for the groups of a step."""

    def __init__(self, settings: ProfileSettings) -> None:
        self._settings = settings
        self._running: torch.profiler.profile | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted | StepFinished):
            if self._settings.first <= event.step + 1 < self._settings.end:
                self._running = start_profile()
        elif isinstance(event, BatchTaken) and self._running is not None:
            running, self._running = self._running, None
            write_profile(running, find_profile_path(self._settings.folder, event.step, "rollout", "engines"))
        elif isinstance(event, RunEnded) and self._running is not None:
            self._running.stop()
            self._running = None


def start_profile() -> torch.profiler.profile:
    """Start a profile of the operators of all threads and, where there is an accelerator, of its kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    config = _ExperimentalConfig(profile_all_threads=True)
    profile = torch.profiler.profile(activities=activities, record_shapes=True, experimental_config=config)
    profile.start()
    return profile


def write_profile(profile: torch.profiler.profile, path: Path) -> None:
    """End a profile and write it, complete or not at all."""
    profile.stop()
    export_profile(profile, path)


def export_profile(profile: torch.profiler.profile, path: Path) -> None:
    """Write a profile that has ended, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"part-{path.name}")  # the suffix decides whether it is compressed
    profile.export_chrome_trace(str(part))
    part.rename(path)


def find_profile_path(folder: Path, step: int, target: ProfileTarget, name: str) -> Path:
    """Return the file of a profile.

    >>> find_profile_path(Path("profiles"), 3, "rollout", "engines").name
    'step-000003-rollout-engines.json.gz'
    """
    return folder / f"step-{step:06d}-{target}-{name}.json.gz"
