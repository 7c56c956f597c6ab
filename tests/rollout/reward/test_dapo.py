r"""The ``dapo`` reward: a last line ``Answer: ...``, worth 1 or -1."""

import pytest
from tests.rollout.reward.reward_case import reward, value

RIGHT = [
    ("Answer: 42", "42"),
    ("so it is.\n\nAnswer: 42", "42"),
    ("Answer: 41\nNo, wait.\nAnswer: 42", "42"),
    ("answer: 42", "42"),
    ("**Answer:** 42", "42"),
    ("**Answer: 42**", "42"),
    ("Answer : 42", "42"),
    ("Answer: 42.", "42"),
    ("Answer: 42.0", "42"),
    ("Answer: $42$", "42"),
    ("Answer: \\boxed{42}", "42"),
    ("Answer: $\\boxed{42}$", "42"),
    ("Answer: 1,234", "1234"),
    ("Answer: -7", "-7"),
    ("Answer: −7", "-7"),
    ("Answer: -0", "0"),
    ("Answer: x = 5", "5"),
    ("Answer: $n = 2 + 3 = 5$", "5"),
    ("Answer: \\frac{1}{2}", "0.5"),
    ("Answer: 1/2", r"\frac{1}{2}"),
    ("Answer: \\dfrac12", "1/2"),
    ("Answer: 50\\%", "50"),
    ("Answer: 18 dollars", "18"),
    ("Answer: $18", "18"),
    ("Answer: 12 cm", "12"),
    ("Answer: 12 square units", "12"),
    ("Answer: 30 degrees.", "30"),
    ("Answer: 30^\\circ", "30"),
    ("Answer: 5\\text{ cm}", "5"),
    ("Answer: (1, 2)", "(1,2)"),
    ("Answer: {1, 2}", "{1,2}"),
    ("Answer: [0, \\frac12]", "[0,0.5]"),
    ("Answer: \\sqrt2", "\\sqrt{2}"),
    ("Answer: 72", "3 * 24 = 72 #### 72"),
    ("Answer: 72", "The result is \\boxed{72}."),
    ("The answer: 9", "9"),
    ("Answer: 42\nThat is all.", "42"),
    ("Answer: $50$ dollars", "50"),
    ("Answer: $42$ apples", "42"),
    ("Answer: 100 square", "100"),
    ("Answer: $x$ = $5$", "5"),
    ("Answer: 12 students", "12"),
    ("Answer: \\$50", "50"),
]
WRONG = [
    ("Answer: 43", "42"),
    ("42", "42"),
    ("\\boxed{42}", "42"),
    ("The answer is 42", "42"),
    ("Answer: 42\nAnswer: 43", "42"),
    ("Answer:", "42"),
    ("Answer:   \n42", "41"),
    ("Answer: \\boxed{}", "0"),
    ("Answer: 42 or 43", "42"),
    ("Answer: $42$ or $43$", "42"),
    ("Answer: 42 apples", "42"),
    ("Answer: 42, 43", "42"),
    ("Answer: -42", "42"),
    ("Answer: 4.2", "42"),
    ("Answer: (1,2)", "[1,2]"),
    ("Answer: (2,1)", "(1,2)"),
    ("Answer: x", "5"),
    ("Answer: x =", "5"),
    ("Answer: 42" + " " * 400, "42"),
    ("Answer: 42\n" + "and on it goes " * 40, "42"),
    ("answers: 42", "42"),
    ("Answer 42", "42"),
    ("Answer: 0.333", "1/3"),
    ("Answer: the number 42", "42"),
    ("", "42"),
]


@pytest.mark.parametrize(("reply", "label"), RIGHT)
def test_right_answers_earn_one(reply, label):
    given = reward("dapo", reply, label)
    assert (given.value, given.parts) == (1.0, {"score": 1.0, "acc": 1.0})


@pytest.mark.parametrize(("reply", "label"), WRONG)
def test_wrong_answers_and_wrong_form_lose_one(reply, label):
    given = reward("dapo", reply, label)
    assert (given.value, given.parts) == (-1.0, {"score": -1.0, "acc": 0.0})


def test_the_boxed_kind_reads_the_last_box_near_the_end():
    assert value("boxed_dapo", r"It is \boxed{42}", "42") == 1.0
    assert value("boxed_dapo", "Answer: 42", "42") == -1.0
    assert value("boxed_dapo", r"\boxed{42}" + " " * 400, "42") == -1.0
