"""Text as it comes is the text as a whole, whatever the pieces, and never shows half a character or half a stop."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backends.native.server.tiny import write_tokenizer
from tests.tiers import examples

from miles.core.detokenizer import IncrementalDetokenizer
from miles.models.tokenizer import HfTokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    folder = Path(tmp_path_factory.mktemp("tokenizer"))
    write_tokenizer(folder)
    return load_tokenizer(folder)


TOKENS = st.lists(st.integers(0, 330), max_size=24)


@settings(max_examples=examples(100), deadline=None)
@given(prompt=TOKENS, pieces=st.lists(TOKENS, max_size=6))
def test_the_text_does_not_depend_on_the_pieces_it_came_in(
    tokenizer: HfTokenizer, prompt: list[int], pieces: list[list[int]]
):
    together = IncrementalDetokenizer(tokenizer.text, prompt)
    together.add([token for piece in pieces for token in piece])
    whole = together.last(stop=None, trim=True)
    growing, shown = IncrementalDetokenizer(tokenizer.text, prompt), ""
    for piece in pieces:
        growing.add(piece)
        text = growing.text()
        assert text.startswith(shown) and not text.endswith("�")
        shown = text
    assert growing.last(stop=None, trim=True) == whole
    assert whole.startswith(shown)


@settings(max_examples=examples(100), deadline=None)
@given(text=st.text(max_size=30), size=st.integers(1, 5))
def test_a_text_is_spelled_back_whatever_its_characters(tokenizer: HfTokenizer, text: str, size: int):
    tokens = tokenizer.encode(text)
    growing = IncrementalDetokenizer(tokenizer.decode, [10, 11])
    for start in range(0, len(tokens), size):
        growing.add(tokens[start : start + size])
        assert text.startswith(growing.text())
    assert growing.last(stop=None, trim=True) == text


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_known(tokenizer: HfTokenizer):
    growing, seen = IncrementalDetokenizer(tokenizer.text, [], ("END",)), []
    for text in ("a", "E", "N", "x", "E", "N", "D", "z"):
        growing.add(tokenizer.encode(text))
        seen.append(growing.text())
    assert seen == ["a", "a", "a", "aENx", "aENx", "aENx", "aENxEND", "aENxENDz"]
    assert growing.last(stop="END", trim=True) == "aENx"
    assert growing.last(stop="END", trim=False) == "aENxEND"


def test_the_token_that_ended_an_answer_is_dropped_even_if_it_was_shown(tokenizer: HfTokenizer):
    growing = IncrementalDetokenizer(tokenizer.text, [])
    growing.add(tokenizer.encode("abc"))
    assert growing.text() == "abc"
    assert growing.last(stop=None, trim=True, drop=1) == "ab"
