"""Curricula: which results they receive, what they may return, and a cursor that resumes at the same prompts."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.dataset_files import part
from tests.tiers import examples

from miles.core.errors import HookError, ResumeError
from miles.core.events import GroupFinished, StepFinished
from miles.core.protocols import CurriculumState, PromptStats
from miles.core.types import Author, Group, Reward, Span, Status, Trajectory, Version
from miles.hooks.registry import CURRICULUM
from miles.rollout.data.curriculum import (
    CurriculumJournal,
    CurriculumSource,
    learnable_parts,
    quantize_weights,
    unsolved_first,
)
from miles.rollout.data.mixture import PART_ID_STRIDE, build_source

PARTS = [part("easy", 5, 0), part("hard", 3, 1)]
IDS = [p.id for one in PARTS for p in one.dataset.prompts]


def finished(prompt, *rewards):
    spans = (Span(author=Author.PROMPT, tokens=np.array([1], np.int32)),)
    tries = tuple(
        Trajectory(branches=(spans,), status=Status.COMPLETED, reward=Reward(value=reward), index=i)
        for i, reward in enumerate(rewards)
    )
    return GroupFinished(ticket=0, kept=True, reason="kept", group=Group(prompt=prompt, trajectories=tries))


def step_done(step):
    return StepFinished(step=step, version=Version(number=step), metrics={})


def run(source, draws, *, score, first=0, every=4):
    """Draw, and tell the source how it went; a step is done after every ``every`` draws."""
    drawn = []
    for n in range(first, first + draws):
        prompt = source.next()
        drawn.append((prompt.id, prompt.epoch))
        source(finished(prompt, *score(prompt)))
        if (n + 1) % every == 0:
            source(step_done((n + 1) // every))
    return drawn


def score(prompt):
    """Rewards that are a function of the prompt and its epoch, and nothing else."""
    return [((prompt.id * 7 + prompt.epoch * 3 + i) % 5) / 4 for i in range(2)]


def by_reward(state):
    """Weights that hang on everything a state has."""
    means = {p.name: sum(state.stats[q.id].mean for q in p.prompts if q.id in state.stats) for p in state.parts}
    return {name: 1 + mean + (state.step + state.seed % 3) * 0.1 for name, mean in means.items()}


def three_hardest(state):
    def key(prompt):
        past = state.stats.get(prompt.id)
        return (past.last if past else -1.0, (prompt.id * 13 + state.number) % 11)

    prompts = sorted((p for portion in state.parts for p in portion.prompts), key=key)
    return [p.id for p in prompts[:3]]


CURRICULA = [by_reward, three_hardest, learnable_parts, unsolved_first, lambda state: [IDS[state.number % len(IDS)]]]


@settings(deadline=None, max_examples=examples(60))
@given(
    curriculum=st.sampled_from(CURRICULA),
    before=st.integers(0, 40),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_a_curriculum_resumed_at_any_point_equals_one_never_stopped(curriculum, before, shuffle, seed):
    unbroken = CurriculumSource(PARTS, curriculum, shuffle=shuffle, seed=seed)
    run(unbroken, before, score=score)
    state = json.loads(json.dumps(unbroken.state()))
    resumed = CurriculumSource(PARTS, curriculum, shuffle=shuffle, seed=seed)
    run(resumed, 5, score=score)
    resumed.load(state)
    assert json.loads(json.dumps(resumed.state())) == state
    assert run(resumed, 30, score=score, first=before) == run(unbroken, 30, score=score, first=before)


@settings(deadline=None)
@given(curriculum=st.sampled_from(CURRICULA), draws=st.integers(0, 80), shuffle=st.booleans())
def test_no_curriculum_makes_two_groups_of_one_prompt_and_epoch(curriculum, draws, shuffle):
    drawn = run(CurriculumSource(PARTS, curriculum, shuffle=shuffle), draws, score=score)
    assert len(set(drawn)) == len(drawn)


@settings(deadline=None)
@given(order=st.permutations(range(8)))
def test_what_a_curriculum_is_told_does_not_depend_on_which_group_came_first(order):
    expected: list[CurriculumState] = []
    source = CurriculumSource(PARTS, lambda state: expected.append(state) or IDS[:8])
    prompts = [source.next() for _ in range(8)]
    for i in order:
        source(finished(prompts[i], *score(prompts[i])))
    source(step_done(1))
    source.next()
    assert {index: past.mean for index, past in expected[1].stats.items()} == {
        p.id: pytest.approx(sum(score(p)) / 2) for p in prompts
    }


def test_what_was_heard_counts_from_the_end_of_its_step_on():
    expected: list[tuple[int, dict[int, PromptStats]]] = []
    source = CurriculumSource(PARTS, lambda state: expected.append((state.step, dict(state.stats))) or [state.number])
    first = source.next()
    source(finished(first, 1.0, 0.0))
    second = source.next()
    source(finished(second))  # a group without rewards says nothing
    source(step_done(1))
    third = source.next()
    source(finished(third, 0.0))
    source(finished(first, 1.0))
    source(step_done(2))
    source.next()
    assert expected[:2] == [(0, {}), (0, {})]
    assert expected[2] == (1, {first.id: PromptStats(groups=1, mean=0.5, last=0.5, step=1)})
    assert expected[3][1][first.id] == PromptStats(groups=2, mean=0.75, last=1.0, step=2)
    assert expected[3][1][third.id] == PromptStats(groups=1, mean=0.0, last=0.0, step=2)


def test_a_lesson_shows_the_parts_and_the_shares_they_would_have():
    lessons: list[CurriculumState] = []
    CurriculumSource(PARTS, lambda state: lessons.append(state) or {"easy": 1}).next()
    assert [(p.name, p.weight, len(p.prompts)) for p in lessons[0].parts] == [("easy", 5 / 8, 5), ("hard", 3 / 8, 3)]
    weighed = [part("a", 5, 0, Fraction(1)), part("b", 5, 1, Fraction(3))]
    CurriculumSource(weighed, lambda state: lessons.append(state) or {"a": 1}).next()
    assert [p.weight for p in lessons[1].parts] == [0.25, 0.75]
    assert lessons[0].seed == lessons[1].seed


def test_weights_are_asked_for_once_a_step_and_lists_when_they_are_used_up():
    asked: list[int] = []
    source = CurriculumSource(PARTS, lambda state: asked.append(state.step) or {"easy": 1, "hard": 3})
    run(source, 12, score=score)
    assert asked == [0, 1, 2]
    asked.clear()
    source = CurriculumSource(PARTS, lambda state: asked.append(state.step) or IDS[:5])
    run(source, 12, score=score)
    assert asked == [0, 1, 2]  # after 5 and 10 draws, that is in the second and the third step


@given(weights=st.lists(st.integers(0, 20), min_size=2, max_size=2).filter(any))
def test_weighed_parts_have_their_share_to_within_one_over_many_steps(weights):
    source = CurriculumSource(PARTS, lambda state: dict(zip(("easy", "hard"), weights, strict=True)))
    drawn = [index // PART_ID_STRIDE for index, _ in run(source, 60, score=score, every=3)]
    for n in range(60):
        assert abs(n * weights[1] / sum(weights) - sum(drawn[:n])) < 1.001


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(any))
def test_shares_are_whole_and_none_is_lost(weights):
    shares = quantize_weights(weights)
    assert sum(shares) == 1 << 32
    assert all((share > 0) == (weight > 0) for share, weight in zip(shares, weights, strict=True))


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (None, "answered with a NoneType; it must give a list of prompt ids, or a weight for each part"),
        ("easy", "answered with a str"),
        ([], "listed nothing"),
        ([1.5], "no whole numbers"),
        ([1, 1], "listed a prompt twice"),
        ([99], "listed 99, which no prompt has"),
        ([2 * PART_ID_STRIDE], "which no prompt has"),
        ({"other": 1.0}, "weighed other; it must give weights for easy, hard"),
        ({}, "not all of them 0"),
        ({"easy": 0.0}, "not all of them 0"),
        ({"easy": -1.0, "hard": 2.0}, "numbers from 0 on"),
        ({"easy": float("nan")}, "numbers from 0 on"),
        ({"easy": "much"}, "numbers from 0 on"),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(answer, complaint):
    with pytest.raises(HookError, match=f"--curriculum-path {complaint}|{complaint}"):
        CurriculumSource(PARTS, lambda state: answer).next()


def test_a_curriculum_does_not_change_its_kind_of_answer():
    answers = iter([[0], {"easy": 1.0}])
    source = CurriculumSource(PARTS, lambda state: next(answers))
    source.next()
    with pytest.raises(HookError, match="ids and with weights in one run"):
        source.next()


def test_numbers_of_numpy_are_numbers_too():
    assert CurriculumSource(PARTS, lambda state: list(np.array([2, 1]))).next().id == 2


def test_a_cursor_of_another_kind_or_of_other_data_is_refused():
    source = CurriculumSource(PARTS, by_reward)
    plain = build_source(PARTS, shuffle=False, seed=0)
    for one, state in ((source, plain.state()), (plain, source.state())):
        with pytest.raises(ResumeError):
            one.load(state)
    for other in ([part("easy", 6, 0), PARTS[1]], PARTS[:1]):
        with pytest.raises(ResumeError):
            CurriculumSource(other, by_reward).load(json.loads(json.dumps(source.state())))


# -- built in -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CURRICULUM.builtins)
def test_every_built_in_curriculum_fits_the_door_and_reads_every_prompt(name):
    source = CurriculumSource(PARTS, CURRICULUM.load(name), shuffle=True, seed=3)
    assert {index for index, _ in run(source, 60, score=lambda prompt: [0.0, 1.0])} == set(IDS)


def test_parts_that_are_always_or_never_solved_fade():
    source = CurriculumSource(PARTS, learnable_parts)
    drawn = run(source, 400, score=lambda prompt: [1.0] if prompt.id < PART_ID_STRIDE else [0.0, 1.0])
    late = [index // PART_ID_STRIDE for index, _ in drawn[200:]]
    # easy keeps 5/8 of 0.05, hard 3/8 of 1
    assert sum(late) / len(late) == pytest.approx((3 / 8) / (3 / 8 + 5 / 8 * 0.05), abs=0.02)


def test_solved_prompts_wait_until_nothing_is_unsolved():
    solved = set(IDS[:4])
    source = CurriculumSource(PARTS, unsolved_first)
    drawn = run(source, 24, score=lambda prompt: [1.0] if prompt.id in solved else [0.0], every=8)
    assert {index for index, _ in drawn[:8]} == set(IDS)
    assert {index for index, _ in drawn[8:]} == set(IDS) - solved
    everything = CurriculumSource(PARTS, unsolved_first)
    drawn = run(everything, 16, score=lambda prompt: [1.0], every=8)
    assert {index for index, _ in drawn[8:]} == set(IDS)


def test_a_journal_is_overheard_without_being_changed():
    class Told:
        def __init__(self):
            self.events, self.commits = [], 0

        def __call__(self, event):
            self.events.append(event)

        def commit(self):
            self.commits += 1

        def offsets(self):
            return {"events": len(self.events)}

    reported, source = Told(), CurriculumSource(PARTS, lambda state: [0])
    journal = CurriculumJournal(reported, source)
    events = [finished(source.next(), 1.0), step_done(4)]
    for event in events:
        journal(event)
    journal.commit()
    assert (reported.events, reported.commits, journal.offsets()) == (events, 1, {"events": 2})
    assert source.state()["known"]["step"] == 4
