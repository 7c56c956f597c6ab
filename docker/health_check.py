"""Health check of a container: its server answers, or its run has written an event lately.

``MILES_HEALTH_URL`` is asked if it is set. ``MILES_RUN`` is a run directory, whose ``events.jsonl`` must have grown
within ``MILES_HEALTH_SECONDS`` (default 3600). A container with neither is healthy as long as its process lives.
"""

import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path


def find_problem(environ: Mapping[str, str], now: float) -> str | None:
    """Why the container is not healthy; None if it is."""
    if url := environ.get("MILES_HEALTH_URL"):
        return _ask_server(url)
    if run := environ.get("MILES_RUN"):
        return _check_run(Path(run), now, float(environ.get("MILES_HEALTH_SECONDS", "3600")))
    return None


def _ask_server(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return None if response.status == 200 else f"{url} answers {response.status}"
    except (urllib.error.URLError, OSError) as error:
        return f"{url} does not answer: {error}"


def _check_run(run: Path, now: float, limit: float) -> str | None:
    events = run / "events.jsonl"
    if not events.is_file():
        return f"{events} is not there: the run has not started"
    silent = now - events.stat().st_mtime
    return None if silent <= limit else f"{events} has not grown for {silent:.0f} s, and the limit is {limit:.0f} s"


if __name__ == "__main__":
    found = find_problem(os.environ, time.time())
    if found is not None:
        sys.exit(found)
