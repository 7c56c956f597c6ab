"""The example reward does what its page says."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from miles.core.types import Author, Span, Status, Trajectory
from miles.hooks.registry import REWARD
from miles.rollout.data.dataset import read_dataset

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_reward"


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (lambda word: f" {word}\n", 1.0),
        (lambda word: word[:-1] + "?", 0.5 * 4 / 5),
        (lambda word: word + " I think", 0.5 * 5 / 13),
        (lambda word: "", 0.0),
    ],
)
def test_the_example_reward_gives_partial_credit(said, value):
    data = read_dataset(str(EXAMPLE / "words.jsonl"), input_key="question", label_key="answer")
    prompt = data.prompts[0]
    asked = Span(author=Author.PROMPT, tokens=np.array([1], np.int32))
    trajectory = Trajectory(branches=((asked,),), status=Status.COMPLETED, metadata={"text": said(prompt.label or "")})
    score = REWARD.load(f"{EXAMPLE / 'reward.py'}:score")
    assert asyncio.run(score(prompt, trajectory)).value == pytest.approx(value)


def test_every_row_of_the_example_is_a_word_written_backwards():
    for prompt in read_dataset(str(EXAMPLE / "words.jsonl"), input_key="question", label_key="answer").prompts:
        assert prompt.label is not None
        assert f"the word {prompt.label[::-1]} backwards" in prompt.messages[0]["content"]
        assert prompt.metadata == {"letters": len(prompt.label)}
