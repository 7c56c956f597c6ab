"""Test tiers: which tests `make test` runs, which only `make test-extended`, and how many hypothesis examples."""

from __future__ import annotations

import fnmatch
import os
import re
import resource
import time
from pathlib import Path

import pytest

EXTENDED_LIST = Path(__file__).with_name("extended.txt")
SLOW_LIST = Path(__file__).with_name("slow.txt")
EXTENDED_RUN = os.environ.get("MILES_TEST_TIER") == "extended"
DEFAULT_EXAMPLES = 15
# A loop, and what it takes on two idle cores of a 2.x GHz server; busy or slower machines get a longer limit.
CALIBRATION_LOOPS = 2_000_000
CALIBRATION_SECONDS = 0.1
# CPU time of one test varies with what else uses the core; a test fails only beyond this multiple of the limit.
LIMIT_TOLERANCE = 1.5


def examples(count: int) -> int:
    """Hypothesis examples of a property: ``count`` in the extended run, few otherwise."""
    return count if EXTENDED_RUN else min(count, DEFAULT_EXAMPLES)


def read_patterns(path: Path) -> list[str]:
    """Node ids, or shell patterns of them, of the tests of a tier: those that `make test` leaves to others."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def mark_tiers(items: list[pytest.Item]) -> None:
    """Mark tests of the lists, and property tests, which the extended run repeats with all their examples."""
    for path, mark in ((EXTENDED_LIST, pytest.mark.extended), (SLOW_LIST, pytest.mark.slow)):
        patterns = read_patterns(path)
        exact = {pattern for pattern in patterns if not set(pattern) & set("*?")}
        globs = [pattern.replace("[", "[[]") for pattern in patterns if set(pattern) & set("*?")]
        matches_glob = re.compile("|".join(map(fnmatch.translate, globs)) or "(?!)").match
        for item in items:
            node_id = item.nodeid
            names = (node_id, node_id.split("[")[0], node_id.split("::")[0])
            if exact.intersection(names) or matches_glob(node_id):
                item.add_marker(mark)
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.property)


def measure_slowdown() -> float:
    """CPU time of a fixed loop, relative to the machine that the limit of a default test was set on; at least 1."""
    started = time.process_time()
    total = 0
    for number in range(CALIBRATION_LOOPS):
        total += number & 7
    return max(1.0, (time.process_time() - started) / CALIBRATION_SECONDS)


def cpu_seconds() -> float:
    """CPU time of this process and of the children it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
