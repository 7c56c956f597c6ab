"""Rollout of a replay: returns the recorded groups, and samples one step again to compare it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles.core.errors import DataError
from miles.core.events import BatchTaken, Event, RunStarted, StepFinished
from miles.core.media import ImageInput
from miles.core.protocols import Filter, FilterResult, Rollout
from miles.core.types import Group, Prompt, Reward, Status, Trajectory
from miles.launch.config import ReplayOptions
from miles.launch.replay.findings import Findings, compare_group, compare_trajectory
from miles.rollout.offline.replay_source import RolloutRecording
from miles.schedule.loop import Planes
from miles.schedule.reorder_buffer import keep_all


class ReplayDone(Exception):
    """The trajectory was compared, and the rest of the step is not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSessions:
    """The last step of a run, and (first step, planned steps) of each process that ran it."""

    step: int
    planned: tuple[tuple[int, int], ...]

    def get_planned_steps(self, step: int) -> int:
        """The planned length of the run in the process that ran ``step``, which its schedules depend on."""
        planned = next((steps for first, steps in reversed(self.planned) if first < step), None)
        if planned is None:
            raise DataError(
                f"logs/sessions.jsonl does not say which process ran step {step}, so it cannot be replayed."
            )
        return planned


def read_sessions(run: Path) -> RunSessions:
    """Read the length of a run from its logs; raises DataError where there is no run."""
    if not (run / "config.toml").is_file():
        raise DataError(f"{run} is not a run; name the directory a run was saved to.")
    sessions = _read_lines(run / "logs" / "sessions.jsonl")
    planned = tuple((e["step"], e["steps"]) for e in sessions if e["event"] == "RunStarted")
    steps = [e["step"] for e in _read_lines(run / "events.jsonl") if e["event"] == "StepFinished"]
    return RunSessions(step=max(steps, default=0), planned=planned)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a log."""
    if not path.is_file():
        raise DataError(f"{path} does not exist, so nothing can be replayed.")
    text = path.read_bytes()
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
        try:
            lines.append({"event": "", **json.loads(line)})
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}, line {number}, is damaged, so nothing can be replayed: {error}") from error
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """A recorded group. Of a dropped one only the rewards are known; ``first`` is the index of its first trajectory in
    the step."""

    group: Group
    kept: bool
    first: int


def read_history(
    run: Path, start_step: int, step: int, load_image: Callable[[str], ImageInput] | None = None
) -> dict[tuple[int, int], deque[RecordedGroup]]:
    """The groups of the steps after ``start_step`` up to ``step``, by prompt and epoch, in their order.

    ``load_image`` gives the pixels of their images.
    """
    recording, events = RolloutRecording(str(run), load_image=load_image), list[dict[str, Any]]()
    history: dict[tuple[int, int], deque[RecordedGroup]] = {}
    for event in _read_lines(run / "events.jsonl"):
        if event["event"] == "GroupFinished":
            events.append(event)
        if event["event"] != "BatchTaken":
            continue
        if start_step < event["step"] <= step:
            rollouts = recording.read(event["step"])
            _add_groups(history, events, dict(zip(rollouts.tickets, rollouts.groups, strict=True)))
        events = []
    return history


def _add_groups(
    history: dict[tuple[int, int], deque[RecordedGroup]],
    events: Sequence[Mapping[str, Any]],
    groups: Mapping[int, Group],
) -> None:
    first = 0
    for event in events:
        key = event["group"]["prompt"], event["group"]["epoch"]
        group = groups.get(event["ticket"])
        recorded = RecordedGroup(
            group=group or _build_dropped_group(event["group"]), kept=group is not None, first=first
        )
        first += 0 if group is None else len(group.trajectories)
        history.setdefault(key, deque()).append(recorded)


def _build_dropped_group(row: Mapping[str, Any]) -> Group:
    """A group of which only the log has data."""
    trajectories = tuple(
        Trajectory(branches=(), status=Status(status), reward=Reward(value=float(reward)), index=index)
        for index, (status, reward) in enumerate(zip(row["statuses"], row["rewards"], strict=True))
    )
    return Group(prompt=Prompt(id=row["prompt"], messages=(), epoch=row["epoch"]), trajectories=trajectories)


class RolloutComparison:
    """The rollout and filter of a replay: samples the groups of ``step`` again, and returns the recorded ones."""

    def __init__(
        self,
        run: Path,
        history: Mapping[tuple[int, int], deque[RecordedGroup]],
        step: int,
        options: ReplayOptions,
        findings: Findings,
    ) -> None:
        self._run = run
        self._history = history
        self._step = step
        self._options = options
        self._findings = findings
        self._current_step = 0
        self._kept: dict[int, bool] = {}
        self._sampled: list[tuple[RecordedGroup, Group, FilterResult]] = []
        self._rollout: Rollout | None = None
        self._filter: Filter | None = None
        self.shown: Trajectory | None = None

    def wrap_planes(self, planes: Planes) -> Planes:
        """The planes with the recorded groups in place of new ones."""
        self._rollout = planes.rollout
        self._filter = planes.group_filter
        return replace(
            planes, rollout=self, group_filter=self.keep, buffer_filter=keep_all, data_buffer=None, evaluate=None
        )

    async def produce(self, prompt: Prompt) -> Group:
        recorded = self._history.get((prompt.id, prompt.epoch))
        if not recorded:
            raise DataError(
                f"Prompt {prompt.id} (epoch {prompt.epoch}) comes next now, but did not in {self._run}; check whether "
                "the prompts or their order have changed since."
            )
        group = recorded.popleft()
        self._kept[id(group.group)] = group.kept
        if self._current_step == self._step:
            assert self._rollout is not None and self._filter is not None
            sampled = await self._rollout.produce(prompt)
            self._sampled.append((group, sampled, self._filter(sampled)))
        return group.group

    def keep(self, group: Group) -> FilterResult:
        return FilterResult(keep=self._kept[id(group)], reason="as recorded")

    def begin_step(self, step: int) -> None:
        """Groups are of this step from now on."""
        self._current_step = step

    def compare(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Compare the groups of the step that were sampled again."""
        for recorded, sampled, verdict in sorted(self._sampled, key=lambda item: item[0].first):
            self._compare_group(recorded, sampled, verdict, decode)

    def _compare_group(
        self, recorded: RecordedGroup, sampled: Group, verdict: FilterResult, decode: Callable[[Sequence[int]], str]
    ) -> None:
        options = self._options
        findings = self._findings
        first = recorded.first
        if options.sample is None:
            if recorded.kept:
                compare_group(
                    recorded.group, sampled, findings, first=first, tolerance=options.tolerance, decode=decode
                )
            state = "kept" if recorded.kept else "dropped"
            difference = f"the group of prompt {sampled.prompt.id} was {state} and is not now"
            findings.get("filter").add(None if verdict.keep == recorded.kept else difference)
        elif recorded.kept and first <= options.sample < first + len(recorded.group.trajectories):
            before, after = (g.trajectories[options.sample - first] for g in (recorded.group, sampled))
            name = f"trajectory {options.sample} (prompt {sampled.prompt.id}, sample {before.index})"
            compare_trajectory(before, after, findings, name=name, tolerance=options.tolerance, decode=decode)
            self.shown = after


class ReplayJournal:
    """The journal of a replay: keeps the metrics of ``step`` and stops the loop after it, or before it is trained."""

    def __init__(self, step: int, comparison: RolloutComparison, *, stops_before_training: bool) -> None:
        self._step = step
        self._comparison = comparison
        self._stops_before_training = stops_before_training
        self._stop: Callable[[], None] = lambda: None
        self.metrics: Mapping[str, float] | None = None

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call ``stop`` after the step."""
        self._stop = stop
        yield

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._comparison.begin_step(event.step + 1)
        elif isinstance(event, BatchTaken) and event.step == self._step and self._stops_before_training:
            raise ReplayDone
        elif isinstance(event, StepFinished):
            self._comparison.begin_step(event.step + 1)
            if event.step == self._step:
                self.metrics = dict(event.metrics)
                self._stop()

    def commit(self) -> None: ...

    def offsets(self) -> Mapping[str, int]:
        return {}
