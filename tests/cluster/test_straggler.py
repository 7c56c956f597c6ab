"""Stragglers are reported once, by rank or engine, and not for a short delay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.cluster.straggler import CONSECUTIVE_CHECKS, EngineThroughput, StragglerDetector

STEADY = {"a": 1.0, "b": 1.1, "c": 0.9}


def checks(detector, taken, first, count):
    return [slow for number in range(first, first + count) for slow in detector.update(number, taken)]


def test_who_takes_twice_what_the_others_take_is_named_once_with_the_step_it_began_at():
    detector = StragglerDetector(1.5)
    assert not checks(detector, STEADY, 1, 10)
    found = checks(detector, {**STEADY, "c": 2.1}, 11, 30)
    assert [(slow.name, slow.since) for slow in found] == [("c", 11)]
    assert found[0].describe("step") == "c takes 2.0 times the median of the others since step 11."


def test_who_is_slow_again_after_a_good_while_is_named_again():
    detector = StragglerDetector(1.5)
    for first in (1, 101):
        assert len(checks(detector, {**STEADY, "a": 3.0}, first, 2 * CONSECUTIVE_CHECKS)) == 1
        assert not checks(detector, {**STEADY, "a": 3.0} | {"a": 1.0}, first + 50, CONSECUTIVE_CHECKS)


def test_of_two_the_slower_is_named():
    assert [slow.name for slow in checks(StragglerDetector(2.0), {"a": 4.0, "b": 1.0}, 0, CONSECUTIVE_CHECKS)] == ["a"]


def test_who_comes_back_under_its_name_begins_anew():
    detector = StragglerDetector(1.5)
    checks(detector, {**STEADY, "a": 3.0}, 0, CONSECUTIVE_CHECKS - 1)
    detector.update(CONSECUTIVE_CHECKS, {"b": 1.0, "c": 1.0})
    assert not checks(detector, {**STEADY, "a": 3.0}, CONSECUTIVE_CHECKS + 1, CONSECUTIVE_CHECKS - 1)


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.floats(0, 10), min_size=1), max_size=30))
def test_nobody_is_named_who_was_not_slow_so_often_in_a_row(history):
    detector, rows = StragglerDetector(1.5), []
    for number, taken in enumerate(history):
        named = detector.update(number, taken)
        rows.append(taken)
        for slow in named:
            assert slow.ratio >= 1.5 and number - slow.since == CONSECUTIVE_CHECKS - 1
            assert all(slow.name in row and len(row) > 1 for row in rows[-CONSECUTIVE_CHECKS:])
        assert not StragglerDetector(0.0).update(number, taken)


def test_an_engine_that_stays_behind_is_reported_once_however_few_requests_it_had():
    throughput, said = EngineThroughput(1.5), []
    throughput.log = (said.append,)
    serving = ["engine 0", "engine 1", "engine 2"]
    for version in range(4 * CONSECUTIVE_CHECKS):
        for name, seconds, responses in (("engine 0", 1.0, 20), ("engine 1", 2.5, 8), ("engine 2", 1.1, 20)):
            for _ in range(responses):
                throughput.record(name, 50, 50 * seconds, serving=serving, version=version)
    assert said == ["engine 1 takes 2.4 times the median of the others since version 0."]


def test_a_single_engine_or_one_that_is_gone_is_compared_with_nobody():
    throughput = EngineThroughput(1.5)
    throughput.log = (pytest.fail,)
    for number in range(200):
        throughput.record("engine 0", 10, 1.0, serving=["engine 0"], version=number)
        throughput.record("engine 0", 10, 1.0, serving=["engine 0", "engine 1"], version=number)
        throughput.record("engine 1", 0, 100.0, serving=["engine 0", "engine 1"], version=number)
