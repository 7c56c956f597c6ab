"""``miles engines``: list the engines of a live run, and add or remove some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from miles.core.errors import EngineError, UsageError
from miles.launch.config import EnginesOptions
from miles.launch.elastic.mailbox import ControlRequest, EngineRow, send_request
from miles.launch.runtime.run_directory import read_run_config


def engines(run: Path, options: EnginesOptions) -> int:
    """Send the request to the run and print its reply; raises where a change was refused."""
    if problems := list(_check_options(run, options)):
        raise UsageError(problems)
    request = ControlRequest(add=options.add, add_servers=options.add_servers or 0, remove=options.remove)
    reply = send_request(run, request, options.timeout)
    for sentence in reply.done:
        print(sentence)
    print("\n".join(format_table(reply.engines)))
    if reply.problems:
        raise EngineError(" ".join(reply.problems).rstrip("."))
    return 0


def _check_options(run: Path, options: EnginesOptions) -> Iterator[str]:
    settings = read_run_config(run)
    sglang, ray = settings.get("sglang", {}), settings.get("ray", {})
    started = sglang.get("rollout_backend", "native") != "native"
    if not started and not sglang.get("rollout_external_engine_addrs"):
        yield (
            f"{run} samples with an engine in its own process; only the engines of runs with --rollout-backend served "
            "or sglang can be changed."
        )
        return
    if options.add_servers and sglang.get("rollout_external_engine_addrs"):
        yield f"{run} starts no servers of its own; add a running one with --add."
    if options.add_servers and ray.get("runtime") == "ray":
        yield f"{run} reserved its part of the cluster at start; add a running server with --add."
    for address in options.add:
        if not _is_url(address):
            yield f"--add {address} is not a URL; write one like http://host:30000."


def _is_url(address: str) -> bool:
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        return False


def format_table(rows: Sequence[EngineRow]) -> list[str]:
    """One line per engine, in columns."""
    cells = [("ENGINE", "ADDRESS", "STATE", "VERSION", "LOAD", "")]
    for row in rows:
        version = "-" if row.version is None else str(row.version)
        cells.append((row.name, row.address, row.state, version, str(row.load), row.why))
    widths = [max(len(row[i]) for row in cells) for i in range(6)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
