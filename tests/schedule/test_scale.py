"""The short form of benchmarks/bench_scale.py: the real driver against engines that only wait keeps its promises."""

import json
import tracemalloc
from pathlib import Path

import pytest
from benchmarks.bench_scale import run_simulation
from benchmarks.scale_profile import ComponentProfile
from benchmarks.scale_simulation import Size

from miles.backends.remote.client import PauseMode


@pytest.mark.parametrize(("overtake", "steps", "mode"), [(1, 8, "abort"), (0, 6, "abort"), (1, 6, "in_place")])
def test_thousands_of_trajectories_are_each_trained_once_and_none_too_late(
    tmp_path: Path, overtake: int, steps: int, mode: PauseMode
):
    size = Size(engines=16, inside=1024, steps=steps, overtake=overtake, tensors=12, prove=1, mode=mode)
    harness = run_simulation(size, tmp_path)
    seen = harness.seen
    assert seen.steps == size.steps and set(seen.trained.values()) == {1}
    assert len(seen.trained) == size.steps * size.groups_per_step * size.attempts
    assert seen.groups == size.steps * size.groups_per_step + seen.dropped and seen.dropped
    assert 0 < seen.stalest <= size.staleness
    # a dropped group's place is free at once, and reported in its turn
    assert (
        size.admission_slots <= seen.most_inside <= size.admission_slots + seen.dropped
        and seen.most_under_way <= size.inside
    )
    assert all(slot.load == 0 for slot in harness.pool.slots) and harness.sync.committed_version is not None
    assert harness.sync.committed_version.number == size.steps
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    tickets = [event["ticket"] for event in events if event["event"] == "GroupFinished"]
    assert len(tickets) == len(set(tickets)) == seen.groups


def test_a_simulated_run_repeats_to_the_byte(tmp_path: Path):
    size = Size(engines=3, inside=128, steps=4, tensors=3)
    first, second = (run_simulation(size, tmp_path / name) for name in ("first", "second"))
    assert first.loop.time() == second.loop.time()
    logs = [(tmp_path / name / "events.jsonl").read_bytes() for name in ("first", "second")]
    assert logs[0] == logs[1] and len(logs[0]) < 200 * first.seen.groups * size.attempts


def test_a_trajectory_inside_costs_the_driver_little_memory(tmp_path: Path):
    small, large = (Size(engines=4, inside=inside, steps=4, tensors=3) for inside in (64, 320))
    run_simulation(small, tmp_path / "warm")
    peaks = []
    for size in (small, large):
        tracemalloc.start()
        run_simulation(size, tmp_path / str(size.inside))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / (large.inside - small.inside) < 48 * 1024


def test_what_the_driver_spends_is_told_by_part(tmp_path: Path):
    with ComponentProfile() as parts:
        run_simulation(Size(engines=4, inside=256, steps=12, tensors=3), tmp_path)
    assert {"rollout", "requests", "simulated"} <= parts.seconds.keys()
    assert all(spent >= 0 for spent in parts.seconds.values())
