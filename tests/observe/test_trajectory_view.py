"""Trajectories in the terminal: no token is lost, likely and unlikely ones differ, and no escape sequence passes."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.tiny import save_tokenizer
from tests.tiers import examples

from miles.core.types import Author, Span, Status, Trajectory, Version
from miles.models.tokenizer import load_tokenizer
from miles.observe.trajectory_view import (
    BANDS,
    DIM,
    RESET,
    escape_control,
    is_coloured,
    legend,
    render_trajectory,
    split_into_pieces,
    summarize_logprobs,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def trajectory(tokenizer, asked: str, said: str, probabilities=None) -> Trajectory:
    tokens = tokenizer.encode(said)
    chances = probabilities or [1.0] * len(tokens)
    spans = (
        Span(author=Author.PROMPT, tokens=np.array(tokenizer.encode(asked), np.int32)),
        Span(
            author=Author.POLICY,
            tokens=np.array(tokens, np.int32),
            logprobs=np.log(np.array(chances, np.float32)),
            version=Version(number=4),
        ),
    )
    return Trajectory(branches=(spans,), status=Status.COMPLETED)


@settings(max_examples=examples(60), deadline=None)
@given(said=st.text(max_size=12), asked=st.text(max_size=4))
def test_pieces_put_together_are_the_text(said, asked, tokenizer):
    before, tokens = tokenizer.encode(asked)[-6:], tokenizer.encode(said)
    pieces = list(split_into_pieces(tokens, before, tokenizer))
    assert "".join(text for text, _ in pieces) == said and sum(count for _, count in pieces) == len(tokens)


def test_a_character_of_several_tokens_has_the_colour_of_its_least_likely_one(tokenizer):
    made = trajectory(tokenizer, "a", "é", [1.0, 0.05])
    assert f"{BANDS[3][1]}é{RESET}" in render_trajectory(made, tokenizer, colour=True)


def test_each_token_has_the_colour_of_its_probability(tokenizer):
    made = trajectory(tokenizer, "a<|end|>", "xyz <|end|>", [0.95, 0.6, 0.2, 0.02, 0.001])
    text = render_trajectory(made, tokenizer, colour=True)
    shown = ("x", "y", "z", "·", "<|end|>")
    assert "".join(f"{colour}{word}{RESET}" for (_, colour, _), word in zip(BANDS, shown, strict=True)) in text
    assert f"{DIM}a<|end|>{RESET}" in text
    assert all(colour in legend() for _, colour, _ in BANDS)


def test_plain_text_has_no_colour_and_every_word(tokenizer):
    text = render_trajectory(trajectory(tokenizer, "ask<|end|>", "the reply<|end|>"), tokenizer, colour=False)
    assert "\x1b" not in text and text.splitlines() == [
        "prompt (4 tokens)",
        "ask<|end|>",
        "policy, version 4 (8 tokens)",
        "the reply<|end|>",
    ]


def test_what_a_model_wrote_cannot_command_the_terminal(tokenizer):
    text = render_trajectory(trajectory(tokenizer, "a", "b\x1b[2Jc\u202e"), tokenizer, colour=False)
    assert "\x1b" not in text and "b\\x1b[2Jc\\u202e" in text
    assert escape_control("line\n\tand") == "line\n\tand"


def test_the_least_likely_token_is_named(tokenizer):
    made = trajectory(tokenizer, "a", "xyz", [1.0, 0.01, 0.5])
    assert summarize_logprobs(made, tokenizer) == "log-prob mean -1.766, lowest -4.605 at token 1, 'y'"
    assert summarize_logprobs(Trajectory(branches=((),), status=Status.FAILED), tokenizer) == ""


def test_colours_are_for_terminals_that_did_not_say_no(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert is_coloured(True, Terminal()) and not is_coloured(False, Terminal())
    assert not is_coloured(True, io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not is_coloured(True, Terminal())
