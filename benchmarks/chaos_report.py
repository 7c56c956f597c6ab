"""Result of a run under faults: the outcome of every prompt, the final reward, and the final weights."""

from __future__ import annotations

import json
from collections import Counter
from math import sqrt
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summarize_run(run: Path) -> dict[str, int]:
    """Tickets by what became of them; an AssertionError where one has no end, or was trained on twice."""
    events = rows(run / "events.jsonl")
    finished = [event for event in events if event["event"] == "GroupFinished"]
    trained = Counter(t for event in events if event["event"] == "BatchTaken" for t in event["tickets"])
    assert max(trained.values()) == 1, f"trained on twice: {[t for t, n in trained.items() if n > 1][:8]}"
    ends = Counter(event["ticket"] for event in finished)
    assert max(ends.values()) == 1, "a ticket ended twice"
    assert sorted(ends) == list(range(len(ends))), "a ticket below the last has no end"
    assert set(trained) == {event["ticket"] for event in finished if event["kept"]}
    assert all(event["reason"] for event in finished)
    steps = [event["step"] for event in events if event["event"] == "BatchTaken"]
    assert steps == list(range(1, len(steps) + 1)), "a step is missing or was made twice"
    return {"trained": len(trained), "dropped": len(ends) - len(trained), "steps": len(steps)}


def final_rewards(run: Path, last: int = 32) -> list[float]:
    """The mean rewards of the last steps."""
    return [row["reward"] for row in rows(run / "metrics.jsonl") if row["kind"] == "train"][-last:]


def compare_weights(calm: Path, struck: Path) -> tuple[float, float]:
    """How far apart the rewards of two runs are at their ends, and how far they may be.

    That is a quarter of the calm run's, for no two drifting runs learn alike, and three standard errors.
    """
    ends = [final_rewards(run) for run in (calm, struck)]
    error = sqrt(sum(pvariance(end) / len(end) for end in ends))
    return abs(fmean(ends[0]) - fmean(ends[1])), fmean(ends[0]) / 4 + 3 * error


def load_final_weights(run: Path) -> dict[str, bytes]:
    """All parts of the last weights, and of their moments, that each rank has written of them."""
    last = max((run / "checkpoints").iterdir())
    parts = {file.name: file.read_bytes() for file in last.glob("*.safetensors")}
    assert parts, f"{last} has no weights"
    return parts
