"""Devices go to the plane that is waited for: never beyond the bounds, never back and forth, and to the best split."""

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.schedule.elastic import LOAD_CHANGE, MIN_GAIN, DeviceSplit, ElasticBalancer, ElasticBounds, StepTimes


@dataclass(frozen=True)
class Harness:
    """Planes that overlap: a version takes as long as the slower of the two, and the other waits for it."""

    train: float
    sample: float
    fixed_train: float = 0.0
    fixed_sample: float = 0.0

    def reading(self, split: DeviceSplit) -> StepTimes:
        trained = self.fixed_train + self.train / split.ranks
        sampled = self.fixed_sample + self.sample / split.engines
        return StepTimes(
            seconds=max(trained, sampled),
            trainer_waited=max(0.0, sampled - trained),
            rollout_waited=max(0.0, trained - sampled),
        )


def lived(balance: ElasticBalancer, harness: Harness, versions: int) -> list[DeviceSplit]:
    """The splits of so many versions, with every piece of advice followed."""
    been = []
    for _ in range(versions):
        been.append(balance.split)
        if (target := balance.observe(harness.reading(balance.split))) is not None:
            balance.on_moved(target)
    return been


def reachable(split: DeviceSplit, bounds: ElasticBounds) -> list[DeviceSplit]:
    every = (bounds.toward_rollout(split, count) for count in range(-64, 65))
    return [each for each in every if bounds.allow(each)]


seconds = st.floats(0.05, 100.0)
harnesses = st.builds(Harness, train=seconds, sample=seconds, fixed_train=st.floats(0, 5), fixed_sample=st.floats(0, 5))
bounds_of = st.builds(ElasticBounds, min_ranks=st.integers(1, 3), min_engines=st.integers(1, 3), unit=st.integers(1, 2))


@st.composite
def starts(draw: st.DrawFn) -> tuple[DeviceSplit, ElasticBounds]:
    bounds = draw(bounds_of)
    return DeviceSplit(bounds.min_ranks + draw(st.integers(0, 8)), bounds.min_engines + draw(st.integers(0, 8))), bounds


@given(starts(), harnesses, st.integers(1, 4))
def test_a_harness_that_does_not_change_comes_to_rest_near_its_best_split(start, harness, patience):
    split, bounds = start
    every = reachable(split, bounds)
    turns = 2 * len(every) * (patience + 2)
    been = lived(ElasticBalancer(split, bounds, window=patience), harness, 2 * turns)
    assert set(been) <= set(every)
    assert len(set(been[turns:])) == 1, "it goes back and forth"
    best = min(harness.reading(each).seconds for each in every)
    assert harness.reading(been[-1]).seconds * (1 - MIN_GAIN) <= best * (1 + 1e-9)


waits = st.floats(0, 50)
readings = st.builds(StepTimes, seconds=waits, trainer_waited=waits, rollout_waited=waits)


@given(starts(), st.lists(st.tuples(readings, st.sampled_from(["move", "fail", "disturb"])), max_size=120))
def test_whatever_is_read_one_device_moves_at_a_time_and_never_beyond_the_bounds(start, seen):
    split, bounds = start
    balance = ElasticBalancer(split, bounds, window=2)
    impossible = set()
    for reading, outcome in seen:
        target = balance.observe(reading)
        if outcome == "disturb":
            balance.reset()
        if target is None:
            continue
        assert bounds.allow(target) and target not in impossible
        assert abs(target.engines - balance.split.engines) == 1
        assert target.ranks + bounds.unit * target.engines == split.ranks + bounds.unit * split.engines
        if outcome == "fail":
            impossible.add(target)
            balance.on_failed(target)
        else:
            balance.on_moved(target)


@given(starts(), harnesses, st.integers(1, 4))
def test_a_device_moves_only_after_as_many_versions_as_was_asked_for(start, harness, patience):
    been = lived(ElasticBalancer(*start, window=patience), harness, 60)
    moves = [i for i in range(1, 60) if been[i] != been[i - 1]]
    assert all(later - earlier > patience for earlier, later in zip([-1, *moves], moves, strict=False))


def test_the_trainer_gives_to_rollout_and_rollout_to_the_trainer():
    slow_rollout, slow_trainer = Harness(train=1, sample=20), Harness(train=20, sample=1)
    bounds = ElasticBounds(min_ranks=2, min_engines=1)
    assert lived(ElasticBalancer(DeviceSplit(5, 2), bounds, window=3), slow_rollout, 60)[-1] == DeviceSplit(2, 5)
    assert lived(ElasticBalancer(DeviceSplit(2, 5), bounds, window=3), slow_trainer, 60)[-1] == DeviceSplit(6, 1)


def test_when_the_harness_changes_devices_follow_it():
    balance = ElasticBalancer(DeviceSplit(4, 4), ElasticBounds(), window=2)
    assert lived(balance, Harness(train=1, sample=30), 60)[-1] == DeviceSplit(1, 7)
    assert lived(balance, Harness(train=30, sample=1), 60)[-1] == DeviceSplit(7, 1)
    assert lived(balance, Harness(train=8, sample=8), 60)[-1] == DeviceSplit(4, 4)


@pytest.mark.parametrize("seed", range(20))
def test_a_little_noise_moves_nothing_back_and_forth(seed):
    draws = random.Random(seed)
    noise = [draws.uniform(-0.05, 0.05) for _ in range(120)]
    harness, balance = Harness(train=10, sample=14), ElasticBalancer(DeviceSplit(4, 2), ElasticBounds(), window=3)
    been = []
    for each in noise:
        clean = harness.reading(balance.split)
        noisy = StepTimes(
            seconds=clean.seconds * (1 + each),
            trainer_waited=clean.trainer_waited * (1 + each),
            rollout_waited=clean.rollout_waited * (1 - each),
        )
        been.append(balance.split)
        if (target := balance.observe(noisy)) is not None:
            balance.on_moved(target)
    assert max(map(abs, noise)) < LOAD_CHANGE
    assert sum(a != b for a, b in pairwise(been)) <= 3
