r"""The ``gpqa`` reward: which choice a reply settles on."""

import pytest
from tests.rollout.reward.reward_case import value

from miles.core.errors import DataError

CHOICES = ["10^-4 eV", "10^-9 eV", "a red giant", "a giant"]
RIGHT = [
    ("B", "B"),
    ("b is wrong. The answer is B.", "B"),
    ("(B)", "B"),
    ("B.", "B"),
    ("**B**", "B"),
    ("B) because of the decay", "B"),
    ("Answer: B", "B"),
    ("Answer: (B)", "B"),
    ("Answer: **B**", "B"),
    ("**Answer:** B", "B"),
    ("**Answer: B**", "B"),
    ("The answer is B", "B"),
    ("The correct answer is (B).", "B"),
    ("the final answer is: B", "B"),
    ("The answer is option B.", "B"),
    ("I choose option B.", "B"),
    ("The best choice is B, since A is too large.", "B"),
    (r"\boxed{B}", "B"),
    (r"\boxed{\text{B}}", "B"),
    (r"\boxed{(B)}", "B"),
    (r"so $\boxed{\textbf{B}}$.", "B"),
    (r"\boxed{B. 10^-9 eV}", "B"),
    ("Answer: A. No: Answer: B", "B"),
    (r"\boxed{A} wait, \boxed{B}", "B"),
    ("<think>Answer: A</think>\nAnswer: B", "B"),
    ("A is tempting.\n\nB", "B"),
    ("First (A), then (C), but it must be (B).", "B"),
    ("B is the correct choice by conservation of energy", "B"),
    ("Answer: B", "(B)"),
    ("Answer: B", "b"),
    ("It is 10^-9 eV.", "B"),
    (r"\boxed{10^-9 \text{ eV}}", "B"),
    ("Clearly a red giant", "C"),
    ("Answer: D\n", "a giant"),
    ("Answer: C", "A red giant"),
    ("It decays.\nThus, B.", "B"),
    ("Therefore (B)", "B"),
    ("Hence it is **B**.", "B"),
    ("Answer - B", "B"),
    ("Answer – (B)", "B"),
    ("Answer: B", "1"),
    ("Answer: A", "0"),
]
WRONG = [
    ("A", "B"),
    ("", "B"),
    ("Answer: A", "B"),
    ("Answer: A or B", "B"),
    ("Answer: B or A", "B"),
    ("Answer: A, B", "B"),
    ("Answer: B/C", "B"),
    ("The answer is not B", "B"),
    ("Answer: E", "B"),
    (r"\boxed{A or B}", "B"),
    (r"\boxed{AB}", "B"),
    (r"\boxed{}", "B"),
    (r"\boxed{A}. So the answer is B", "B"),
    ("<think>The answer is B.</think> I do not know.", "B"),
    ("I think A Big star", "B"),
    ("Because", "B"),
    ("Answer: Because of B", "B"),
    ("The answer is a giant", "C"),
    ("either 10^-4 eV or 10^-9 eV", "B"),
    ("ABCD", "B"),
    ("Thus, B or C", "B"),
    ("So B is out of the question", "B"),
    ("Thus, not B.", "B"),
    ("Answer: B", "2"),
    ("A B C D", "B"),
]


@pytest.mark.parametrize(("reply", "label"), RIGHT)
def test_right_choices_earn_one(reply, label):
    assert value("gpqa", reply, label, metadata={"choices": CHOICES}) == 1.0


@pytest.mark.parametrize(("reply", "label"), WRONG)
def test_wrong_choices_and_no_choice_earn_nothing(reply, label):
    assert value("gpqa", reply, label, metadata={"choices": CHOICES}) == 0.0


def test_the_metadata_says_which_letters_there_are_and_which_is_right():
    assert value("gpqa", "Answer: J", "J") == 1.0
    assert value("gpqa", "Answer: K", "J") == 0.0
    assert value("gpqa", "Answer: E", None, metadata={"correct_letter": "E", "valid_letters": ["D", "E"]}) == 1.0
    assert value("gpqa", "Answer: X", "yes", metadata={"choices": {"X": "Yes", "Y": "No"}}) == 1.0
    assert value("boxed_gpqa", r"Answer: A \boxed{B}", "B", metadata={"choices": CHOICES}) == 1.0
    assert value("boxed_gpqa", "Answer: B", "B", metadata={"choices": CHOICES}) == 0.0


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        ("Q", {}),
        ("", {}),
        (None, {}),
        ("E", {"choices": CHOICES}),
        ("4", {"choices": CHOICES}),
        ("-1", {"choices": CHOICES}),
        ("a dwarf", {"choices": CHOICES}),
        ("A", {"choices": "ABCD"}),
    ],
)
def test_a_right_answer_that_is_no_choice_is_the_data_s_fault(label, metadata):
    with pytest.raises(DataError, match="Prompt 3 cannot be graded by gpqa"):
        value("gpqa", "Answer: A", label, metadata=metadata)
