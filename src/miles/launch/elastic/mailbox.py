"""Mailbox of a live run: requests and replies as small files in its directory, each written atomically.

requests/open                   locked by the run while it replies
requests/NAME.json              a request; the run removes it when it accepts it
requests/NAME.answer.json       the reply; the client removes it
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

REQUESTS_FOLDER = "requests"
# Seconds between two looks for a reply.
_POLL_INTERVAL = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRequest:
    """Engines to ``add`` by address, to start, and to ``remove``; without any, a query of the engines."""

    add: tuple[str, ...] = ()
    add_servers: int = 0
    remove: tuple[str, ...] = ()

    @property
    def has_changes(self) -> bool:
        return bool(self.add or self.add_servers or self.remove)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """The state of one engine. ``version`` is None before it has weights; ``load`` counts its requests."""

    name: str
    address: str
    state: str
    version: int | None
    load: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReply:
    """A sentence for each change done and for each one refused, and all engines afterwards."""

    done: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    engines: tuple[EngineRow, ...] = ()


class Mailbox:
    """The run's side of the mailbox."""

    def __init__(self, run: Path) -> None:
        self._folder = run / REQUESTS_FOLDER
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Start to accept requests; those to an earlier process of the run are deleted."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob("*.json"):
            old.unlink(missing_ok=True)
        self._lock = (self._folder / "open").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def receive(self) -> Iterator[tuple[str, ControlRequest]]:
        """The requests since the last call, which are thereby accepted."""
        for path in sorted(self._folder.glob("*.json")):
            if path.name.endswith(".answer.json"):
                continue
            try:
                raw = path.read_bytes()
                path.unlink()
                fields = json.loads(raw)
                request = ControlRequest(
                    add=tuple(fields["add"]), add_servers=int(fields["add_servers"]), remove=tuple(fields["remove"])
                )
            except FileNotFoundError:  # the client has given up
                continue
            except (ValueError, KeyError, TypeError):
                self.reply(path.stem, ControlReply(problems=(f"{path.name} is not a request; use miles engines.",)))
                continue
            yield path.stem, request

    def reply(self, name: str, reply: ControlReply) -> None:
        _write_json(self._folder / f"{name}.answer.json", asdict(reply))

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def send_request(run: Path, request: ControlRequest, seconds: float) -> ControlReply:
    """Send a request to the run and wait for its reply; raises where it is not running, or does not reply in time."""
    if not is_listening(run):
        raise UsageError(f"{run} is not running now, so its engines cannot be listed or changed.")
    folder, name = run / REQUESTS_FOLDER, f"{time.time_ns()}-{secrets.token_hex(4)}"
    sent, reply = folder / f"{name}.json", folder / f"{name}.answer.json"
    deadline = time.monotonic() + seconds
    _write_json(sent, asdict(request))
    try:
        while not reply.exists():
            if not is_listening(run) and not reply.exists():
                raise EngineError(f"{run} ended before it replied")
            if time.monotonic() > deadline:
                raise EngineError(_describe_timeout(run, seconds, accepted=not sent.exists()))
            time.sleep(_POLL_INTERVAL)
        return _parse_reply(json.loads(reply.read_text()))
    finally:
        sent.unlink(missing_ok=True)
        reply.unlink(missing_ok=True)


def is_listening(run: Path) -> bool:
    """Whether a process of this run accepts requests."""
    try:
        with (run / REQUESTS_FOLDER / "open").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _describe_timeout(run: Path, seconds: float, *, accepted: bool) -> str:
    if accepted:
        return f"{run} is still applying the changes after {seconds:g} s (--timeout); check with miles engines {run}"
    return (
        f"{run} did not finish a step within {seconds:g} s (--timeout), and changes are made between steps; the "
        "request was withdrawn"
    )


def _parse_reply(fields: Mapping[str, Any]) -> ControlReply:
    rows = tuple(EngineRow(**row) for row in fields["engines"])
    return ControlReply(done=tuple(fields["done"]), problems=tuple(fields["problems"]), engines=rows)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write atomically: a reader sees all of it or nothing."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(content))
    os.rename(draft, path)
