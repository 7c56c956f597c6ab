"""Differences between what is stored and what a template would write, by class."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.rollout.session.test_families import WEATHER, completion, result, user

from miles.models.tokenizer import HfTokenizer
from miles.rollout.session.audit import MISMATCH_KINDS, audit_session
from miles.rollout.session.families import FAMILIES
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.session.session import Session

Of = Callable[[str], HfTokenizer]


def found(tokenizer: HfTokenizer, sampled: list[int]) -> set[str]:
    session = Session("s", build_renderer(tokenizer))
    reply = session.end(session.begin([user("a")], [WEATHER]), completion(sampled))
    behind = result(reply, "fine") if reply.message.get("tool_calls") else user("b")
    turn = session.begin([user("a"), reply.message, behind], [WEATHER])
    last = tokenizer.encode("done<|im_end|>")
    session.end(turn, completion(last))
    report = audit_session(session)
    assert report.tokens == len(turn.tokens) + len(last) and report.conversations == 1
    return {kind for kind, count in report.counts.items() if count}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("the answer<|im_end|>", None),
        ("the answer<|endoftext|>", "boundary"),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call><|im_end|>', "whitespace"),
        ('<tool_call>\n{"arguments": {"city":"Bonn"}, "name":"weather"}\n</tool_call><|im_end|>', "tool_calls"),
        ("<think>\nhm\n</think>\n\nso<|im_end|>", "thinking"),
    ],
)
def test_each_class_of_difference_is_named(words: str, kind: str | None, tokenizer_of: Of) -> None:
    tokenizer = tokenizer_of("qwen3" if kind == "thinking" else "qwen2.5")
    assert found(tokenizer, tokenizer.encode(words)) == ({kind} if kind else set())


def test_other_tokens_for_the_same_text_are_named(tokenizer_of: Of) -> None:
    tokenizer = tokenizer_of("qwen2.5")
    letters = [tokenizer.encode(letter)[0] for letter in "the answer"]
    assert found(tokenizer, [*letters, *tokenizer.encode("<|im_end|>")]) == {"retokenised"}


def test_a_call_addressed_in_another_place_is_the_same_call(tokenizer_of: Of) -> None:
    tokenizer = tokenizer_of("gpt-oss")
    words = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Bonn"}<|call|>'
    session = Session("s", build_renderer(tokenizer))
    reply = session.end(session.begin([user("a")], [WEATHER]), completion(tokenizer.encode(words)))
    turn = session.begin([user("a"), reply.message, result(reply, "fine")], [WEATHER])
    session.end(turn, completion(tokenizer.encode("<|channel|>final<|message|>done<|return|>")))
    assert {kind for kind, count in audit_session(session).counts.items() if count} == {"tool_calls"}


def test_what_has_no_name_is_unknown_and_all_are_metrics(tokenizer_of: Of) -> None:
    tokenizer = tokenizer_of("qwen2.5")
    session = Session("s", build_renderer(tokenizer))
    # A mark in the middle of a reply: the template would write the reply's words, and they are not these.
    turn = session.begin([user("a")])
    session.end(turn, completion(tokenizer.encode("one<|im_start|>two<|im_end|>")))
    assert session.tree.leaves()[0].messages[-1]["content"] == "one<|im_start|>two"
    metrics = audit_session(session).metrics()
    assert set(metrics) == {f"session_mismatch/{kind}" for kind in (*MISMATCH_KINDS, "refused")}
    assert all(isinstance(value, float) for value in metrics.values())


def test_differences_a_family_promises_are_classes() -> None:
    assert {kind for family in FAMILIES for kind in family.expected_mismatches} <= set(MISMATCH_KINDS)
