"""A run's own past in the loop's doors: steps before are as they were, and one step is sampled again beside it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles.core.errors import DataError
from miles.core.events import BatchTaken, Event, RunStarted, StepFinished
from miles.core.protocols import Filter, Rollout, Verdict
from miles.core.types import Group, Prompt, Reward, Status, Trajectory
from miles.launch.config import ReplayOptions
from miles.launch.findings import Findings, compare_group, compare_trajectory
from miles.rollout.recorded import Recording
from miles.schedule.buffer import keep_waiting
from miles.schedule.loop import Planes


class Enough(Exception):
    """All that was asked for has been seen, and the rest of the step would be idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """How far a run has come, and how long it was to be when a process took it up, by the step it was taken up at."""

    step: int
    lengths: tuple[tuple[int, int], ...]

    def steps_at(self, step: int) -> int:
        """How many steps the process that made ``step`` was to make in all, by which its schedules go."""
        return next(steps for begun, steps in reversed(self.lengths) if begun < step)


def sessions_of(run: Path) -> Sessions:
    """What a run's logs tell of its length; a DataError where there is no run."""
    if not (run / "config.toml").is_file():
        raise DataError(f"{run} is not a run; name the directory a run was saved to.")
    begun = _lines(run / "logs" / "sessions.jsonl")
    lengths = tuple((e["step"], e["steps"]) for e in begun if e["event"] == "RunStarted")
    steps = [e["step"] for e in _lines(run / "events.jsonl") if e["event"] == "StepFinished"]
    return Sessions(step=max(steps, default=0), lengths=lengths)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; a last one that a kill has torn is left out."""
    if not path.is_file():
        raise DataError(f"{path} is not there, and without it nothing can be replayed.")
    text = path.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """One group as it was. Of one that was dropped only what it earned is known; ``first`` is the number of its first
    trajectory in its step."""

    group: Group
    kept: bool
    first: int


def history_of(run: Path, begun: int, step: int) -> dict[tuple[int, int], deque[Past]]:
    """The groups of the steps after ``begun`` up to ``step``, by prompt and epoch, in their order."""
    recording, waiting = Recording(str(run)), list[dict[str, Any]]()
    found: dict[tuple[int, int], deque[Past]] = {}
    for event in _lines(run / "events.jsonl"):
        if event["event"] == "GroupFinished":
            waiting.append(event)
        if event["event"] != "BatchTaken":
            continue
        if begun < event["step"] <= step:
            taken = recording.read(event["step"])
            _remember(found, waiting, dict(zip(taken.tickets, taken.groups, strict=True)))
        waiting = []
    return found


def _remember(
    found: dict[tuple[int, int], deque[Past]], told: Sequence[Mapping[str, Any]], groups: Mapping[int, Group]
) -> None:
    number = 0
    for event in told:
        key = event["group"]["prompt"], event["group"]["epoch"]
        group = groups.get(event["ticket"])
        past = Past(group=group or _dropped(event["group"]), kept=group is not None, first=number)
        number += 0 if group is None else len(group.trajectories)
        found.setdefault(key, deque()).append(past)


def _dropped(told: Mapping[str, Any]) -> Group:
    """A group of which only the log tells."""
    tries = tuple(
        Trajectory(branches=(), status=Status(status), reward=Reward(value=float(reward)), index=index)
        for index, (status, reward) in enumerate(zip(told["statuses"], told["rewards"], strict=True))
    )
    return Group(prompt=Prompt(id=told["prompt"], messages=(), epoch=told["epoch"]), trajectories=tries)


class Again:
    """The rollout and the filter of a replay. The groups of ``step`` are made again and compared with what they were;
    all that is handed on is as it was."""

    def __init__(
        self,
        run: Path,
        past: Mapping[tuple[int, int], deque[Past]],
        step: int,
        options: ReplayOptions,
        found: Findings,
    ) -> None:
        self._run, self._past, self._step, self._options, self._found = run, past, step, options, found
        self._now = 0
        self._kept: dict[int, bool] = {}
        self._made: list[tuple[Past, Group, Verdict]] = []
        self._rollout: Rollout | None = None
        self._filter: Filter | None = None
        self.decode: Callable[[Sequence[int]], str] = str
        self.shown: Trajectory | None = None

    def around(self, planes: Planes) -> Planes:
        """The same planes, with the run's past in place of the present."""
        self._rollout, self._filter = planes.rollout, planes.keep
        return replace(planes, rollout=self, keep=self.keep, still=keep_waiting, choose=None, evaluate=None)

    async def produce(self, prompt: Prompt) -> Group:
        waiting = self._past.get((prompt.id, prompt.epoch))
        if not waiting:
            raise DataError(
                f"Prompt {prompt.id} (epoch {prompt.epoch}) comes next now, and did not in {self._run}; have the "
                "prompts or their order changed since?"
            )
        past = waiting.popleft()
        self._kept[id(past.group)] = past.kept
        if self._now == self._step:
            assert self._rollout is not None and self._filter is not None
            made = await self._rollout.produce(prompt)
            self._made.append((past, made, self._filter(made)))
        return past.group

    def keep(self, group: Group) -> Verdict:
        return Verdict(keep=self._kept[id(group)], reason="as it was")

    def begin(self, step: int) -> None:
        """From now on groups are of this step."""
        self._now = step

    def finish(self) -> None:
        """All groups of the step have been made: compare them."""
        for past, made, verdict in sorted(self._made, key=lambda each: each[0].first):
            self._compare(past, made, verdict)

    def _compare(self, past: Past, made: Group, verdict: Verdict) -> None:
        options, how = self._options, {"tolerance": self._options.tolerance, "decode": self.decode}
        if past.kept and options.sample is None:
            compare_group(past.group, made, self._found, first=past.first, **how)
        if options.sample is None:
            told = f"the group of prompt {made.prompt.id} was {'kept' if past.kept else 'dropped'} and is not now"
            self._found.of("filter").put(None if verdict.keep == past.kept else told)
        elif past.kept and past.first <= options.sample < past.first + len(past.group.trajectories):
            before, after = (g.trajectories[options.sample - past.first] for g in (past.group, made))
            name = f"trajectory {options.sample} (prompt {made.prompt.id}, attempt {before.index})"
            compare_trajectory(before, after, self._found, name=name, **how)
            self.shown = after


class Witness:
    """The journal of a replay: keeps the metrics of ``step`` and stops the loop behind it, or before it is trained."""

    def __init__(self, step: int, again: Again, *, enough: bool) -> None:
        self._step, self._again, self._enough = step, again, enough
        self.metrics: Mapping[str, float] | None = None
        self.stop: Callable[[], None] = lambda: None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._again.begin(event.step + 1)
        elif isinstance(event, BatchTaken) and event.step == self._step:
            self._again.finish()
            if self._enough:
                raise Enough
        elif isinstance(event, StepFinished):
            self._again.begin(event.step + 1)
            if event.step == self._step:
                self.metrics = dict(event.metrics)
                self.stop()

    def commit(self) -> None: ...

    def marks(self) -> Mapping[str, int]:
        return {}
