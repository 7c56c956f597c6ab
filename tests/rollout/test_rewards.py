"""The built-in rewards, as tables of replies and labels."""

import asyncio
import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core.errors import DataError, PlugError, UsageError
from miles.core.types import Author, Prompt, Span, Status, Trajectory
from miles.rollout.reward.boxed import boxed
from miles.rollout.reward.graded import builtin_reward
from miles.rollout.reward.math import same
from miles.rollout.reward.table import GRADES, check_name, grade_of

PIECES = [*"\\{}[](),.$^_-+/% 0123459abx", "\\boxed{", "\\frac", "\\text{", "\\{", "\\}"]
ANYTHING = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\frac{a}{\sqrt{b}}} done", r"\frac{a}{\sqrt{b}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed {5}", "5"),
        (r"\fbox{6}", "6"),
        (r"\boxed{3} \boxed{4", "3"),
        (r"{ \boxed{8} ", "8"),
        (r"} \boxed{9}", "9"),
        (r"$\\ \boxed{10}$", "10"),
        (r"\boxed{}", ""),
        (r"\boxed{unclosed", None),
        ("boxed{5}", None),
        ("no box", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_the_answer(text, inside):
    assert boxed(text) == inside


def test_a_pathological_reply_costs_no_more_than_reading_it():
    assert boxed(r"\boxed{" * 20_000) is None
    assert boxed(r"\boxed{" * 20_000 + "1" + "}" * 20_000) == "1"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("42", "42"),
        ("42", "42.0"),
        ("42.", "42"),
        ("+7", "7"),
        (".5", "0.5"),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac12", "1/2"),
        (r"\dfrac{3}{4}", r"\tfrac{6}{8}"),
        (r"-\frac{1}{2}", r"\frac{-1}{2}"),
        (r"2\frac{1}{2}", "2.5"),
        ("1,234,567", "1234567"),
        ("1{,}000", "1000"),
        (r"10\,000", "10000"),
        (r"1.5 \times 10^{3}", "1500"),
        (r"\$18", "18"),
        ("$18$", "18"),
        (r"50\%", "50"),
        ("90^\\circ", "90"),
        ("90^{\\circ}", "90"),
        (r"5\text{ cm}", "5"),
        (r"\frac{3}{4}\text{ cups}", "0.75"),
        (r"12\text{ cm}^2", "12"),
        ("x = 5", "5"),
        ("x_1=3", "3"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        ("(1, 2.0)", "(1,2)"),
        (r"[0, \frac12]", "[0,0.5]"),
        (r"\{2, 1\}", r"\{1,2\}"),
        (r"\text{Yes}", "yes"),
        (r"\text{(C)}", "C"),
        (r"\textbf{B}", "B"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"2 \sqrt 3", r"2\sqrt{3}"),
        ("x^{2} + 1", "x^2+1"),
        ("−3", "-3"),
        (r"x \le 4", r"x\leq 4"),
        ("{5}", "5"),
        (r"\(\pi\)", r"\pi"),
    ],
)
def test_answers_that_agree(one, other):
    assert same(one, other)
    assert same(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("42", "43"),
        ("42", "-42"),
        ("0.333", r"\frac{1}{3}"),
        ("", "0"),
        ("1/0", "0"),
        (r"\frac{1}{0}", r"\frac{2}{0}"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(2,1)"),
        ("(1,2]", "(1,2)"),
        ("1,2", "1,2,3"),
        (r"\{1,1\}", r"\{1,2\}"),
        ("x", "X"),
        ("x+1", "1+x"),
        ("yes", "no"),
        ("1e3", "1000"),
        (r"\sqrt{2}", "1.414"),
        ("12", "1,2"),
        ("2.5.1", "2.5"),
    ],
)
def test_answers_that_differ(one, other):
    assert not same(one, other)
    assert not same(other, one)


@given(one=ANYTHING, other=ANYTHING)
def test_no_reply_can_upset_the_math_grader_and_agreement_is_mutual(one, other):
    assert same(one, other) == same(other, one)
    assert same(one, one)
    assert grade_of("math")(one, other) in (0.0, 1.0)


def test_numbers_too_large_to_compute_with_are_compared_as_text():
    assert same("9" * 5000, "9" * 5000)
    assert not same("9" * 5000, "9" * 4999)


CASES = [
    ("exact", " 42\n", "42", 1.0),
    ("exact", "The 42", "42", 0.0),
    ("exact", "Rome", "rome", 0.0),
    ("contains", "It is Rome.", "Rome", 1.0),
    ("contains", "It is Paris.", "Rome", 0.0),
    ("last_int", "3 + 4 = 7", "7", 1.0),
    ("int", "The answer is 42.", "42", 1.0),
    ("int", "The answer is 42, not 41", "42", 0.0),
    ("int", "That makes 1,234 sheep", "1234", 1.0),
    ("int", "-5", "-5", 1.0),
    ("int", "−5", "-5", 1.0),
    ("int", "10-7", "7", 1.0),
    ("int", "so 3.0", "3", 1.0),
    ("int", "so 3.5", "5", 0.0),
    ("int", "1,2345", "2345", 1.0),
    ("int", "no number", "0", 0.0),
    ("int", "9" * 9000, "9", 0.0),
    ("int", "7", "7.0", 1.0),
    ("math", r"thus \boxed{\frac{1}{2}}", "0.5", 1.0),
    ("math", r"\boxed{5} or \boxed{6}", "6", 1.0),
    ("math", r"\boxed{72}", "48 / 2 = 24 ... #### 72", 1.0),
    ("math", r"\boxed{3}", r"We get \boxed{3}.", 1.0),
    ("math", "the answer is 5", "5", 0.0),
    ("boxed_math", r"\boxed{5}", "5.0", 1.0),
    ("boxed_int", r"I say 9, \boxed{7} cats", "7", 1.0),
    ("boxed_int", "7", "7", 0.0),
    ("boxed_exact", r"\boxed{ Rome }", "Rome", 1.0),
    ("boxed_f1", r"blah \boxed{the red fox}", "red fox", 1.0),
    ("f1", "The quick, brown fox!", "a quick brown fox", 1.0),
    ("f1", "quick fox", "quick brown fox jumps", 2 * 2 / 6),
    ("f1", "fox fox fox", "fox", 2 * 1 / 4),
    ("f1", "dog", "fox", 0.0),
    ("f1", "", "fox", 0.0),
    ("f1", "the", "a", 1.0),
    ("regex", " 2024-01-31 ", r"\d{4}-\d{2}-\d{2}", 1.0),
    ("regex", "on 2024-01-31", r"\d{4}-\d{2}-\d{2}", 0.0),
]


@pytest.mark.parametrize(("name", "reply", "label", "score"), CASES)
def test_graders(name, reply, label, score):
    assert grade_of(name)(reply, label) == pytest.approx(score)


def test_every_built_in_has_a_case_and_a_sentence():
    graded = {name.removeprefix("boxed_") for name, *_ in CASES}
    assert graded | {"deterministic_random"} == set(GRADES)
    assert all(inspect.getdoc(grade) for grade in GRADES.values())


@pytest.mark.parametrize("name", ["exakt", "boxed_", "boxed_random", "boxed_boxed_math", ""])
def test_an_unknown_name_is_refused_with_the_list(name):
    with pytest.raises(UsageError, match=r"is not a built-in reward; there are exact, contains"):
        check_name(name)


def test_a_near_miss_is_answered_with_a_hint():
    with pytest.raises(UsageError, match=r"did you mean exact\?$"):
        check_name("exakt")


def prompt(label=None, **kw) -> Prompt:
    return Prompt(id=kw.pop("id", 3), messages=({"role": "user", "content": "?"},), label=label, **kw)


def attempt(text=None, index=0) -> Trajectory:
    asked = Span(author=Author.PROMPT, tokens=np.array([1], np.int32))
    metadata = {} if text is None else {"text": text}
    return Trajectory(branches=((asked,),), status=Status.COMPLETED, index=index, metadata=metadata)


def reward(name, prompt, trajectory, seed=0) -> float:
    return asyncio.run(builtin_reward(name, seed=seed)(prompt, trajectory)).value  # type: ignore[arg-type]


def test_a_built_in_reward_grades_the_reply_against_the_label():
    assert reward("int", prompt("7"), attempt("it is 7")) == 1.0
    assert reward("boxed_int", prompt("7"), attempt("it is 7")) == 0.0


@pytest.mark.parametrize(
    ("name", "label", "complaint"),
    [
        ("exact", None, "Prompt 3 has no label to grade by; .*--label-key"),
        ("int", "many", "Prompt 3 cannot be graded by int: the label 'many' is not an integer"),
        ("regex", "(", "Prompt 3 cannot be graded by regex"),
        ("contains", " ", "Prompt 3 cannot be graded by contains"),
    ],
)
def test_a_label_that_cannot_be_graded_by_is_named(name, label, complaint):
    with pytest.raises(DataError, match=complaint):
        reward(name, prompt(label), attempt("7"))


def test_a_reply_without_text_is_the_generate_functions_fault():
    with pytest.raises(PlugError, match="left none in metadata"):
        reward("exact", prompt("7"), attempt())


def test_the_random_reward_is_chance_that_repeats():
    async def drawn(seed):
        score = builtin_reward("random", seed=seed)
        asked = [(prompt(id=p, epoch=e), attempt(index=i)) for p in range(20) for e in (0, 1) for i in range(8)]
        return [(await score(*one)).value for one in asked]

    first, again, other = (asyncio.run(drawn(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert set(first) == {0.0, 1.0}
    assert 0.35 < sum(first) / len(first) < 0.65


def test_the_deterministic_random_reward_follows_the_text_and_needs_no_label():
    scores = [reward("deterministic_random", prompt(), attempt(f"reply {i}")) for i in range(60)]
    assert scores == [reward("deterministic_random", prompt(id=9), attempt(f"reply {i}", index=5)) for i in range(60)]
    assert 15 < sum(scores) < 45
