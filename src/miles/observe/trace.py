"""Traces in Chrome trace format, for Perfetto and chrome://tracing: what each process of a run did, and its gauges.

    loop.json     phases of the loop, parts of a training step, a track for each rank, weight updates, saves
    groups.json   generation and grading of each group
    engines.json  a track for each engine, and counters of engines and GPUs

Times are seconds since the epoch in all of them, so they can be laid over each other; a process on another machine has
that machine's clock. A file is a JSON array, closed when the process ends in order; readers of the format accept a
missing closing bracket, so the trace of a killed run can be read too. Each session of a resumed run is a process of the
trace. Spans of the category ``wait`` are times in which a track waited for another.
"""

from __future__ import annotations

import heapq
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from miles.core.events import Evaluated, Event, GroupFinished, RunStarted, Saved, StepFinished
from miles.core.types import TimeSpan

_LOOP, _PARTS = 1, 2
_FIRST_LANE = 3
_PHASES = ("offload/to_rollout", "rollout", "offload/to_train", "train", "publish")
"""In the order of a step. An evaluation may be after the first."""
_SEPARATOR = b",\n"
_MIN_WAIT = 1e-3
_CLOSE_SECONDS = 10.0
_GROUPS_PID, _ENGINES_PID = 1000, 2000
"""Added to the number of the session, so that tracks of different files stay apart when files are put together."""
Gauges = Mapping[str, Mapping[str, float]]
"""Values by name, of each engine or device by name."""


class TraceFile:
    """A Chrome trace that is appended to, by any thread; ``session`` counts the processes that have opened it.

    With ``max_bytes`` a file that has grown beyond it is renamed to end in ``.old.json``, in place of an earlier one,
    and a new one is begun.
    """

    def __init__(self, path: Path, *, max_bytes: int | None = None, pid: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._names: dict[tuple[str, int], str] = {}
        self._file = path.open("r+b" if path.exists() else "x+b")
        try:
            self.session = self._reopen()
        except BaseException:
            self._file.close()
            raise
        self._pid = pid + self.session

    def write_span(
        self,
        name: str,
        track: int,
        start: float,
        seconds: float,
        *,
        category: str = "",
        args: Mapping[str, object] | None = None,
    ) -> None:
        """Write a span; ``category`` is ``wait`` where the track waits.

        Its end is rounded, not its duration, so that it never overlaps the one that follows.
        """
        first, end = round(start * 1e6), round((start + seconds) * 1e6)
        record: dict[str, object] = {"name": name, "ph": "X", "pid": self._pid, "tid": track}
        record |= {"ts": first, "dur": end - first}
        if category:
            record["cat"] = category
        if args:
            record["args"] = dict(args)
        self._write(record)

    def write_counter(self, name: str, time: float, values: Mapping[str, float]) -> None:
        """Write the values of one counter at a time."""
        ts = round(time * 1e6)
        self._write({"name": name, "ph": "C", "pid": self._pid, "ts": ts, "args": dict(values)})

    def write_instant(self, name: str, track: int, time: float) -> None:
        """Write a point in time."""
        self._write({"name": name, "ph": "i", "s": "t", "pid": self._pid, "tid": track, "ts": round(time * 1e6)})

    def name_process(self, name: str) -> None:
        """Name this process of the trace."""
        self._write_name("process_name", 0, name)

    def name_track(self, track: int, name: str) -> None:
        """Name a track of this process, once."""
        if self._names.get(("thread_name", track)) != name:
            self._write_name("thread_name", track, name)

    def flush(self) -> None:
        with self._lock:
            self._file.flush()

    def close(self) -> None:
        """Close the array, so that the file is valid JSON."""
        with self._lock:
            self._finish()

    def _finish(self) -> None:
        try:
            end = self._file.seek(0, os.SEEK_END)
            self._file.seek(max(0, end - len(_SEPARATOR)))
            if self._file.read() == _SEPARATOR:
                self._file.seek(end - len(_SEPARATOR))
                self._file.truncate()
                self._file.write(b"\n]\n")
            else:  # nothing was recorded
                self._file.write(b"]\n")
        finally:
            self._file.close()

    def _reopen(self) -> int:
        """Continue the array after its last complete record; returns the number of this session."""
        data = self._file.read()
        if data.endswith(b"}\n]\n"):
            data = data.removesuffix(b"\n]\n") + _SEPARATOR
        complete = data[: data.rfind(_SEPARATOR) + len(_SEPARATOR)] if _SEPARATOR in data else b"[\n"
        self._file.seek(len(complete) - 2)
        self._file.write(complete[-2:])
        self._file.truncate()
        return complete.count(b'"process_name"') + 1

    def _write_name(self, kind: str, track: int, name: str) -> None:
        self._names[kind, track] = name
        self._write(self._format_name(kind, track, name))

    def _format_name(self, kind: str, track: int, name: str) -> dict[str, object]:
        return {"name": kind, "ph": "M", "pid": self._pid, "tid": track, "args": {"name": name}}

    def _write(self, record: Mapping[str, object]) -> None:
        with self._lock:
            self._file.write(json.dumps(record).encode() + _SEPARATOR)
            if self._max_bytes is not None and self._file.tell() > self._max_bytes:
                self._start_anew()

    def _start_anew(self) -> None:
        self._finish()
        self._path.replace(self._path.with_suffix(".old.json"))
        self._file = self._path.open("x+b")
        self._file.write(b"[\n")
        for (kind, track), name in self._names.items():
            self._file.write(json.dumps(self._format_name(kind, track, name)).encode() + _SEPARATOR)


class LoopTrace:
    """A sink for finished groups, steps and evaluations; ``clock`` reads seconds since the epoch."""

    def __init__(self, folder: Path, *, clock: Callable[[], float], max_bytes: int | None = None) -> None:
        self._clock = clock
        self._loop = TraceFile(folder / "loop.json")
        try:
            self._groups = TraceFile(folder / "groups.json", max_bytes=max_bytes, pid=_GROUPS_PID)
        except BaseException:
            self._loop.close()
            raise
        self._group_tracks = _FreeTracks()
        self._lanes: dict[str, int] = {}
        self._evaluated = 0.0

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._loop.name_process(f"session {self._loop.session}, from step {event.step}")
                self._loop.name_track(_LOOP, "loop")
                self._loop.name_track(_PARTS, "training step")
                self._groups.name_process(f"groups of session {self._groups.session}")
            case GroupFinished():
                self._write_group(event)
            case StepFinished():
                self._write_step(event)
            case Evaluated() if "evaluate" in event.seconds:
                start = self._clock() - event.seconds["evaluate"]
                self._loop.write_span(f"evaluate {event.step}", _LOOP, start, event.seconds["evaluate"])
                self._evaluated = event.seconds["evaluate"]
            case Saved():
                self._loop.write_instant(f"saved {event.name}", _LOOP, self._clock())
            case _:
                pass

    def commit(self) -> None:
        self._loop.flush()
        self._groups.flush()

    def close(self) -> None:
        """Close the arrays, so that the files are valid JSON."""
        try:
            self._loop.close()
        finally:
            self._groups.close()

    def _write_step(self, event: StepFinished) -> None:
        """Write the phases of a step, ending now, the parts of each phase, and the tracks of the ranks."""
        seconds, now = event.seconds, self._clock()
        durations = {phase: seconds[phase] for phase in _PHASES if phase in seconds}
        start = now - sum(durations.values())
        rollout = TimeSpan(name=f"wait for rollout {event.step}", start=now, seconds=0.0)
        for phase, duration in durations.items():
            if phase == "rollout":
                rollout = replace(rollout, start=start, seconds=duration)
            args: dict[str, object] = {"version": event.version.number} if phase == "publish" else {}
            if phase == "publish" and "publish/bytes" in seconds:
                args["bytes"] = seconds["publish/bytes"]
            category = "wait" if phase == "rollout" else ""
            begun = start - self._evaluated if phase == "offload/to_rollout" else start
            self._loop.write_span(f"{phase} {event.step}", _LOOP, begun, duration, category=category, args=args)
            if phase != "train" or not event.spans:
                for part in _list_parts(phase, start, seconds):
                    self._loop.write_span(part.name, _PARTS, part.start, part.seconds)
            start += duration
        self._evaluated = 0.0
        self._write_lanes(event.spans, rollout)
        for name, value in seconds.items():
            if name.startswith("speculative/"):
                self._loop.write_counter(name, now, {"value": value})

    def _write_lanes(self, spans: Sequence[TimeSpan], rollout: TimeSpan) -> None:
        """Write what each rank did, and what it waited for: the rollout plane before, the other ranks after it."""
        by_lane: dict[str, list[TimeSpan]] = {}
        for span in spans:
            by_lane.setdefault(span.lane, []).append(span)
        last = max((span.start + span.seconds for span in spans), default=0.0)
        for lane, own in by_lane.items():
            track = _PARTS if not lane else self._get_lane(lane)
            for span in own:
                self._loop.write_span(f"train/{span.name}", track, span.start, span.seconds)
            if not lane:
                continue
            until = min(span.start for span in own)
            waited = min(rollout.start + rollout.seconds, until) - rollout.start
            if waited > _MIN_WAIT:
                self._loop.write_span(rollout.name, track, rollout.start, waited, category="wait")
            end = max(span.start + span.seconds for span in own)
            if last - end > _MIN_WAIT:
                self._loop.write_span("wait for other ranks", track, end, last - end, category="wait")

    def _get_lane(self, lane: str) -> int:
        if lane not in self._lanes:
            self._lanes[lane] = _FIRST_LANE + len(self._lanes)
            self._loop.name_track(self._lanes[lane], lane)
        return self._lanes[lane]

    def _write_group(self, event: GroupFinished) -> None:
        """Write when a group was generated, and from then on graded; concurrent groups are on tracks of their own."""
        timed = [t.times for t in event.group.trajectories if "started" in t.times]
        if not timed:
            return
        start = min(times["started"] for times in timed)
        generated = max(times["started"] + times.get("generate", 0.0) for times in timed)
        end = max(generated, *(t["started"] + t.get("generate", 0.0) + t.get("grade", 0.0) for t in timed))
        track = self._group_tracks.take(start, end)
        self._groups.name_track(track, f"groups {track}")
        about = {"ticket": event.ticket, "prompt": event.group.prompt.id, "kept": event.kept}
        self._groups.write_span(f"generate {event.ticket}", track, start, generated - start, args=about)
        if end > generated:
            slowest = max(times.get("grade", 0.0) for times in timed)
            args = about | {"slowest_seconds": slowest}
            self._groups.write_span(f"grade {event.ticket}", track, generated, end - generated, args=args)


class _FreeTracks:
    """Numbers of tracks on which spans do not overlap: the lowest that is free."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, int]] = []
        self._free: list[int] = []
        self._count = 0

    def take(self, start: float, end: float) -> int:
        while self._busy and self._busy[0][0] <= start:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if not self._free:
            self._count += 1
            self._free.append(self._count)
        track = heapq.heappop(self._free)
        heapq.heappush(self._busy, (end, track))
        return track


def _list_parts(phase: str, start: float, seconds: Mapping[str, float]) -> Iterator[TimeSpan]:
    """Yield the parts of a phase, one after the other."""
    for name, length in seconds.items():
        if name.startswith(f"{phase}/") and name != "publish/bytes":
            yield TimeSpan(name=name, start=start, seconds=length)
            start += length


# -- gauges ---------------------------------------------------------------------------------


class GaugeSampler:
    """A thread that writes gauges of engines and devices every ``interval`` seconds to ``engines.json``.

    ``engines`` and ``devices`` return the current values; counters of engines become rates, and an engine's track has
    spans in which it generated and in which it waited. A source that fails is left out of that sample.
    """

    def __init__(
        self,
        folder: Path,
        *,
        engines: Sequence[Callable[[], Gauges]],
        devices: Sequence[Callable[[], Gauges]],
        interval: float,
        clock: Callable[[], float],
        max_bytes: int | None = None,
    ) -> None:
        self._engines, self._devices = tuple(engines), tuple(devices)
        self._interval = interval
        self._clock = clock
        self._file = TraceFile(folder / "engines.json", max_bytes=max_bytes, pid=_ENGINES_PID)
        self._file.name_process(f"engines of session {self._file.session}")
        self._samples: dict[str, list[tuple[float, Mapping[str, float]]]] = {}
        self._activities: dict[str, _Activity] = {}
        self._written: dict[str, Mapping[str, float]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gauges", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Write what engines did last, and close the file."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():  # an engine does not answer
                return
        with suppress(OSError):
            for name, activity in self._activities.items():
                self._write_activity(name, activity)
            self._file.close()

    def sample(self) -> None:
        """Write the current values."""
        for source in self._engines:
            for name, values in _read(source).items():
                self._add_engine(name, values)
        for source in self._devices:
            for name, values in _read(source).items():
                self._write_values(name, self._clock(), values)
        self._file.flush()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                self.sample()
            except OSError:  # the disk is full, say: gauges are not worth the run
                return

    def _add_engine(self, name: str, values: Mapping[str, float]) -> None:
        now = self._clock()
        samples = self._samples.setdefault(name, [])
        samples.append((now, values))
        del samples[:-2]
        if len(samples) == 2:
            (before, old), (_, new) = samples
            self._write_values(name, now, measure_engine(old, new, now - before))
            busy = new.get("steps", new.get("running", 0.0)) > old.get("steps", 0.0)
            self._add_activity(name, "generate" if busy else "wait for requests", before, now)

    def _add_activity(self, name: str, kind: str, start: float, end: float) -> None:
        """Extend what an engine does, or write it and begin anew."""
        current = self._activities.get(name)
        if current is not None and current.kind == kind:
            current.end = end
            return
        if current is not None:
            self._write_activity(name, current)
        track = len(self._activities) + 1 if current is None else current.track
        self._activities[name] = _Activity(kind=kind, start=start, end=end, track=track)

    def _write_activity(self, name: str, activity: _Activity) -> None:
        self._file.name_track(activity.track, name)
        category = "wait" if activity.kind.startswith("wait") else ""
        seconds = activity.end - activity.start
        self._file.write_span(activity.kind, activity.track, activity.start, seconds, category=category)

    def _write_values(self, name: str, time: float, values: Mapping[str, float]) -> None:
        """Write values that have changed."""
        rounded = {key: float(f"{value:.5g}") for key, value in values.items()}
        if rounded and self._written.get(name) != rounded:
            self._written[name] = rounded
            self._file.write_counter(name, time, rounded)


@dataclass(slots=True, kw_only=True)
class _Activity:
    """What an engine did from ``start`` to ``end``."""

    kind: str
    start: float
    end: float
    track: int


def _read(source: Callable[[], Gauges]) -> Gauges:
    try:
        return source()
    except (RuntimeError, OSError, ValueError):  # a set changed while it was read, or a server does not answer
        return {}


def measure_engine(old: Mapping[str, float], new: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return the gauges of an engine from two samples of its values, so many seconds apart.

    >>> old = {"running": 0, "pages": 10, "free_pages": 10, "generated_tokens": 0, "cached_tokens": 0}
    >>> new = {"running": 3, "pages": 10, "free_pages": 4, "generated_tokens": 50, "cached_tokens": 6}
    >>> measure_engine(old | {"prefilled_tokens": 0}, new | {"prefilled_tokens": 2}, 2.0)
    {'running': 3, 'kv_used': 0.6, 'tokens_per_second': 25.0, 'cache_hit': 0.75}
    """
    gauges = {name: new[name] for name in ("running", "waiting") if name in new}
    if new.get("pages"):
        gauges["kv_used"] = 1 - new["free_pages"] / new["pages"]
    elif "kv_used" in new:
        gauges["kv_used"] = new["kv_used"]

    def count(name: str) -> float:
        return new.get(name, 0.0) - old.get(name, 0.0)

    if "generated_tokens" in new and seconds > 0:
        gauges["tokens_per_second"] = max(0.0, count("generated_tokens")) / seconds
    elif "tokens_per_second" in new:
        gauges["tokens_per_second"] = new["tokens_per_second"]
    if "seconds" in new and seconds > 0:
        gauges["busy"] = min(1.0, max(0.0, count("seconds") / seconds))
    if (prompt_tokens := count("cached_tokens") + count("prefilled_tokens")) > 0:
        gauges["cache_hit"] = count("cached_tokens") / prompt_tokens
    return gauges
