"""Tool calls and reasoning are found in what models write, whole or while it comes."""

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.rollout.serving.output_parser import OutputParser
from miles.rollout.serving.tool_parsers import (
    JSON_LIST_PARSER,
    THINK,
    TOOL_CALL_PARSERS,
    ToolCall,
    build_tool_list_schema,
    detect_tool_parser,
)

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "name": {"type": "string"}}}
TOOLS = {"add": ADD, "stop": {}}
FIRST = ToolCall(name="add", arguments='{"a": 1}')
SECOND = ToolCall(name="stop", arguments="{}")

WRITTEN = {
    "qwen": 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>{"name": "stop", "arguments": {}}</tool_call>',
    "qwen3_coder": "Well.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "glm": "Well.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    "<tool_call>stop</tool_call>",
    "mistral": 'Well.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "stop", "arguments": {}}]',
    "deepseek": "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "llama3": 'Well.<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "stop", "parameters": {}}',
}


@pytest.mark.parametrize("format", WRITTEN)
def test_calls_are_read_in_every_format(format: str):
    parts = OutputParser(tool_parser=TOOL_CALL_PARSERS[format], tools=TOOLS).parse(WRITTEN[format], complete=True)
    assert (parts.content, parts.tool_calls) == ("Well.", (FIRST, SECOND))


@pytest.mark.parametrize("format", WRITTEN)
def test_while_it_comes_nothing_is_said_that_is_taken_back(format: str):
    parser, text = OutputParser(tool_parser=TOOL_CALL_PARSERS[format], tools=TOOLS), WRITTEN[format]
    last = parser.parse(text, complete=True)
    content, calls = "", ()
    for end in range(len(text) + 1):
        parts = parser.parse(text[:end], complete=False)
        assert parts.content.startswith(content) and parts.tool_calls[: len(calls)] == calls
        content, calls = parts.content, parts.tool_calls
    assert last.content.startswith(content) and last.tool_calls[: len(calls)] == calls


def test_newer_mistral_writes_the_name_before_the_arguments():
    text = '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]stop[ARGS]{}'
    assert OutputParser(tool_parser=TOOL_CALL_PARSERS["mistral"], tools=TOOLS).parse(
        text, complete=True
    ).tool_calls == (FIRST, SECOND)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "<tool_call>{not json</tool_call>",
        '<tool_call>{"name": "add", "argum',
        "<tool_call>[1]</tool_call>",
        "no mark at all <tool",
    ],
)
def test_what_is_no_call_is_content(text: str):
    parts = OutputParser(tool_parser=TOOL_CALL_PARSERS["qwen"], tools=TOOLS).parse(text, complete=True)
    assert (parts.content, parts.tool_calls) == (text, ())


def test_words_become_what_the_schema_says():
    text = "<function=add><parameter=a>7</parameter><parameter=name>7</parameter></function>"
    (call,) = (
        OutputParser(tool_parser=TOOL_CALL_PARSERS["qwen3_coder"], tools=TOOLS).parse(text, complete=True).tool_calls
    )
    assert json.loads(call.arguments) == {"a": 7, "name": "7"}


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ('... <tool_call>\n{"name": <function-name>', "qwen"),
        ("<tool_call>\n<function=x>\n<parameter=y>", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>", "glm"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁call▁begin｜>", "deepseek"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3"),
        ("{{ message.content }}", None),
    ],
)
def test_a_template_shows_its_format(template: str, format: str | None):
    found = detect_tool_parser(template)
    assert (found.name if found else None) == format


def test_a_forced_choice_is_a_list_of_calls_and_nothing_else():
    schema = build_tool_list_schema(TOOLS, parallel=True)
    text = '[{"name": "add", "parameters": {"a": 1}}, {"name": "stop", "parameters": {}}]'
    jsonschema.validate(json.loads(text), schema)
    parts = OutputParser(tool_parser=JSON_LIST_PARSER, tools=TOOLS).parse(text, complete=True)
    assert (parts.content, parts.tool_calls) == ("", (FIRST, SECOND))
    assert OutputParser(tool_parser=JSON_LIST_PARSER, tools=TOOLS).parse(text[:20], complete=False).content == ""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(text), build_tool_list_schema(TOOLS, parallel=False))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([], schema)


def test_reasoning_is_told_apart_where_that_was_asked_for():
    text = "<think>\nlet me see\n</think>\n\nIt is 3."
    parts = OutputParser(reasoning_parser=THINK).parse(text, complete=True)
    assert (parts.reasoning, parts.content) == ("let me see", "It is 3.")
    opened = OutputParser(reasoning_parser=THINK, in_reasoning=True).parse("let me see</think>It is 3.", complete=True)
    assert (opened.reasoning, opened.content) == ("let me see", "It is 3.")
    assert OutputParser().parse(text, complete=True).content == text
    assert OutputParser(reasoning_parser=THINK).parse("It is 3.", complete=True).content == "It is 3."


@given(thought=st.text(max_size=20), said=st.text(max_size=20))
def test_reasoning_only_grows_while_it_comes(thought: str, said: str):
    text, parser = f"<think>{thought}</think>{said}", OutputParser(reasoning_parser=THINK)
    reasoning = content = ""
    for end in range(len(text) + 1):
        parts = parser.parse(text[:end], complete=end == len(text))
        assert parts.reasoning.startswith(reasoning) and parts.content.startswith(content)
        reasoning, content = parts.reasoning, parts.content
