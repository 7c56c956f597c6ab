"""The graders of plain text: ``exact``, ``contains``, ``int``, ``f1``, ``gsm8k``, ``regex``."""

import pytest
from tests.rollout.reward.reward_case import value

from miles.core.errors import DataError

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
    ("boxed_int", r"I say 9, \boxed{7} cats", "7", 1.0),
    ("boxed_int", "7", "7", 0.0),
    ("boxed_exact", r"\boxed{ Rome }", "Rome", 1.0),
    ("gsm8k", "He has 12 left.", "5 + 7 = 12\n#### 12", 1.0),
    ("gsm8k", "#### 12\nHe had 30.", "#### 12", 1.0),
    ("gsm8k", "first #### 3 then #### 12", "12", 1.0),
    ("gsm8k", "It is 12 of 30.", "12", 0.0),
    ("gsm8k", "#### none, 12", "12", 1.0),
    ("gsm8k", "#### none", "12", 0.0),
    ("gsm8k", "12 ####", "12", 0.0),
    ("gsm8k", "That costs $1,250.50.", "1250.5", 1.0),
    ("gsm8k", "That costs $1,250.", "1,250", 1.0),
    ("gsm8k", "It fell by -3", "-3", 1.0),
    ("gsm8k", "It is .5", "0.50", 1.0),
    ("gsm8k", "no number", "0", 0.0),
    ("gsm8k", "", "0", 0.0),
    ("gsm8k", "1" * 9000, "1", 0.0),
]


@pytest.mark.parametrize(("name", "reply", "label", "score"), CASES)
def test_graders(name, reply, label, score):
    assert value(name, reply, label) == score


F1 = [
    ("The quick, brown fox!", "a quick brown fox", 1.0),
    ("quick fox", "quick brown fox jumps", 4 / 6),
    ("fox fox fox", "fox", 2 / 4),
    ("dog", "fox", 0.0),
    ("", "fox", 0.0),
    ("fox", "", 0.0),
    ("", "", 1.0),
    ("the", "a", 1.0),
    ("FOX", "fox", 1.0),
    ("fox.", "fox", 1.0),
    ("fox's den", "foxs den", 1.0),
    ("an apple a day", "apple day", 1.0),
    ("fox brown quick", "quick brown fox", 1.0),
    ("fox fox", "fox fox", 1.0),
    ("fox fox", "fox dog", 2 / 4),
    ("the fox the fox", "fox", 2 / 3),
    ("yes", "yes", 1.0),
    ("Yes.", "yes", 1.0),
    ("no", "yes", 0.0),
    ("yes it is", "yes", 0.0),
    ("yes", "yes it is", 0.0),
    ("no", "no", 1.0),
    ("noanswer", "fox", 0.0),
    ("no fox", "fox", 2 / 3),
    ("42", "42", 1.0),
    ("4.2", "42", 1.0),
    ("42 km", "42", 2 / 3),
    ("1,000", "1000", 1.0),
    ("-5", "5", 1.0),
    ("  fox \n den ", "fox den", 1.0),
    ("fox\tden", "fox den", 1.0),
    ("fox-den", "fox den", 0.0),
    ("theatre", "atre", 0.0),
    ("Paris, France", "Paris", 2 / 3),
    ("It is in Paris", "Paris", 2 / 5),
    ("Paris Paris Paris Paris", "Paris", 2 / 5),
    ("École", "école", 1.0),
    ("東京", "東京", 1.0),
    ("東京 大阪", "東京", 2 / 3),
    ("a b c d", "b c d e", 6 / 7),
    (r"\boxed{fox}", "fox", 0.0),
    ("(fox)", "fox", 1.0),
    ("!!!", "fox", 0.0),
    ("!!!", "...", 1.0),
]


@pytest.mark.parametrize(("reply", "label", "score"), F1)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(reply, label, score):
    assert value("f1", reply, label) == pytest.approx(score)


def test_f1_takes_the_best_of_several_right_answers():
    several = {"answers": ["New York City", "NYC"]}
    assert value("f1", "nyc", "New York", metadata=several) == 1.0
    assert value("f1", "York", "New York", metadata=several) == pytest.approx(2 / 3)
    assert value("boxed_f1", r"blah \boxed{the red fox}", "red fox") == 1.0
    with pytest.raises(DataError, match="must be a list of texts"):
        value("f1", "nyc", "New York", metadata={"answers": "NYC"})


@pytest.mark.parametrize(
    ("reply", "pattern", "score"),
    [
        (" 2024-01-31 ", r"\d{4}-\d{2}-\d{2}", 1.0),
        ("on 2024-01-31", r"\d{4}-\d{2}-\d{2}", 0.0),
        ("yes", "yes|no", 1.0),
        ("yesno", "yes|no", 0.0),
    ],
)
def test_the_whole_reply_must_match_a_pattern(reply, pattern, score, means):
    assert value("regex", reply, pattern, means=means) == score


@pytest.mark.parametrize(
    ("name", "label", "complaint"),
    [
        ("exact", None, "Prompt 3 has no label to grade against; .*--label-key"),
        ("int", "many", "Prompt 3 cannot be graded by int: the label 'many' is not an integer"),
        ("regex", "(", r"Prompt 3 cannot be graded by regex: the label '\(' is not a regular expression"),
        ("contains", " ", "Prompt 3 cannot be graded by contains"),
        ("gsm8k", "many", "Prompt 3 cannot be graded by gsm8k: the label 'many' ends in no number"),
    ],
)
def test_a_label_that_cannot_be_graded_by_is_named(name, label, complaint, means):
    with pytest.raises(DataError, match=complaint):
        value(name, "7", label, means=means)
