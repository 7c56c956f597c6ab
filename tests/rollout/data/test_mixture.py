"""Mixtures: exact shares at every point, unique ids, parts that keep their own order, and a cursor that resumes."""

import json
from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.dataset_files import part

from miles.core.errors import DataError, ResumeError, UsageError
from miles.rollout.data.dataset import DatasetSource, PromptCheck
from miles.rollout.data.mixture import (
    PART_ID_STRIDE,
    MixtureSource,
    WeightedRoundRobin,
    build_source,
    check_parts,
    read_parts,
    to_integer_weights,
)

WEIGHTS = st.lists(st.integers(1, 50), min_size=1, max_size=6)
SHARES = st.fractions(Fraction(1, 100), 5, max_denominator=100)


@st.composite
def mixtures(draw):
    sizes = draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    return [part(f"part{i}", size, i, draw(SHARES)) for i, size in enumerate(sizes)]


def drawn(source, n):
    return [(p.id, p.epoch) for p in (source.next() for _ in range(n))]


# -- turns ----------------------------------------------------------------------------------


@settings(deadline=None)
@given(weights=WEIGHTS, turns=st.integers(1, 300))
def test_after_any_number_of_turns_every_part_has_its_share_to_within_one(weights, turns):
    taken, counts, total = WeightedRoundRobin([0] * len(weights)), [0] * len(weights), sum(weights)
    bound = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else 0
    for n in range(1, turns + 1):
        counts[taken.next(weights)] += 1
        assert all(abs(Fraction(n * w, total) - c) <= bound for w, c in zip(weights, counts, strict=True))


@settings(deadline=None)
@given(weights=WEIGHTS, start=st.integers(0, 100), length=st.integers(0, 100))
def test_in_any_window_two_parts_are_within_one_and_more_within_two(weights, start, length):
    taken = WeightedRoundRobin([0] * len(weights))
    turns = [taken.next(weights) for _ in range(start + length)][start:]
    for number, weight in enumerate(weights):
        off = abs(Fraction(length * weight, sum(weights)) - turns.count(number))
        assert off <= 1 if len(weights) <= 2 else off < 2


@given(weights=WEIGHTS)
def test_a_whole_round_gives_every_part_its_weight_and_then_repeats(weights):
    taken, total = WeightedRoundRobin([0] * len(weights)), sum(weights)
    rounds = [[taken.next(weights) for _ in range(total)] for _ in range(2)]
    assert rounds[0] == rounds[1]
    assert [rounds[0].count(number) for number in range(len(weights))] == weights
    assert taken.deficits == [0] * len(weights)


def test_equal_weights_take_turns():
    taken = WeightedRoundRobin([0, 0, 0])
    assert [taken.next([1, 1, 1]) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


@given(changes=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), max_size=60))
def test_a_part_without_weight_has_no_turn_however_weights_change(changes):
    taken = WeightedRoundRobin([0, 0, 0])
    for weights in changes:
        assert weights[taken.next(weights)] > 0


@given(st.lists(SHARES, min_size=1, max_size=5))
def test_whole_weights_keep_the_proportions(weights):
    whole = to_integer_weights(weights)
    assert [Fraction(w, sum(whole)) for w in whole] == [w / sum(weights) for w in weights]


# -- sources --------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    parts=mixtures(),
    before=st.integers(0, 40),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_a_mixture_resumed_at_any_point_equals_one_never_stopped(parts, before, shuffle, seed):
    unbroken = MixtureSource(parts, shuffle=shuffle, seed=seed)
    drawn(unbroken, before)
    state = json.loads(json.dumps(unbroken.state()))
    resumed = MixtureSource(parts, shuffle=shuffle, seed=seed)
    drawn(resumed, 3)
    resumed.load(state)
    assert resumed.state() == state
    assert drawn(resumed, 40) == drawn(unbroken, 40)


@settings(deadline=None)
@given(parts=mixtures(), shuffle=st.booleans(), seed=st.integers(0, 9))
def test_each_part_of_a_mixture_is_read_as_it_would_be_alone(parts, shuffle, seed):
    together = drawn(MixtureSource(parts, shuffle=shuffle, seed=seed), 60)
    assert len(set(together)) == len(together), "no prompt comes twice in an epoch of its part"
    for number, one in enumerate(parts):
        own = [pair for pair in together if pair[0] // PART_ID_STRIDE == number]
        assert own == drawn(DatasetSource(one.dataset, shuffle=shuffle, seed=seed), len(own))


@given(parts=mixtures())
def test_the_shares_of_a_mixture_are_its_weights_to_within_one(parts):
    ids = [index // PART_ID_STRIDE for index, _ in drawn(MixtureSource(parts), 50)]
    total = sum(p.weight for p in parts)
    for number, one in enumerate(parts):
        so_far = accumulate(index == number for index in ids)
        assert all(abs(n * one.weight / total - count) < 1 for n, count in enumerate(so_far, 1))


def test_a_prompt_of_a_mixture_can_be_found_again():
    source = MixtureSource([part("a", 3, 0, Fraction(1)), part("b", 2, 1, Fraction(2))], shuffle=True)
    for prompt in [source.next() for _ in range(20)]:
        assert source.get_prompt(prompt.id, prompt.epoch) == prompt
    for absent in (3, PART_ID_STRIDE + 2, 2 * PART_ID_STRIDE, -1):
        with pytest.raises(ResumeError, match=f"no prompt {absent}"):
            source.get_prompt(absent, 0)


@pytest.mark.parametrize(
    "other",
    [
        [part("a", 3, 0, Fraction(1)), part("b", 2, 1, Fraction(2))],
        [part("a", 3, 0, Fraction(1)), part("b", 3, 1, Fraction(1))],
        [part("a", 3, 0, Fraction(1)), part("c", 2, 1, Fraction(1))],
        [part("a", 3, 0, Fraction(1)), part("b", 2, 1, Fraction(1)), part("c", 2, 2, Fraction(1))],
        [part("a", 3)],
    ],
    ids=["weights", "sizes", "prompts", "parts", "no mixture"],
)
def test_a_cursor_over_another_mixture_is_refused_both_ways(other):
    parts = [part("a", 3, 0, Fraction(1)), part("b", 2, 1, Fraction(1))]
    one, another = (build_source(p, shuffle=False, seed=0) for p in (parts, other))
    for source, state in ((one, another.state()), (another, one.state())):
        with pytest.raises(ResumeError, match=r"th(is|e) run was started with"):
            source.load(state)


# -- reading --------------------------------------------------------------------------------


def write(folder, name, *texts):
    (folder / name).write_text("".join(json.dumps({"input": text}) + "\n" for text in texts))
    return str(folder / name)


def test_parts_have_names_and_ids_of_their_own(tmp_path):
    (tmp_path / "more").mkdir()
    words = [
        write(tmp_path, "math.jsonl", "a", "b", "c"),
        f"{write(tmp_path / 'more', 'math.jsonl', 'd', 'e')}@[1:]",
        f"{write(tmp_path, 'code.jsonl', 'f')}",
    ]
    parts = read_parts(words, input_key="input")
    assert [p.name for p in parts] == ["math", "math-2", "code"]
    assert [[q.id for q in p.dataset.prompts] for p in parts] == [[0, 1, 2], [PART_ID_STRIDE + 1], [2 * PART_ID_STRIDE]]
    ids = [p.id for p in (source.next() for source in [build_source(parts, shuffle=True, seed=1)] * 5)]
    assert sorted(ids) == [0, 1, 2, PART_ID_STRIDE + 1, 2 * PART_ID_STRIDE]


def test_parts_without_weights_are_one_set_in_the_order_given(tmp_path):
    words = [write(tmp_path, "b.jsonl", "1", "2"), write(tmp_path, "a.jsonl", "3")]
    source = build_source(read_parts(words, input_key="input"), shuffle=False, seed=0)
    assert [source.next().messages[0]["content"] for _ in range(4)] == ["1", "2", "3", "1"]
    assert len(source) == 3


def test_one_part_is_read_as_ever_whatever_its_weight(tmp_path):
    word = write(tmp_path, "a.jsonl", "1", "2")
    plain, weighed = (
        build_source(read_parts([w], input_key="input"), shuffle=True, seed=3) for w in (word, f"{word}*0.2")
    )
    assert plain.state() == weighed.state()


def test_weights_are_read_with_the_parts(tmp_path):
    words = [f"{write(tmp_path, 'a.jsonl', *'0123')}@[:3]*0.75", f"{write(tmp_path, 'b.jsonl', *'45')}*.25"]
    source = build_source(read_parts(words, input_key="input"), shuffle=False, seed=0)
    texts = "".join(source.next().messages[0]["content"] for _ in range(8))
    assert texts.translate(str.maketrans("", "", "45")) == "012012"
    assert texts.translate(str.maketrans("", "", "0123")) == "45"
    assert len(source) == 5
    with pytest.raises(UsageError, match="must be above 0"):
        read_parts([f"{words[0]}", f"{tmp_path}/b.jsonl*0"], input_key="input")


def test_a_bad_row_in_any_part_stops_or_is_counted(tmp_path):
    words = [write(tmp_path, "a.jsonl", "1"), str(tmp_path / "b.jsonl")]
    (tmp_path / "b.jsonl").write_text('{"input": "2"}\nno\n')
    with pytest.raises(DataError, match=r"b\.jsonl, line 2"):
        read_parts(words, input_key="input")
    parts = read_parts(words, input_key="input", skip_bad_rows=True)
    assert [p.dataset.skipped for p in parts] == [0, 1]


NO_CHECK = PromptCheck(context=None, max_rows=0, skip_bad=False)


def test_long_prompts_are_dropped_from_every_part():
    parts = check_parts(
        [part("a", 3), part("longer", 3, 1)], lambda p: p.messages[0]["content"], limit=8, check=NO_CHECK
    )
    assert [len(p.dataset) for p in parts] == [3, 3]
    with pytest.raises(DataError, match=r"All 3 prompts of longer\.jsonl"):
        check_parts([part("a", 3), part("longer", 3, 1)], lambda p: p.messages[0]["content"], limit=4, check=NO_CHECK)
