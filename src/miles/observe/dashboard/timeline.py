"""Timeline of a run from its Chrome trace: spans of a time window by track, merged where they are too many to draw."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAX_SPANS = 3000
_CLOSED = b"\n]\n"


@dataclass(slots=True)
class _Track:
    name: str
    spans: list[tuple[float, float, str]] = field(default_factory=list)


class Timeline:
    """Spans of ``trace/*.json``; ``update`` reads what the files have gained."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}
        self._tracks: dict[tuple[str, int, int], _Track] = {}
        self._counters: dict[str, list[tuple[float, float]]] = {}

    def update(self) -> None:
        """Read new records; all of them if a file is shorter than it was, since a resumed run has cut it."""
        sizes = {path.name: path.stat().st_size for path in sorted(self._folder.glob("*.json"))}
        if any(sizes.get(name, 0) < offset for name, offset in self._offsets.items()):
            self._offsets.clear()
            self._tracks.clear()
            self._counters.clear()
        grown = [name for name, size in sizes.items() if size > self._offsets.get(name, 0)]
        for name in grown:
            records, self._offsets[name] = read_trace(self._folder / name, self._offsets.get(name, 0))
            for record in records:
                self._add(name.removesuffix(".json"), record)
        for track in self._tracks.values() if grown else ():
            track.spans.sort()

    def read_window(self, start: float | None, end: float | None) -> dict[str, Any]:
        """Return the spans between two times in seconds since the epoch; without a start the newest minute or so."""
        begins = [track.spans[0][0] for track in self._tracks.values() if track.spans]
        ends = [max(begin + length for begin, length, _ in t.spans) for t in self._tracks.values() if t.spans]
        if not begins:
            return {"first": None, "last": None, "tracks": [], "counters": {}}
        first, last = min(begins), max(ends)
        until = last if end is None else end
        since = max(first, until - self._default_seconds()) if start is None else start
        shown = [track for track in self._tracks.values() if track.spans]
        budget = max(50, _MAX_SPANS // len(shown))
        return {
            "first": first,
            "last": last,
            "start": since,
            "end": until,
            "tracks": [{"name": t.name, "spans": select_spans(t.spans, since, until, budget)} for t in shown],
            "counters": {
                name: [[time, value] for time, value in points if since <= time <= until][-500:]
                for name, points in self._counters.items()
            },
        }

    def _default_seconds(self) -> float:
        """Return the length of about 20 steps."""
        lengths = [length for t in self._tracks.values() for _, length, name in t.spans if name.startswith("train ")]
        longest = [length for t in self._tracks.values() for _, length, _ in t.spans[-100:]]
        typical = sum(lengths[-20:]) / len(lengths[-20:]) if lengths else max(longest, default=3.0)
        return max(1.0, 40 * typical)

    def _add(self, file: str, record: dict[str, Any]) -> None:
        key = (file, int(record.get("pid", 0)), int(record.get("tid", 0)))
        match record.get("ph"):
            case "M" if record.get("name") == "thread_name":
                self._get_track(key).name = str(record.get("args", {}).get("name", key[2]))
            case "X":
                start, length = float(record["ts"]) / 1e6, float(record.get("dur", 0)) / 1e6
                self._get_track(key).spans.append((start, length, str(record.get("name"))))
            case "C":
                point = (float(record["ts"]) / 1e6, float(record.get("args", {}).get("value", 0.0)))
                self._counters.setdefault(str(record.get("name")), []).append(point)
            case _:
                pass

    def _get_track(self, key: tuple[str, int, int]) -> _Track:
        if key not in self._tracks:
            self._tracks[key] = _Track(name=f"{key[0]} {key[2]}")
        return self._tracks[key]


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
    spans: list[tuple[float, float, str]], start: float, end: float, limit: int
) -> list[tuple[float, float, str, int]]:
    """Return (start, seconds, name, count) of the spans in a window; neighbours are merged until there are ``limit``.

    >>> select_spans([(0.0, 1.0, "a"), (1.0, 1.0, "b"), (9.0, 1.0, "c")], 0.0, 3.0, 10)
    [(0.0, 1.0, 'a', 1), (1.0, 1.0, 'b', 1)]
    >>> select_spans([(float(n), 1.0, "a") for n in range(4)], 0.0, 4.0, 2)
    [(0.0, 2.0, 'a', 2), (2.0, 2.0, 'a', 2)]
    """
    inside = [span for span in spans if span[0] < end and span[0] + span[1] > start]
    if len(inside) <= limit:
        return [(begin, length, name, 1) for begin, length, name in inside]
    merged: list[tuple[float, float, str, int]] = []
    size = -(-len(inside) // limit)
    for index in range(0, len(inside), size):
        part = inside[index : index + size]
        longest = max(part, key=lambda span: span[1])
        last = max(begin + length for begin, length, _ in part)
        merged.append((part[0][0], last - part[0][0], longest[2], len(part)))
    return merged
