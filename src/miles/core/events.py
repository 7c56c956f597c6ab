"""What happens in a run, as frozen records: the event log, the sinks and the terminal are all told these.

An event that is logged holds only what a deterministic run would repeat to the bit. Wall-clock
readings ride in ``seconds``, which the event log and ``metrics.jsonl`` leave out and ``timings.jsonl``
keeps. Live events (``RunStarted``, ``PromptAdmitted``, ``Progress``, ``SaveFailed``, ``RunEnded``, and a ``Saved``
that was not on the schedule) tell a watcher what goes on now and are never logged: a run that was
killed and continued would have others. ``EngineJoined``, ``EngineLeft`` and ``DevicesMoved`` are logged where they
happened, and a run that is continued need not repeat them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from miles.core.types import EMPTY, Batch, Group, Version


def _nothing() -> Mapping[str, float]:
    return EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The loop begins at ``step`` (0 for a new run) of ``steps``."""

    step: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAdmitted:
    """A prompt was given a ticket and entered the rollout plane."""

    ticket: int
    prompt_id: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFinished:
    """A group's turn came, and it was kept or dropped for ``reason``; told in ticket order."""

    ticket: int
    kept: bool
    reason: str
    group: Group
    seconds: Mapping[str, float] = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """``done`` of the ``wanted`` groups that step ``step`` needs have come back."""

    step: int
    done: int
    wanted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTaken:
    """The tickets a training step consumed, and the groups themselves for the rollout dump."""

    step: int
    tickets: tuple[int, ...]
    batch: Batch
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """One training step and its publication are done; ``version`` is live."""

    step: int
    version: Version
    metrics: Mapping[str, float]
    seconds: Mapping[str, float] = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Held-out scores after ``step`` steps."""

    step: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float] = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint of ``step`` is complete on disk under ``name``; one on demand is not on the schedule."""

    step: int
    name: str
    scheduled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """The checkpoint of ``step`` could not be written, and ``why``; those before it are as they were."""

    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJoined:
    """An engine came while the run went on: it has the weights of ``version``, and takes requests from now on."""

    name: str
    address: str
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLeft:
    """An engine was told to leave, and did; what it had under way ended there or went on elsewhere."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesMoved:
    """After ``step`` steps, ``ranks`` train and ``engines`` of the run's own sample, for the reason ``why``."""

    step: int
    ranks: int
    engines: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The loop stopped after ``step`` steps; ``finished`` is false when it was asked to stop early."""

    step: int
    finished: bool


LIVE = (RunStarted, PromptAdmitted, Progress, SaveFailed, RunEnded)
"""Events that are told and not logged."""

UNREPEATED = (EngineJoined, EngineLeft, DevicesMoved)
"""Events that are logged, and that a run which is continued need not have again."""

Event = (
    RunStarted
    | PromptAdmitted
    | Progress
    | GroupFinished
    | BatchTaken
    | StepFinished
    | Evaluated
    | Saved
    | SaveFailed
    | EngineJoined
    | EngineLeft
    | DevicesMoved
    | RunEnded
)
