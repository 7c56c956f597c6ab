"""Serialization of events: the record each log keeps of an event, and its canonical JSON line."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
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
from miles.core.types import Array, Author, Batch, Group, Trajectory, Version

Record = dict[str, Any]
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def encode_line(record: Mapping[str, Any]) -> bytes:
    """Encode a record as one canonical line: sorted keys, no spaces, floats that round-trip exactly.

    >>> encode_line({"b": 0.1, "a": float("nan")})
    b'{"a":"NaN","b":0.1}\\n'
    """
    try:
        text = _ENCODER.encode(record)
    except (ValueError, TypeError):  # a number that JSON lacks, or a mapping that is no dict
        text = _ENCODER.encode(_replace_nonfinite(record))
    return text.encode() + b"\n"


def _replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by strings that ``float`` parses."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): _replace_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(inner) for inner in value]
    return value


def to_floats(metrics: Mapping[str, float]) -> dict[str, float]:
    """Convert metrics to Python floats."""
    return {name: float(value) for name, value in metrics.items()}


# -- records of each log ----------------------------------------------------------------------


def event_record(event: Event) -> Record | None:
    """Build the record of ``events.jsonl``: what a deterministic run repeats, with payloads summarised by a digest.

    Live events are left out: they describe one process, and an interrupted run must have the same
    log as an uninterrupted one (see ``session_record``).
    """
    record: Record
    match event:
        case GroupFinished():
            record = {"ticket": event.ticket, "kept": event.kept, "reason": event.reason, "group": _group(event.group)}
        case BatchTaken():
            record = {"step": event.step, "tickets": event.tickets, "batch": _batch(event.batch)}
        case StepFinished():
            record = {"step": event.step, "version": list(event.version), "metrics": to_floats(event.metrics)}
        case Evaluated():
            record = {"step": event.step, "metrics": to_floats(event.metrics)}
        case Saved() if event.scheduled:
            record = {"step": event.step, "name": event.name}
        case EngineJoined() | EngineLeft() | DevicesMoved():
            record = _membership_record(event)
        case _:
            return None
    return {"event": type(event).__name__} | record


def _membership_record(event: EngineJoined | EngineLeft | DevicesMoved) -> Record:
    """Build the record of engines and devices that joined, left or moved, for both logs."""
    if isinstance(event, DevicesMoved):
        return {"step": event.step, "ranks": event.ranks, "engines": event.engines, "reason": event.reason}
    version = {"version": list(event.version)} if isinstance(event, EngineJoined) else {}
    return {"name": event.name, "address": event.address} | version


def metric_record(event: Event) -> Record | None:
    """Build the record of ``metrics.jsonl``: one flat record per training step and per evaluation."""
    match event:
        case StepFinished():
            return to_floats(event.metrics) | {"kind": "train", "step": event.step}
        case Evaluated():
            return to_floats(event.metrics) | {"kind": "eval", "step": event.step}
        case _:
            return None


def timing_record(event: Event) -> Record | None:
    """Build the record of ``timings.jsonl``: the wall-clock times that the other logs leave out."""
    match event:
        case StepFinished() if event.seconds:
            return {"kind": "train", "step": event.step, "seconds": to_floats(event.seconds)}
        case Evaluated() if event.seconds:
            return {"kind": "eval", "step": event.step, "seconds": to_floats(event.seconds)}
        case GroupFinished() if event.seconds:
            return {"kind": "group", "ticket": event.ticket, "seconds": to_floats(event.seconds)}
        case _:
            return None


def session_record(event: Event) -> Record | None:
    """Build the record of ``logs/sessions.jsonl``: when a process started, saved and ended, and membership changes."""
    match event:
        case RunStarted():
            return {"event": "RunStarted", "step": event.step, "steps": event.steps}
        case Saved():
            return {"event": "Saved", "step": event.step, "name": event.name, "scheduled": event.scheduled}
        case SaveFailed():
            return {"event": "SaveFailed", "step": event.step, "reason": event.reason}
        case EngineJoined() | EngineLeft() | DevicesMoved():
            return {"event": type(event).__name__} | _membership_record(event)
        case RunEnded():
            return {"event": "RunEnded", "step": event.step, "finished": event.finished}
        case _:
            return None


# -- payloads -------------------------------------------------------------------------------


def _group(group: Group) -> Record:
    trajectories = group.trajectories
    return {
        "prompt": group.prompt.id,
        "epoch": group.prompt.epoch,
        "rewards": [None if t.reward is None else float(t.reward.value) for t in trajectories],
        "lengths": [t.response_length for t in trajectories],
        "statuses": [str(t.status) for t in trajectories],
        "versions": [_versions(t) for t in trajectories],
        "digest": group_digest(group),
    }


def _versions(trajectory: Trajectory) -> list[int]:
    """Return the version numbers that sampled a trajectory, ascending."""
    return sorted({s.version.number for branch in trajectory.branches for s in branch if s.version is not None})


def _batch(batch: Batch) -> Record:
    return {
        "groups": batch.num_groups,
        "samples": len(batch.samples),
        "tokens": batch.tokens,
        "digest": batch_digest(batch),
    }


def group_digest(group: Group) -> str:
    """Return the SHA-256 of all tokens, log-probs, authors and versions of a group, in order."""
    pieces: list[bytes] = []
    for t in group.trajectories:
        for number, branch in enumerate(t.branches):
            place = f"{t.index}/{number}/".encode()
            for span in branch:
                pieces += (place, _describe_origin(span.author, span.version), *_encode_array(span.tokens))
                if span.logprobs is not None:
                    pieces += _encode_array(span.logprobs)
    return hashlib.sha256(b"".join(pieces)).hexdigest()


def batch_digest(batch: Batch) -> str:
    """Return the SHA-256 of the inputs of a training step: tokens, mask, log-probs, advantages, versions."""
    digest = hashlib.sha256()
    for s in batch.samples:
        pieces = [f"{s.prompt_id}/{s.trajectory}/{s.policy}/{s.samples_per_trajectory}/".encode()]
        for values in (s.tokens, s.mask, s.logprobs, s.advantages, s.versions):
            pieces += _encode_array(values)
        digest.update(b"".join(pieces))
    return digest.hexdigest()


def _encode_array(values: Array) -> tuple[bytes, bytes]:
    """Return what is hashed of an array: type and shape, and the values in the same byte order on every machine."""
    if sys.byteorder != "little" or not values.dtype.isnative:
        values = values.astype(_little_endian(values.dtype))
    return _describe_array(values.dtype, values.shape), values.tobytes()


@lru_cache(4096)
def _describe_origin(author: Author, version: Version | None) -> bytes:
    return f"{author}/{version}/".encode()


@cache
def _little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


@lru_cache(4096)
def _describe_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    return f"{_little_endian(dtype).str}{shape}".encode()
