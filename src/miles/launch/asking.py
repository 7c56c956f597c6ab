"""``miles engines``: who samples for a run that goes on, and who is to join or leave."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from miles.core.errors import EngineError, UsageError
from miles.launch.config import EnginesOptions
from miles.launch.requests import EngineRow, Request, ask


def engines(run: Path, options: EnginesOptions) -> int:
    """Ask the run, and print what it says; 1 where a change was refused."""
    if problems := list(_wrong(run, options)):
        raise UsageError(problems)
    asked = Request(add=options.add, add_servers=options.add_servers or 0, remove=options.remove)
    answer = ask(run, asked, options.timeout)
    for sentence in answer.done:
        print(sentence)
    print("\n".join(table(answer.engines)))
    if answer.problems:
        raise EngineError(" ".join(answer.problems).rstrip("."))
    return 0


def _wrong(run: Path, options: EnginesOptions) -> Iterator[str]:
    settings = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    sglang, ray = settings.get("sglang", {}), settings.get("ray", {})
    started = sglang.get("rollout_backend", "native") != "native"
    if not started and not sglang.get("rollout_external_engine_addrs"):
        yield (
            f"{run} samples with an engine in its own process, which nobody can join; runs with --rollout-backend "
            "served or sglang have engines that come and go."
        )
        return
    if options.add_servers and sglang.get("rollout_external_engine_addrs"):
        yield f"{run} starts no servers of its own; have one that runs already join with --add."
    if options.add_servers and ray.get("runtime") == "ray":
        yield f"{run} got its part of the cluster when it started; have a server that runs already join with --add."
    for address in options.add:
        if not _is_address(address):
            yield f"--add {address} is no address; write it as in http://host:30000."


def _is_address(address: str) -> bool:
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        return False


def table(rows: Sequence[EngineRow]) -> list[str]:
    """A line each, in columns."""
    cells = [("ENGINE", "ADDRESS", "STATE", "VERSION", "LOAD", "")]
    for row in rows:
        version = "-" if row.version is None else str(row.version)
        cells.append((row.name, row.address, row.state, version, str(row.load), row.why))
    wide = [max(len(row[i]) for row in cells) for i in range(6)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip() for row in cells]
