"""Timeline of a run from its Chrome traces: spans of a time window by track, merged where they are too many to draw,
and counters over time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from miles.observe.dashboard.metric_store import select_points

_MAX_SPANS = 3000
_CLOSED = b"\n]\n"
_COUNTED_FILES = ("groups", "groups.old")
"""Traces of many concurrent spans, of which the number at a time is shown."""
_COUNTER_POINTS = 300
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, order=True)
class TrackSpan:
    """A span of a track; ``waits`` where the track waits for another."""

    start: float
    seconds: float
    name: str
    waits: bool = False
    about: str = ""


@dataclass(slots=True)
class _Track:
    name: str
    spans: list[TrackSpan] = field(default_factory=list)


class Timeline:
    """Spans and counters of ``trace/*.json``; ``update`` reads what the files have gained."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}
        self._tracks: dict[tuple[str, int, int], _Track] = {}
        self._counters: dict[str, list[Point]] = {}
        self._changes: dict[str, list[Point]] = {}
        self._counts: dict[str, list[Point]] = {}

    def update(self) -> None:
        """Read new records; all of them if a file is shorter than it was, since a resumed run has cut it."""
        sizes = {path.name: path.stat().st_size for path in sorted(self._folder.glob("*.json"))}
        if any(sizes.get(name, 0) < offset for name, offset in self._offsets.items()):
            for kept in (self._offsets, self._tracks, self._counters, self._changes, self._counts):
                kept.clear()
        grown = [name for name, size in sizes.items() if size > self._offsets.get(name, 0)]
        for name in grown:
            records, self._offsets[name] = read_trace(self._folder / name, self._offsets.get(name, 0))
            for record in records:
                self._add(name.removesuffix(".json"), record)
        for track in self._tracks.values() if grown else ():
            track.spans.sort()
        if any(name.removesuffix(".json") in _COUNTED_FILES for name in grown):
            self._counts = {name: accumulate_changes(changes) for name, changes in self._changes.items()}

    def read_window(self, start: float | None, end: float | None) -> dict[str, Any]:
        """Return the spans between two times in seconds since the epoch; without a start the newest minute or so."""
        shown: dict[str, list[TrackSpan]] = {}  # sessions of a resumed run have tracks of the same names
        for track in sorted(self._tracks.values(), key=lambda track: _rank(track.name)):
            if track.spans:
                shown[track.name] = sorted(shown[track.name] + track.spans) if track.name in shown else track.spans
        if not shown:
            return {"first": None, "last": None, "tracks": [], "counters": {}}
        first = min(spans[0].start for spans in shown.values())
        last = max(span.start + span.seconds for spans in shown.values() for span in spans)
        until = last if end is None else end
        since = max(first, until - self._default_seconds()) if start is None else start
        budget = max(50, _MAX_SPANS // len(shown))
        counters = self._counters | self._counts
        return {
            "first": first,
            "last": last,
            "start": since,
            "end": until,
            "tracks": [
                {"name": name, "spans": select_spans(spans, since, until, budget)} for name, spans in shown.items()
            ],
            "counters": {
                name: points
                for name in sorted(counters)
                if (points := select_counter(counters[name], since, until, _COUNTER_POINTS))
            },
        }

    def mean_counters(self, seconds: float) -> dict[str, float]:
        """Return the mean of each counter over its newest ``seconds``."""
        means: dict[str, float] = {}
        for name, points in self._counters.items():
            since = points[-1][0] - seconds
            newest = [value for time, value in points[-_MAX_SPANS:] if time >= since]
            means[name] = sum(newest) / len(newest)
        return means

    def _default_seconds(self) -> float:
        """Return the length of about 20 steps."""
        spans = [span for track in self._tracks.values() for span in track.spans]
        lengths = [span.seconds for span in spans if span.name.startswith("train ")]
        longest = [span.seconds for track in self._tracks.values() for span in track.spans[-100:]]
        typical = sum(lengths[-20:]) / len(lengths[-20:]) if lengths else max(longest, default=3.0)
        return max(1.0, 40 * typical)

    def _add(self, file: str, record: dict[str, Any]) -> None:
        key = (file, int(record.get("pid", 0)), int(record.get("tid", 0)))
        args = record.get("args")
        values = args if isinstance(args, dict) else {}
        match record.get("ph"):
            case "M" if record.get("name") == "thread_name" and file not in _COUNTED_FILES:
                self._get_track(key).name = str(values.get("name", key[2]))
            case "X":
                start, length = float(record["ts"]) / 1e6, float(record.get("dur", 0)) / 1e6
                name = str(record.get("name"))
                if file in _COUNTED_FILES:
                    changes = self._changes.setdefault(f"groups in {name.partition(' ')[0]}", [])
                    changes += [(start, 1.0), (start + length, -1.0)]
                    return
                about = ", ".join(f"{key} {value}" for key, value in values.items())
                self._get_track(key).spans.append(TrackSpan(start, length, name, record.get("cat") == "wait", about))
            case "C":
                for name, value in values.items():
                    counter = str(record.get("name")) + ("" if name == "value" else f": {name}")
                    self._counters.setdefault(counter, []).append((float(record["ts"]) / 1e6, float(value)))
            case _:
                pass

    def _get_track(self, key: tuple[str, int, int]) -> _Track:
        if key not in self._tracks:
            self._tracks[key] = _Track(name=f"{key[0]} {key[2]}")
        return self._tracks[key]


def _rank(name: str) -> tuple[int, str]:
    """Return a key that puts the loop first, then what it drives."""
    order = ("loop", "training step", "rank", "engine")
    place = next((number for number, prefix in enumerate(order) if name.startswith(prefix)), len(order))
    digits = "".join(char for char in name if char.isdigit())
    return place, digits.zfill(6) + name


def accumulate_changes(changes: Iterable[Point]) -> list[Point]:
    """Return a count over time from its changes.

    >>> accumulate_changes([(0.0, 1.0), (2.0, -1.0), (1.0, 1.0), (2.0, -1.0)])
    [(0.0, 1.0), (1.0, 2.0), (2.0, 0.0)]
    """
    counts: dict[float, float] = {}
    total = 0.0
    for time, change in sorted(changes):
        total += change
        counts[time] = total
    return list(counts.items())


def select_counter(points: list[Point], start: float, end: float, limit: int) -> list[list[float]]:
    """Return the points of a counter in a window, and the one before it.

    Where there are many, each part keeps its extremes and its last point, whose value lasts until the next part.
    """
    times = np.array([time for time, _ in points])
    low, high = int(np.searchsorted(times, start)), int(np.searchsorted(times, end, side="right"))
    inside = points[max(0, low - 1) : high]
    if len(inside) <= limit:
        return [list(point) for point in inside]
    extremes = select_points(np.array([value for _, value in inside]), limit)
    lasts = np.linspace(0, len(inside) - 1, limit).astype(np.int64)
    return [list(inside[index]) for index in np.union1d(extremes, lasts).tolist()]


def read_trace(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a Chrome trace from a byte on, and the byte after the last complete line.

    The trace is a JSON array with a record a line; it need not be closed.
    """
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
        file.seek(max(0, offset + len(data) - len(_CLOSED)))
        is_closed = file.read() == _CLOSED
    data = data[: data.rfind(b"\n") + 1]
    records: list[dict[str, Any]] = []
    for line in data.splitlines():
        text = line.strip().rstrip(b",")
        try:
            record = json.loads(text) if text.startswith(b"{") else None
        except ValueError:  # what a killed process has left
            continue
        if isinstance(record, dict):
            records.append(record)
    return records, offset + len(data) - is_closed  # a continued trace has b",\n" there, one byte less


def select_spans(
    spans: list[TrackSpan], start: float, end: float, limit: int
) -> list[tuple[float, float, str, int, bool, str]]:
    """Return (start, seconds, name, count, waits, about) of the spans in a window, merged until there are ``limit``.

    >>> [each[2] for each in select_spans([TrackSpan(0, 1, "a"), TrackSpan(1, 1, "b"), TrackSpan(9, 1, "c")], 0, 3, 9)]
    ['a', 'b']
    >>> select_spans([TrackSpan(n, 1, "a") for n in range(4)], 0, 4, 2)
    [(0, 2, 'a', 2, False, ''), (2, 2, 'a', 2, False, '')]
    """
    inside = [span for span in spans if span.start < end and span.start + span.seconds > start]
    size = max(1, -(-len(inside) // limit))
    merged: list[tuple[float, float, str, int, bool, str]] = []
    for index in range(0, len(inside), size):
        part = inside[index : index + size]
        longest = max(part, key=lambda span: span.seconds)
        seconds = max(span.start + span.seconds for span in part) - part[0].start if len(part) > 1 else longest.seconds
        about = longest.about if len(part) == 1 else ""
        merged.append((part[0].start, seconds, longest.name, len(part), longest.waits, about))
    return merged
