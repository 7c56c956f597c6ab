"""The ``reasoning_gym`` reward against the library itself: its own answers earn what its own scorer says."""

import pytest
import reasoning_gym
from tests.rollout.reward.reward_case import value

from miles.core.errors import DataError
from miles.rollout.reward.reasoning_gym import extract_answer

TASKS = ["chain_sum", "leg_counting", "basic_arithmetic", "word_sorting", "countdown", "knights_knaves"]


def entry(task):
    return reasoning_gym.create_dataset(task, size=1, seed=3)[0]


@pytest.mark.parametrize("task", TASKS)
def test_the_entry_s_answer_earns_one_and_nonsense_what_the_scorer_says(task, means):
    made = entry(task)
    about = {**made["metadata"], "source_dataset": task}
    scorer = reasoning_gym.get_score_answer_fn(task)
    assert value("reasoning_gym", made["answer"], made["answer"], metadata=about, means=means) == 1.0
    reply = f"<think>hm</think>So: <answer> {made['answer']} </answer>"
    assert value("reasoning_gym", reply, None, metadata={"entry": made, "source_dataset": task}, means=means) == 1.0
    nonsense = value("reasoning_gym", "-17 geese", made["answer"], metadata=about, means=means)
    assert nonsense == scorer("-17 geese", made) < 1.0


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<answer>1</answer> no <answer> 2 </answer>", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer><answer>3</answer>", "3"),
        (r"so \boxed{4}", "4"),
        (" 5 \n", "5"),
        ("<think><answer>1</answer></think>6", "6"),
        ("", ""),
    ],
)
def test_the_answer_is_tagged_or_boxed_or_all_there_is(reply, answer):
    assert extract_answer(reply) == answer


def test_a_pathological_reply_costs_no_more_than_reading_it():
    assert extract_answer("<answer>" * 20_000) == ("<answer>" * 20_000)


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [({}, "names no task in source_dataset"), ({"source_dataset": "juggling"}, "reasoning_gym has no task juggling")],
)
def test_an_entry_without_a_task_is_the_data_s_fault(metadata, complaint, means):
    with pytest.raises(DataError, match=complaint):
        value("reasoning_gym", "5", "5", metadata=metadata, means=means)
