"""Streaming output parser: what is streamed is a prefix of the final parse, for every family and every split."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.session.cases import CASES
from tests.tiers import examples

from miles.core.protocols import Completion
from miles.core.types import Author, Span, Status, Version
from miles.models.tokenizer import HfTokenizer
from miles.rollout.session.fallback_renderer import FallbackRenderer
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.session.session import Session

Of = Callable[[str], HfTokenizer]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}]
ASKED = [{"role": "user", "content": "go"}]
SAID = (
    *("I look.", "\n", " ", "ünï", "{", "[", "STOP", "ST", "<", "<tool", "```", '{"name": "f"}', "<think>"),
    *("</think>", "x<|im_e"),
)


def heard(session: Session, tokens: list[int], random: Random, *, tools: bool, stop: tuple[str, ...]) -> None:
    """Play one turn, a few tokens at a time; what is streamed must be what is parsed at the end."""
    turn = session.begin(ASKED, TOOLS if tools else ())
    parser = session.stream_parser(turn, stop=stop)
    expected: list[Any] = []
    at = 0
    while at < len(tokens):
        step = random.randint(1, 3)
        parser.add(tokens[at : at + step])
        at += step
        expected.append(parser.parse())
    span = Span(
        author=Author.POLICY,
        tokens=np.array(tokens, np.int32),
        logprobs=-np.ones(len(tokens), np.float32),
        version=Version(),
    )
    text = session.renderer.decode(tokens)
    reply = session.end(turn, Completion(spans=(span,), status=Status.COMPLETED, finish_reason="stop"), stop=stop)
    for now, later in zip(expected, [*expected[1:], reply.output], strict=True):
        assert later.reasoning.startswith(now.reasoning), text
        assert later.content.startswith(now.content), text
        assert not any(each in now.content or each in now.reasoning for each in stop)
        assert not (now.content and now.reasoning != later.reasoning), "words begin when the thoughts have ended"


def ended_at(tokens: list[int], tokenizer: HfTokenizer, stop: tuple[str, ...]) -> list[int]:
    """Up to where an engine would have ended."""
    for upto in range(1, len(tokens) + 1):
        if any(each in tokenizer.decode(tokens[:upto]) for each in stop):
            return tokens[:upto]
    return tokens


@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 10**6), tools=st.booleans(), stops=st.booleans())
def test_what_is_told_of_a_reply_is_never_taken_back(
    name: str, tokenizer_of: Of, seed: int, tools: bool, stops: bool
) -> None:
    case, tokenizer, random = CASES[name], tokenizer_of(name), Random(seed)
    calls = [case.call("f", {"x": random.choice([1, "STOP", "é"])}, i) for i in range(random.randint(0, 2))]
    pieces = [random.choice((*SAID, *case.marks)) for _ in range(random.randint(0, 5))]
    if random.random() < 0.6:
        text = case.said("hm, so" if case.thinks else "", "".join(pieces), calls)
    else:
        pieces += calls
        random.shuffle(pieces)
        text = "".join(pieces)
    stop = ("STOP", ".\n") if stops else ()
    tokens = ended_at(tokenizer.encode(text + case.end), tokenizer, stop)
    heard(Session("s", build_renderer(tokenizer, family=case.family)), tokens, random, tools=tools, stop=stop)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 10**6), tools=st.booleans())
def test_nor_where_the_family_is_unknown(tokenizer_of: Of, seed: int, tools: bool) -> None:
    tokenizer, random = tokenizer_of("qwen2.5"), Random(seed)
    text = "".join(random.choice((*SAID, "<|im_end|>")) for _ in range(random.randint(0, 6)))
    session = Session("s", FallbackRenderer(tokenizer))
    heard(session, tokenizer.encode(text + "<|im_end|>"), random, tools=tools, stop=())


def test_text_before_a_call_is_told_and_nothing_of_the_call(tokenizer_of: Of) -> None:
    tokenizer = tokenizer_of("qwen2.5")
    session = Session("s", build_renderer(tokenizer))
    parser = session.stream_parser(session.begin(ASKED, TOOLS))
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    seen: list[str] = []
    for token in tokenizer.encode(f"I look.\n<tool_call>\n{call}\n</tool_call><|im_end|>"):
        parser.add([token])
        seen.append(parser.parse().content)
    assert seen[0] and seen[-1] == "I look." and len(set(seen)) > 1
