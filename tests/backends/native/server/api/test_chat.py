"""Chat and completions bodies become parsed requests: rendered prompts, tools, formats and limits."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backends.native.server.tiny import write_tokenizer
from tests.rollout.serving.test_body import JSON
from tests.tiers import examples
from transformers import AutoTokenizer

from miles.backends.native.server.api.chat import (
    ChatFormatter,
    ResponseOptions,
    build_chat_formatter,
    parse_chat_body,
    parse_completion_body,
)
from miles.backends.native.server.api.request_types import ParsedRequest
from miles.models.tokenizer import load_tokenizer
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.tool_parsers import JSON_LIST_PARSER

ASK = [{"role": "user", "content": "the quick"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp("tokenizer"))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def formatter(folder: Path) -> ChatFormatter:
    tokenizer = load_tokenizer(folder)
    return build_chat_formatter(
        tokenizer, {"temperature": 0.6, "top_k": 20}, tool_call_parser="auto", reasoning_parser="think"
    )


def chat(formatter: ChatFormatter, **body: Any) -> tuple[ParsedRequest, ResponseOptions]:
    requests, options, _ = parse_chat_body({"messages": ASK} | body, formatter, lambda: "new")
    return requests[0], options


def completions(**body: Any) -> tuple[list[ParsedRequest], ResponseOptions]:
    requests, options, _ = parse_completion_body(body, lambda tokens: f"<{len(tokens)}>", lambda: "new")
    return requests, options


def test_the_prompt_is_what_transformers_writes(formatter: ChatFormatter, folder: Path):
    messages = [
        {"role": "system", "content": "s"},
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "3", "tool_call_id": "x"},
    ]
    request, _ = chat(formatter, messages=messages, tools=[ADD])
    messages[2]["tool_calls"][0]["function"]["arguments"] = {"a": 1}  # pyright: ignore
    theirs = AutoTokenizer.from_pretrained(folder)
    text = theirs.apply_chat_template(messages, tools=[ADD], add_generation_prompt=True, tokenize=False)
    assert request.prompt == tuple(theirs.encode(text, add_special_tokens=False))


def test_content_may_come_in_parts(formatter: ChatFormatter):
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "quick"}]
    assert chat(formatter, messages=[{"role": "user", "content": parts}])[0].prompt == chat(formatter)[0].prompt


def test_a_last_message_of_the_assistant_can_be_continued(formatter: ChatFormatter):
    begun = [*ASK, {"role": "assistant", "content": "brown"}]
    request, _ = chat(formatter, messages=begun, continue_final_message=True)
    assert request.prompt == (*chat(formatter)[0].prompt, *formatter.tokenizer.encode("brown"))


def test_a_chat_that_says_nothing_samples_as_the_model_would(formatter: ChatFormatter):
    sampling = chat(formatter)[0].sampling
    assert (sampling.temperature, sampling.top_k) == (0.6, 20)
    assert chat(formatter, temperature=0.3)[0].sampling.temperature == 0.3
    assert chat(formatter)[0].max_new_tokens is None


def test_tools_are_shown_unless_they_are_not_to_be_called(formatter: ChatFormatter):
    shown, options = chat(formatter, tools=[ADD])
    hidden, plain = chat(formatter, tools=[ADD], tool_choice="none")
    assert len(shown.prompt) > len(hidden.prompt) and hidden.prompt == chat(formatter)[0].prompt
    assert (
        options.output_parser.tool_parser is not None
        and options.output_parser.tool_parser.name == "qwen"
        and plain.output_parser.tool_parser is None
    )
    assert not shown.skip_special_tokens and hidden.skip_special_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_choice_that_leaves_none_is_a_rule(formatter: ChatFormatter, choice: Any):
    request, options = chat(formatter, tools=[ADD], tool_choice=choice)
    assert (
        options.output_parser.tool_parser is JSON_LIST_PARSER
        and request.grammar is not None
        and request.grammar.kind == "json_schema"
    )


@pytest.mark.parametrize(
    ("format", "kind"),
    [
        ({"type": "json_object"}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}, "json_schema"),
        ({"type": "regex", "regex": "a+"}, "regex"),
    ],
)
def test_a_format_is_a_rule(formatter: ChatFormatter, format: dict[str, Any], kind: str):
    rule = chat(formatter, response_format=format)[0].grammar
    assert rule is not None and rule.kind == kind
    assert chat(formatter, response_format={"type": "text"})[0].grammar is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages is missing."),
    ({"messages": []}, "messages must have at least 1 item."),
    ({"messages": [3]}, "messages[0] is 3, but must be an object."),
    ({"messages": [{"role": "alien", "content": "x"}]}, 'messages[0].role is "alien", but must be one of \'system'),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing."),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content has a part of type 'image_url', but this model reads text only.",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments is not valid JSON",
    ),
    ({"tools": [{"type": "x"}]}, "tools[0] must be an object of type function, with a function that has a name."),
    ({"tool_choice": "required"}, "tool_choice is required, but there are no tools."),
    ({"tools": [ADD], "tool_choice": {"function": {"name": "x"}}}, "tool_choice names 'x', but there is no such tool."),
    ({"tools": [ADD], "tool_choice": "maybe"}, "tool_choice must be none, auto, required"),
    (
        {"tools": [ADD], "tool_choice": "required", "regex": "a"},
        "A required tool call and a response format cannot both be set.",
    ),
    ({"response_format": {"type": "nope"}}, "response_format.type is \"nope\", but must be one of 'text'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema has no schema."),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format and regex cannot both be set."),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs may not set tokenize."),
    ({"max_tokens": -1}, "max_tokens is -1, but must be at least 0."),
    ({"temperature": "x"}, 'temperature is "x", but must be a number.'),
    ({"temperature": -1}, "temperature is -1, but must be at least 0."),
    ({"n": 0}, "n is 0, but must be at least 1."),
    ({"logprobs": 2}, "logprobs is 2, but must be true or false."),
    ({"stream_options": 1}, "stream_options is 1, but must be an object."),
]


@pytest.mark.parametrize(("body", "says"), WRONG)
def test_a_wrong_chat_is_refused_in_one_sentence(formatter: ChatFormatter, body: dict[str, Any], says: str):
    with pytest.raises(RequestError) as refused:
        chat(formatter, **body)
    assert str(refused.value).startswith(says)


def test_a_template_that_fails_is_a_refusal(formatter: ChatFormatter, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(formatter.tokenizer._inner, "chat_template", "{{ messages[0].content + 3 }}")
    with pytest.raises(RequestError, match=r"The chat template .* failed on a conversation, with TypeError"):
        chat(formatter)


FIELD = st.sampled_from(
    (
        *("messages", "tools", "tool_choice", "response_format", "stop", "n", "max_tokens", "logprobs", "top_logprobs"),
        *("chat_template_kwargs", "stream_options", "reasoning_effort", "seed", "logit_bias", "model", "input_ids"),
    )
)


@settings(max_examples=examples(50), deadline=None)
@given(body=st.dictionaries(FIELD, JSON), role=JSON, content=JSON)
def test_any_chat_is_understood_or_refused(
    formatter: ChatFormatter, body: dict[str, Any], role: object, content: object
):
    for asked in (body, body | {"messages": [{"role": role, "content": content}, *ASK]}):
        try:
            requests, _, _ = parse_chat_body(asked, formatter, lambda: "new")
        except RequestError as refused:
            assert 400 <= refused.status < 500
        else:
            assert requests


def test_completions_take_text_and_tokens_one_or_many():
    assert completions(prompt="a")[0][0].prompt == "a"
    assert [w.prompt for w in completions(prompt=["a", "b"], n=2)[0]] == ["a", "a", "b", "b"]
    assert completions(prompt=[1, 2])[0][0].prompt == (1, 2)
    assert [w.prompt for w in completions(prompt=[[1], [2]])[0]] == [(1,), (2,)]
    assert completions(prompt="a")[0][0].max_new_tokens == 16


def test_an_echo_brings_the_prompt_and_its_scores():
    (request,), options = completions(prompt=[1, 2], echo=True, logprobs=2)
    assert (options.echoes, request.logprob_start_len, request.top_logprobs_num, request.return_logprob) == (
        ("<2>",),
        0,
        2,
        True,
    )
    (request,), options = completions(prompt="a", logprobs=0)
    assert (request.logprob_start_len, request.top_logprobs_num, request.return_logprob) == (None, 0, True)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "prompt is missing."),
        ({"prompt": ""}, "prompt is empty."),
        ({"prompt": []}, "prompt is empty, but a prompt has at least one token."),
        ({"prompt": ["a", 1]}, "prompt must be a string, a list of strings"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0, but must be at least 1."),
        ({"prompt": "a", "best_of": 3}, "best_of is 3, but this server returns all samples"),
        ({"prompt": "a", "suffix": "x"}, "suffix is not supported by this server; leave it out."),
        ({"prompt": "a", "logprobs": True}, "logprobs is true, but must be an integer."),
    ],
)
def test_a_wrong_completion_is_refused_in_one_sentence(body: dict[str, Any], says: str):
    with pytest.raises(RequestError) as refused:
        completions(**body)
    assert str(refused.value).startswith(says)
