"""A source's cursor is asked for at every draw, and is the same one until it moves."""

from fractions import Fraction

from miles.core.types import Prompt
from miles.rollout.data.dataset import Dataset, DatasetSource
from miles.rollout.data.mixture import MixturePart, MixtureSource


def data(count: int, first: int = 0) -> Dataset:
    return Dataset(path="here", prompts=tuple(Prompt(id=first + i, messages=[]) for i in range(count)))


def test_a_cursor_that_was_handed_out_stays_as_it_was():
    source = DatasetSource(data(3), shuffle=True, seed=1)
    states = [source.state()]
    assert states[0] is source.state()
    drawn = [source.next()]
    for _ in range(4):
        states.append(source.state())
        drawn.append(source.next())
    assert [state["position"] for state in states] == [0, 1, 2, 3, 1]
    for state, prompt in zip(states, drawn, strict=True):
        again = DatasetSource(data(3), shuffle=True, seed=1)
        again.load(state)
        assert again.state() == state and again.next() == prompt


def test_parts_that_were_not_drawn_from_share_their_cursor():
    parts = [MixturePart(name=str(i), dataset=data(4, 10**12 * i), weight=Fraction(1)) for i in range(3)]
    source = MixtureSource(parts)
    before = source.state()
    source.next()
    after = source.state()
    same = [old is new for old, new in zip(before["parts"], after["parts"], strict=True)]
    assert sorted(same) == [False, True, True]
