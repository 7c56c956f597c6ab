"""Check of trace files against the documented JSON trace-event format, which Perfetto and chrome://tracing read.

A check without those programs: the keys and types that each phase of an event needs, and what Perfetto's importer
cannot show: spans of one track that overlap without one being inside the other, and ends without a beginning.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
INSTANT_SCOPES = {"g", "p", "t"}
ASYNC = {"b", "n", "e"}
FLOW = {"s", "t", "f"}


def check_trace_folder(folder: Path) -> list[dict[str, Any]]:
    """All events of the files of a run's ``trace``, each checked."""
    paths = sorted(folder.glob("*.json"))
    assert paths, folder
    return [event for path in paths for event in check_trace(json.loads(path.read_text()))]


def check_trace(trace: Any) -> list[dict[str, Any]]:
    """The events of one trace: an array, or an object with ``traceEvents``; AssertionError names what is wrong."""
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert isinstance(events, list)
    for event in events:
        _check_event(event)
    _check_nesting(events)
    _check_pairs(events)
    return events


def _check_event(event: dict[str, Any]) -> None:
    assert isinstance(event, dict) and isinstance(event.get("name"), str), event
    kind = event["ph"]
    assert isinstance(event["pid"], int) and event["pid"] >= 0, event
    assert isinstance(event.get("args", {}), dict), event
    if kind == "M":
        key, kind_of_value = METADATA[event["name"]]
        assert isinstance(event["args"][key], kind_of_value), event
        return
    assert kind in {"X", "B", "E", "C", "i", *ASYNC, *FLOW}, event
    assert _is_time(event["ts"]), event
    if kind in {"X", "B", "E"}:
        assert isinstance(event["tid"], int), event
    if kind == "X":
        assert _is_time(event["dur"]), event
    if kind == "C":
        assert event["args"] and all(_is_number(value) for value in event["args"].values()), event
    if kind == "i":
        assert event.get("s", "t") in INSTANT_SCOPES, event
    if kind in ASYNC | FLOW:
        assert isinstance(event["id"], int | str) and isinstance(event["cat"], str), event


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_time(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Spans of a track are apart, or one is inside the other."""
    tracks: defaultdict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    for track, spans in tracks.items():
        around: list[tuple[float, str]] = []
        for start, negative, name in sorted(spans):
            while around and around[-1][0] <= start:
                around.pop()
            end = start - negative
            assert not around or end <= around[-1][0], f"{name} overlaps the end of {around[-1][1]} on track {track}"
            around.append((end, name))


def _check_pairs(events: list[dict[str, Any]]) -> None:
    """Every end has a beginning on its track, or of its id."""
    depths: defaultdict[tuple[Any, ...], int] = defaultdict(int)
    order = {"B": 0, "b": 0}
    for event in sorted((e for e in events if e["ph"] in "BEbe"), key=lambda e: (e["ts"], order.get(e["ph"], 1))):
        is_async = event["ph"] in ASYNC
        track = (event["pid"], event["cat"], event["id"]) if is_async else (event["pid"], event["tid"])
        depths[track] += 1 if event["ph"] in "Bb" else -1
        assert depths[track] >= 0, event
