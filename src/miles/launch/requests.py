"""Requests to a run that goes on, and its answers: small files in its directory, each whole or not there.

requests/open                   locked by the run as long as it answers
requests/NAME.json              what someone asks; the run removes it when it takes it up
requests/NAME.answer.json       what became of it; whoever asked removes it
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from miles.core.errors import EngineError, UsageError

FOLDER = "requests"
# Seconds between two looks for an answer.
_LOOK = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Engines to ``add`` by address, how many more to start, and which to ``remove``; with none of it, who is there?"""

    add: tuple[str, ...] = ()
    add_servers: int = 0
    remove: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        return bool(self.add or self.add_servers or self.remove)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One engine as it is now. ``version`` is None before it has weights; ``load`` counts its requests."""

    name: str
    address: str
    state: str
    version: int | None
    load: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A sentence for each change that was made, for each that was refused, and all engines after that."""

    done: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    engines: tuple[EngineRow, ...] = ()


class Box:
    """The run's side: ``open`` until it is closed."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Begin to answer; what was asked of a life of the run before this one is thrown away."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob("*.json"):
            old.unlink(missing_ok=True)
        self._lock = (self._folder / "open").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def waiting(self) -> Iterator[tuple[str, Request]]:
        """What was asked since the last look; it is taken up with this."""
        for path in sorted(self._folder.glob("*.json")):
            if path.name.endswith(".answer.json"):
                continue
            try:
                raw = path.read_bytes()
                path.unlink()
                told = json.loads(raw)
                request = Request(
                    add=tuple(told["add"]), add_servers=int(told["add_servers"]), remove=tuple(told["remove"])
                )
            except FileNotFoundError:  # whoever asked has given up
                continue
            except (ValueError, KeyError, TypeError):
                self.answer(path.stem, Answer(problems=(f"{path.name} is no request; ask with miles engines.",)))
                continue
            yield path.stem, request

    def answer(self, name: str, answer: Answer) -> None:
        _put(self._folder / f"{name}.answer.json", asdict(answer))

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def ask(run: Path, request: Request, seconds: float) -> Answer:
    """Ask the run, and wait for what becomes of it; refuses where it does not go on, or says nothing for so long."""
    if not answers(run):
        raise UsageError(f"{run} is not going on just now, so that its engines cannot be asked after or changed.")
    folder, name = run / FOLDER, f"{time.time_ns()}-{secrets.token_hex(4)}"
    told, answered, deadline = folder / f"{name}.json", folder / f"{name}.answer.json", time.monotonic() + seconds
    _put(told, asdict(request))
    try:
        while not answered.exists():
            if not answers(run) and not answered.exists():
                raise EngineError(f"{run} ended before it answered")
            if time.monotonic() > deadline:
                raise EngineError(_late(run, seconds, taken=not told.exists()))
            time.sleep(_LOOK)
        return _read(json.loads(answered.read_text()))
    finally:
        told.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)


def answers(run: Path) -> bool:
    """Does a process of this run look at what is asked?"""
    try:
        with (run / FOLDER / "open").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _late(run: Path, seconds: float, *, taken: bool) -> str:
    if taken:
        return f"{run} is still at it after {seconds:g} s (--timeout); miles engines {run} tells what became of it"
    return (
        f"{run} has not come to the end of a step within {seconds:g} s (--timeout), and changes are made between "
        "steps; the request was taken back"
    )


def _read(told: Mapping[str, Any]) -> Answer:
    rows = tuple(EngineRow(**row) for row in told["engines"])
    return Answer(done=tuple(told["done"]), problems=tuple(told["problems"]), engines=rows)


def _put(path: Path, content: Mapping[str, Any]) -> None:
    """All at once: whoever reads it sees all of it."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(content))
    os.rename(draft, path)
