"""Replies taken apart: what each family writes, and what models write instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.models.tokenizer import HfTokenizer
from miles.rollout.serving.output_parser import OutputParser, ParsedOutput
from miles.rollout.serving.tool_parsers import THINK, TOOL_CALL_PARSERS
from miles.rollout.session.families import parse_harmony_turn
from miles.rollout.session.renderer_detect import build_renderer

Of = Callable[[str], HfTokenizer]
TOOLS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}},
    "g": {},
}


def read(format: str, text: str, *, complete: bool = True) -> ParsedOutput:
    return OutputParser(tool_parser=TOOL_CALL_PARSERS[format], tools=TOOLS, reasoning_parser=THINK).parse(
        text, complete=complete
    )


def calls(parts: ParsedOutput) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parts.tool_calls]


WRITTEN = {
    "qwen": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=g>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 1}\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}'
    "<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">1</parameter>\n</invoke>\n'
    '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
    "llama3": '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
    "gemma": '```tool_code\n[f(x=1), g()]\n```',
}  # fmt: skip


@pytest.mark.parametrize("format", sorted(TOOL_CALL_PARSERS))
def test_a_format_is_read_as_its_family_writes_it(format: str) -> None:
    for before in ("", "I look.\n", "<think>hm</think>\n\n"):
        parts = read(format, before + WRITTEN[format])
        assert calls(parts) == [("f", {"x": 1}), ("g", {})]
        assert parts.notes == ()
        assert parts.content == ("I look." if before.startswith("I") else "")
        assert parts.reasoning == ("hm" if before.startswith("<") else "")


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("qwen", '<tool_call>{"name": "f", "arguments": {"x": 1,}}</tool_call>', {"x": 1}),
        ("qwen", "<tool_call>{'name': 'f', 'arguments': {'x': 1}}</tool_call>", {"x": 1}),
        ("qwen", '<tool_call>{"name": "f", "arguments": {"x": 1}}}</tool_call>', {"x": 1}),
        ("qwen", '<tool_call>```json\n{"name": "f", "arguments": {"x": 1}}\n```</tool_call>', {"x": 1}),
        ("qwen", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}', {"x": 1}),
    ],
)
def test_what_is_nearly_right_is_read_with_a_note(format: str, text: str, expected: Any) -> None:
    parts = read(format, text)
    assert calls(parts) == [("f", expected)] and parts.notes


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("qwen", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', {"x": 1}),
        ("qwen", '<tool_call>{"name": "f", "arguments": {"s": "a\nb"}}</tool_call>', {"s": "a\nb"}),
        ("qwen", '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', {"x": 1}),
        ("glm", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', {"x": 1}),
        ("glm", "<tool_call>f<arg_key>s</arg_key><arg_value>1</arg_value></tool_call>", {"s": "1"}),
        ("llama3", '{"name": "f", "parameters": {"x": 1}}', {"x": 1}),
        ("llama3", '<function=f>{"x": 1}</function>', {"x": 1}),
        ("llama3", "<|python_tag|>f.call(x=1)", {"x": 1}),
        ("llama3", "[f(x=1)]", {"x": 1}),
        ("minimax", '<tool_calls>\n{"name": "f", "arguments": {"x": 1}}\n</tool_calls>', {"x": 1}),
        ("gemma", '{"name": "f", "parameters": {"x": 1}}', {"x": 1}),
    ],
)
def test_other_ways_of_writing_a_call_are_as_good(format: str, text: str, expected: Any) -> None:
    parts = read(format, text)
    assert calls(parts) == [("f", expected)] and not parts.notes and parts.content == ""


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("qwen", '<tool_call>{"name": "f", "arguments": {"x": </tool_call>'),
        ("qwen", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
        ("qwen", '<tool_call>{"arguments": {}}</tool_call>'),
        ("qwen", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("qwen", "<tool_call>[]</tool_call>"),
        ("glm", "<tool_call>nobody</tool_call>"),
        ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_end|>"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\n```<｜tool▁call▁end｜>"),
        ("minimax", "<minimax:tool_call>f(1)</minimax:tool_call>"),
        ("llama3", "<|python_tag|>print(1)"),
    ],
)
def test_a_malformed_call_is_what_was_said_with_a_note(format: str, text: str) -> None:
    parts = read(format, text)
    assert parts.tool_calls == () and parts.content == text and len(parts.notes) == 1


def test_a_good_call_beside_a_bad_one_is_called_and_the_bad_one_said() -> None:
    bad = "<tool_call>{oops</tool_call>"
    parts = read("qwen", f'Now.\n<tool_call>{{"name": "g"}}</tool_call>{bad}')
    assert calls(parts) == [("g", {})] and bad in parts.content and len(parts.notes) == 1


def test_a_call_within_thoughts_is_a_thought() -> None:
    parts = read("qwen", f"<think>{WRITTEN['qwen']}</think>done")
    assert parts.tool_calls == () and parts.content == "done"


def test_a_call_that_unclosed_thoughts_end_in_is_called_with_a_note() -> None:
    parts = read("qwen", f"<think>hm {WRITTEN['qwen']}")
    assert [name for name, _ in calls(parts)] == ["f", "g"] and parts.reasoning == "hm" and len(parts.notes) == 1


def test_without_tools_nothing_is_a_call() -> None:
    parts = OutputParser(tool_parser=TOOL_CALL_PARSERS["qwen"], tools={}).parse(WRITTEN["qwen"])
    assert parts.content == WRITTEN["qwen"] and parts.tool_calls == ()


CALLED = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
FINAL = "<|channel|>final<|message|>done<|return|>"
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FINAL, ParsedOutput(content="done")),
        (THOUGHT + FINAL, ParsedOutput(content="done", reasoning="hm")),
        ("done<|return|>", ParsedOutput(content="done")),
        ("<|channel|>final<|message|>do", ParsedOutput(content="do")),
        (
            f"<|channel|>commentary<|message|>First.<|end|><|start|>assistant{FINAL}",
            ParsedOutput(content="First.\ndone"),
        ),
    ],
)
def test_channels_are_told_apart(text: str, expected: ParsedOutput) -> None:
    assert parse_harmony_turn(text, TOOLS, True) == expected


@pytest.mark.parametrize(
    "text", [CALLED, THOUGHT + CALLED, ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>']
)
def test_a_call_to_a_recipient_is_a_call(text: str) -> None:
    parts = parse_harmony_turn(text, TOOLS, True)
    assert calls(parts) == [("f", {"x": 1})] and parts.content == ""


def test_a_call_to_nobody_is_said_with_a_note() -> None:
    parts = parse_harmony_turn(CALLED.replace("functions.f", "browser"), TOOLS, True)
    assert parts.tool_calls == () and parts.content == '{"x": 1}' and len(parts.notes) == 1


@pytest.mark.parametrize("format", sorted(TOOL_CALL_PARSERS))
def test_a_reply_that_is_coming_only_grows(format: str) -> None:
    text = "<think>hm, hm</think>\n\nI look.\n" + WRITTEN[format]
    whole, before = read(format, text), ParsedOutput()
    for upto in range(len(text) + 1):
        now = read(format, text[:upto], complete=False)
        assert now.reasoning.startswith(before.reasoning) and now.content.startswith(before.content)
        assert now.tool_calls[: len(before.tool_calls)] == before.tool_calls
        before = now
    assert whole.content.startswith(before.content) and whole.tool_calls[: len(before.tool_calls)] == before.tool_calls


@pytest.mark.parametrize("last", [FINAL, CALLED])
def test_channels_that_are_coming_only_grow(last: str) -> None:
    text = THOUGHT + last
    whole, before = parse_harmony_turn(text, TOOLS, True), ParsedOutput()
    for upto in range(len(text) + 1):
        now = parse_harmony_turn(text[:upto], TOOLS, False)
        assert now.reasoning.startswith(before.reasoning) and now.content.startswith(before.content)
        assert now.tool_calls[: len(before.tool_calls)] == before.tool_calls
        before = now
    assert (before.reasoning, before.content, before.tool_calls) == (whole.reasoning, whole.content, whole.tool_calls)


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(
    pieces=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", '{"name": "f"', "}", "[", "<think>", "</think>", "\n", "x", '"', "\\",
             "```", "<|python_tag|>", "f(", ")", "<|channel|>", "<|message|>", " to=f", "<|end|>", "<function=f>",
             "<arg_key>", "<｜tool▁call▁begin｜>", "<|tool_call_begin|>", "<minimax:tool_call>",
             '<invoke name="f">', "[TOOL_CALLS]"]
        ) | st.text(max_size=4),
        max_size=12,
    )
)  # fmt: skip
def test_nothing_a_model_writes_raises(pieces: list[str]) -> None:
    text = "".join(pieces)
    for format in TOOL_CALL_PARSERS:
        for complete in (True, False):
            read(format, text, complete=complete)
    for complete in (True, False):
        parse_harmony_turn(text, TOOLS, complete)


def test_deep_nesting_is_no_way_to_raise() -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000, "(" * 5_000, "[f(" + "-" * 100_000 + "1)]"):
        assert read("llama3", f"<|python_tag|>{text}").tool_calls == ()


def test_thoughts_that_the_prompt_began_need_no_mark(tokenizer_of: Of) -> None:
    tokenizer = tokenizer_of("minimax")
    renderer = build_renderer(tokenizer)
    context = renderer.render_prompt([{"role": "user", "content": "?"}], ()).tokens
    parts = renderer.parse_reply(context, tokenizer.encode("hm\n</think>\n\nyes[e~["), ())
    assert parts == ParsedOutput(reasoning="hm", content="yes")
