"""Events of a run: frozen records that the event log, metric sinks and terminal views receive.

A logged event holds only what a deterministic run repeats bit for bit. Wall-clock times are in ``seconds``, and so are
metrics of speculative decoding, whose drafts a resumed run does not repeat; the event log and ``metrics.jsonl`` leave
``seconds`` out and ``timings.jsonl`` keeps it. Live events (``RunStarted``, ``PromptAdmitted``,
``Progress``, ``SaveFailed``, ``RunEnded``, and an unscheduled ``Saved``) are for display and never logged, because a
resumed run has different ones. ``EngineJoined``, ``EngineLeft`` and ``DevicesMoved`` are logged when they happen, and
a resumed run need not repeat them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from miles.core.types import EMPTY, Batch, Group, TimeSpan, TokenStats, Version


def _empty() -> Mapping[str, float]:
    return EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The training loop starts at ``step`` (0 for a new run) of ``steps``."""

    step: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAdmitted:
    """A prompt was admitted to the rollout plane; ``ticket`` is its sequence number."""

    ticket: int
    prompt_id: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFinished:
    """A group was kept for training or dropped for ``reason``; emitted in ticket order."""

    ticket: int
    kept: bool
    reason: str
    group: Group
    seconds: Mapping[str, float] = field(default_factory=_empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """``done`` of the ``total`` groups that step ``step`` needs are finished."""

    step: int
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTaken:
    """The tickets a training step consumes, its batch, and the groups for the rollout dump."""

    step: int
    tickets: tuple[int, ...]
    batch: Batch
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """A training step and its weight update are complete; engines serve ``version``.

    ``spans`` and ``token_stats`` are for the trace and the rollout files; no log has them.
    """

    step: int
    version: Version
    metrics: Mapping[str, float]
    seconds: Mapping[str, float] = field(default_factory=_empty)
    spans: tuple[TimeSpan, ...] = ()
    token_stats: TokenStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Evaluation metrics after ``step`` steps."""

    step: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float] = field(default_factory=_empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The checkpoint of ``step`` is complete on disk under ``name``; not ``scheduled`` if it was made on demand."""

    step: int
    name: str
    scheduled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """The checkpoint of ``step`` could not be written, for ``reason``; earlier checkpoints are intact."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJoined:
    """An engine joined the running job: it has the weights of ``version`` and accepts requests from now on."""

    name: str
    address: str
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLeft:
    """An engine left on request; its in-flight requests finished there or continue on other engines."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesMoved:
    """Devices were reassigned after ``step`` steps: ``ranks`` train and ``engines`` sample, for ``reason``."""

    step: int
    ranks: int
    engines: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The loop stopped after ``step`` steps; ``finished`` is false if it was stopped early."""

    step: int
    finished: bool


NOT_REPLAYED = (EngineJoined, EngineLeft, DevicesMoved)
"""Logged events that a resumed run need not repeat."""

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
