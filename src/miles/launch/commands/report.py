"""``miles report``: write what the dashboard shows of some runs to one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles.launch.config import ReportOptions
from miles.launch.dashboard.build import build_api
from miles.launch.dashboard.html_report import build_report
from miles.observe.formatting import format_bytes


def report(runs: Sequence[Path], options: ReportOptions) -> int:
    """Write the report, complete or not at all."""
    api = build_api(runs)
    output = Path(options.output) if options.output is not None else Path(f"{runs[0].resolve().name}.html")
    text = build_report(api, max_trajectories=options.max_trajectories).encode()
    part = output.with_name(f"{output.name}.part")
    part.write_bytes(text)
    part.rename(output)
    print(f"{output} ({format_bytes(len(text))})")
    return 0
