"""Who is named as slow: whoever stays behind the others, once, and nobody for a hiccup."""

from hypothesis import given
from hypothesis import strategies as st

from miles.cluster.slow import LOOKS, Slowness

STEADY = {"a": 1.0, "b": 1.1, "c": 0.9}


def looks(slowness, taken, first, count):
    return [slow for number in range(first, first + count) for slow in slowness.look(number, taken)]


def test_who_takes_twice_what_the_others_take_is_named_once_with_the_step_it_began_at():
    slowness = Slowness(1.5)
    assert not looks(slowness, STEADY, 1, 10)
    found = looks(slowness, {**STEADY, "c": 2.1}, 11, 30)
    assert [(slow.who, slow.since) for slow in found] == [("c", 11)]
    assert found[0].said("step") == "c takes 2.0 times the median of the others since step 11."


def test_who_is_slow_again_after_a_good_while_is_named_again():
    slowness = Slowness(1.5)
    for first in (1, 101):
        assert len(looks(slowness, {**STEADY, "a": 3.0}, first, 2 * LOOKS)) == 1
        assert not looks(slowness, {**STEADY, "a": 3.0} | {"a": 1.0}, first + 50, LOOKS)


def test_of_two_the_slower_is_named():
    assert [slow.who for slow in looks(Slowness(2.0), {"a": 4.0, "b": 1.0}, 0, LOOKS)] == ["a"]


def test_who_comes_back_under_its_name_begins_anew():
    slowness = Slowness(1.5)
    looks(slowness, {**STEADY, "a": 3.0}, 0, LOOKS - 1)
    slowness.look(LOOKS, {"b": 1.0, "c": 1.0})
    assert not looks(slowness, {**STEADY, "a": 3.0}, LOOKS + 1, LOOKS - 1)


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.floats(0, 10), min_size=1), max_size=30))
def test_nobody_is_named_who_was_not_slow_so_often_in_a_row(history):
    slowness, rows = Slowness(1.5), []
    for number, taken in enumerate(history):
        named = slowness.look(number, taken)
        rows.append(taken)
        for slow in named:
            assert slow.times >= 1.5 and number - slow.since == LOOKS - 1
            assert all(slow.who in row and len(row) > 1 for row in rows[-LOOKS:])
        assert not Slowness(0.0).look(number, taken)
