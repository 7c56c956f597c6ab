"""A storm of requests, aborts, hang-ups, pauses, updates and flushes: the short form of benchmarks/bench_soak.py."""

from pathlib import Path

import pytest
from benchmarks.bench_soak import soak


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_storm_loses_nothing_leaks_nothing_and_changes_no_surviving_answer(tmp_path: Path, in_flight: int):
    books = soak(tmp_path, requests=300, count=24, in_flight=in_flight)
    assert not books.wrong
    assert books.count["lost"] == books.count["answered twice"] == books.count["pages leaked"] == 0
    troubles = ("aborts by name", "weight updates", "pauses: retract", "pauses: in_place", "pauses: abort")
    assert all(books.count[trouble] for trouble in troubles)
