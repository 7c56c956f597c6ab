"""The phases of a start add up to its total; what happens inside of phases is counted apart."""

from itertools import pairwise

import pytest

from miles.observe.start_timer import StartTimer, read_process_age


def test_phases_follow_each_other_and_add_up_to_the_total() -> None:
    times = iter([100.0, 101.0, 103.0, 110.0])
    timer = StartTimer(age=0.5, clock=lambda: next(times))
    timer.lap("config")
    timer.lap("imports")
    timer.add("kernels_compiled", 1)
    timer.add("kernels_compiled", 1)

    found = timer.finish({"rollout": 2.0, "offload": 0.0, "train": 3.0, "publish": 0.5, "other": 9.0})

    parts = {"start/kernels_compiled": 2.0, "start/total": 10.5}
    assert found == parts | {
        "start/config": 1.5,
        "start/imports": 2.0,
        "start/first_sync": 1.5,
        "start/first_rollout": 2.0,
        "start/first_offload": 0.0,
        "start/first_train": 3.0,
        "start/first_publish": 0.5,
    }
    phases = [value for name, value in found.items() if name not in parts]
    assert sum(phases) == pytest.approx(found["start/total"])


def test_the_age_of_the_process_grows() -> None:
    ages = [read_process_age() for _ in range(3)]
    assert all(0 < before <= after for before, after in pairwise(ages))
