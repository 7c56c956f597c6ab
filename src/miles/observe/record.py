"""Events as plain records: what each log keeps of an event, and the one way a record becomes a line."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from miles.core.events import (
    BatchTaken,
    DevicesMoved,
    EngineJoined,
    EngineLeft,
    Evaluated,
    Event,
    GroupFinished,
    RunEnded,
    RunStarted,
    Saved,
    SaveFailed,
    StepFinished,
)
from miles.core.types import Array, Batch, Group, Trajectory

Record = dict[str, Any]


def line(record: Mapping[str, Any]) -> bytes:
    """One canonical line: sorted keys, no spaces, floats that read back to the same bits.

    >>> line({"b": 0.1, "a": float("nan")})
    b'{"a":"NaN","b":0.1}\\n'
    """
    text = json.dumps(_plain(record), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as strings that ``float`` reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def floats(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics as Python floats, whatever number type they came as."""
    return {name: float(value) for name, value in metrics.items()}


# -- what each log keeps --------------------------------------------------------------------


def event_record(event: Event) -> Record | None:
    """What ``events.jsonl`` keeps: all a deterministic run repeats, payloads as summaries with a digest.

    Live events are left out: they tell what a process did, and a run that was interrupted must have the
    log of one that was not (see ``session_record``).
    """
    kept: Record
    match event:
        case GroupFinished():
            kept = {"ticket": event.ticket, "kept": event.kept, "reason": event.reason, "group": _group(event.group)}
        case BatchTaken():
            kept = {"step": event.step, "tickets": event.tickets, "batch": _batch(event.batch)}
        case StepFinished():
            kept = {"step": event.step, "version": list(event.version), "metrics": floats(event.metrics)}
        case Evaluated():
            kept = {"step": event.step, "metrics": floats(event.metrics)}
        case Saved() if event.scheduled:
            kept = {"step": event.step, "name": event.name}
        case EngineJoined() | EngineLeft() | DevicesMoved():
            kept = _moved(event)
        case _:
            return None
    return {"event": type(event).__name__} | kept


def _moved(event: EngineJoined | EngineLeft | DevicesMoved) -> Record:
    """What both logs keep of engines and devices that came and went."""
    if isinstance(event, DevicesMoved):
        return {"step": event.step, "ranks": event.ranks, "engines": event.engines, "why": event.why}
    version = {"version": list(event.version)} if isinstance(event, EngineJoined) else {}
    return {"name": event.name, "address": event.address} | version


def metric_record(event: Event) -> Record | None:
    """What ``metrics.jsonl`` keeps: one flat record a training step and one an evaluation."""
    match event:
        case StepFinished():
            return floats(event.metrics) | {"kind": "train", "step": event.step}
        case Evaluated():
            return floats(event.metrics) | {"kind": "eval", "step": event.step}
        case _:
            return None


def timing_record(event: Event) -> Record | None:
    """What ``timings.jsonl`` keeps: the seconds everything else leaves out."""
    match event:
        case StepFinished() if event.seconds:
            return {"kind": "train", "step": event.step, "seconds": floats(event.seconds)}
        case Evaluated() if event.seconds:
            return {"kind": "eval", "step": event.step, "seconds": floats(event.seconds)}
        case GroupFinished() if event.seconds:
            return {"kind": "group", "ticket": event.ticket, "seconds": floats(event.seconds)}
        case _:
            return None


def session_record(event: Event) -> Record | None:
    """What ``logs/sessions.jsonl`` keeps: when a process took the run up, saved and left it, and who came and went."""
    match event:
        case RunStarted():
            return {"event": "RunStarted", "step": event.step, "steps": event.steps}
        case Saved():
            return {"event": "Saved", "step": event.step, "name": event.name, "scheduled": event.scheduled}
        case SaveFailed():
            return {"event": "SaveFailed", "step": event.step, "why": event.why}
        case EngineJoined() | EngineLeft() | DevicesMoved():
            return {"event": type(event).__name__} | _moved(event)
        case RunEnded():
            return {"event": "RunEnded", "step": event.step, "finished": event.finished}
        case _:
            return None


# -- payloads -------------------------------------------------------------------------------


def _group(group: Group) -> Record:
    tries = group.trajectories
    return {
        "prompt": group.prompt.id,
        "epoch": group.prompt.epoch,
        "rewards": [None if t.reward is None else float(t.reward.value) for t in tries],
        "lengths": [t.response_length for t in tries],
        "statuses": [str(t.status) for t in tries],
        "versions": [_versions(t) for t in tries],
        "digest": group_digest(group),
    }


def _versions(trajectory: Trajectory) -> list[int]:
    """The numbers of the versions that wrote a trajectory, ascending."""
    return sorted({span.version.number for span in trajectory.spans if span.version is not None})


def _batch(batch: Batch) -> Record:
    return {
        "groups": batch.num_groups,
        "samples": len(batch.samples),
        "tokens": batch.tokens,
        "digest": batch_digest(batch),
    }


def group_digest(group: Group) -> str:
    """SHA-256 of every token, log-prob, author and version of a group, in order."""
    seen = hashlib.sha256()
    for t in group.trajectories:
        for number, branch in enumerate(t.branches):
            for span in branch:
                seen.update(f"{t.index}/{number}/{span.author}/{span.version}/".encode())
                _feed(seen, (span.tokens,) if span.logprobs is None else (span.tokens, span.logprobs))
    return seen.hexdigest()


def batch_digest(batch: Batch) -> str:
    """SHA-256 of all a training step computes with: tokens, mask, log-probs, advantages, versions."""
    seen = hashlib.sha256()
    for s in batch.samples:
        seen.update(f"{s.prompt_id}/{s.trajectory}/{s.policy}/{s.share}/".encode())
        _feed(seen, (s.tokens, s.mask, s.logprobs, s.advantages, s.versions))
    return seen.hexdigest()


def _feed(seen: hashlib._Hash, arrays: Iterable[Array]) -> None:
    for values in arrays:
        little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        seen.update(f"{little.dtype.str}{little.shape}".encode())
        seen.update(little.data)
