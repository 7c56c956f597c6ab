"""Chat and completions bodies become wishes: prompts as the template writes them, tools, formats and limits."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backends.native.server.test_fields import JSON
from tests.backends.native.server.tiny import write_tokenizer
from transformers import AutoTokenizer

from miles.backends.native.server.chat import Speaker, Told, read_chat, speaker_of
from miles.backends.native.server.completions import read_completions
from miles.backends.native.server.refusal import Refusal
from miles.backends.native.server.tools import FORCED
from miles.backends.native.server.wish import Wish
from miles.models.tokenizer import load_tokenizer

ASK = [{"role": "user", "content": "the quick"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp("tokenizer"))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def speaker(folder: Path) -> Speaker:
    tokenizer = load_tokenizer(folder)
    return speaker_of(tokenizer, {"temperature": 0.6, "top_k": 20}, tool_call_parser="auto", reasoning_parser="think")


def chat(speaker: Speaker, **body: Any) -> tuple[Wish, Told]:
    errand, told = read_chat({"messages": ASK} | body, speaker, lambda: "new")
    return errand.wishes[0], told


def completions(**body: Any) -> tuple[tuple[Wish, ...], Told]:
    errand, told = read_completions(body, lambda tokens: f"<{len(tokens)}>", lambda: "new")
    return errand.wishes, told


def test_the_prompt_is_what_transformers_writes(speaker: Speaker, folder: Path):
    messages = [
        {"role": "system", "content": "s"},
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "3", "tool_call_id": "x"},
    ]
    wish, _ = chat(speaker, messages=messages, tools=[ADD])
    messages[2]["tool_calls"][0]["function"]["arguments"] = {"a": 1}  # pyright: ignore
    theirs = AutoTokenizer.from_pretrained(folder)
    text = theirs.apply_chat_template(messages, tools=[ADD], add_generation_prompt=True, tokenize=False)
    assert wish.prompt == tuple(theirs.encode(text, add_special_tokens=False))


def test_content_may_come_in_parts(speaker: Speaker):
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "quick"}]
    assert chat(speaker, messages=[{"role": "user", "content": parts}])[0].prompt == chat(speaker)[0].prompt


def test_a_last_message_of_the_assistant_can_be_continued(speaker: Speaker):
    begun = [*ASK, {"role": "assistant", "content": "brown"}]
    wish, _ = chat(speaker, messages=begun, continue_final_message=True)
    assert wish.prompt == (*chat(speaker)[0].prompt, *speaker.tokenizer.encode("brown"))


def test_a_chat_that_says_nothing_samples_as_the_model_would(speaker: Speaker):
    sampling = chat(speaker)[0].draw.sampling
    assert (sampling.temperature, sampling.top_k) == (0.6, 20)
    assert chat(speaker, temperature=0.3)[0].draw.sampling.temperature == 0.3
    assert chat(speaker)[0].draw.limit is None


def test_tools_are_shown_unless_they_are_not_to_be_called(speaker: Speaker):
    shown, told = chat(speaker, tools=[ADD])
    hidden, plain = chat(speaker, tools=[ADD], tool_choice="none")
    assert len(shown.prompt) > len(hidden.prompt) and hidden.prompt == chat(speaker)[0].prompt
    assert told.manner.format is not None and told.manner.format.name == "qwen" and plain.manner.format is None
    assert not shown.draw.skip_special and hidden.draw.skip_special


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_choice_that_leaves_none_is_a_rule(speaker: Speaker, choice: Any):
    wish, told = chat(speaker, tools=[ADD], tool_choice=choice)
    assert told.manner.format is FORCED and wish.draw.rule is not None and wish.draw.rule.kind == "json_schema"


@pytest.mark.parametrize(
    ("format", "kind"),
    [
        ({"type": "json_object"}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}, "json_schema"),
        ({"type": "regex", "regex": "a+"}, "regex"),
    ],
)
def test_a_format_is_a_rule(speaker: Speaker, format: dict[str, Any], kind: str):
    rule = chat(speaker, response_format=format)[0].draw.rule
    assert rule is not None and rule.kind == kind
    assert chat(speaker, response_format={"type": "text"})[0].draw.rule is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages is missing, but must be a list of messages."),
    ({"messages": []}, "messages is empty, but a conversation has at least one message."),
    ({"messages": [3]}, "messages[0] is 3, but must be an object."),
    ({"messages": [{"role": "alien", "content": "x"}]}, 'messages[0].role is "alien", but must be one of system'),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing, but must be a string or a list of parts."),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0] is of type 'image_url', but this model reads text only.",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments is not valid JSON",
    ),
    ({"tools": [{"type": "x"}]}, "tools[0] must be an object of type function, with a function in it."),
    ({"tool_choice": "required"}, "tool_choice is required, but there are no tools."),
    ({"tools": [ADD], "tool_choice": {"function": {"name": "x"}}}, "tool_choice names 'x', but there is no such tool."),
    ({"tools": [ADD], "tool_choice": "maybe"}, 'tool_choice is "maybe", but must be none, auto, required'),
    (
        {"tools": [ADD], "tool_choice": "required", "regex": "a"},
        "A tool that must be called and a format of the reply cannot both be had.",
    ),
    ({"response_format": {"type": "nope"}}, 'response_format.type is "nope", but must be text, json_object'),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema has no schema."),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format and regex cannot both be set."),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs may not set tokenize."),
    ({"max_tokens": -1}, "max_tokens is -1, but must be at least 0."),
    ({"temperature": "x"}, 'temperature is "x", but must be a number.'),
    ({"temperature": -1}, "temperature is -1, but must be from 0 to a million."),
    ({"n": 0}, "n is 0, but must be at least 1 and at most 4096."),
    ({"logprobs": 2}, "logprobs is 2, but must be true or false."),
    ({"stream_options": 1}, "stream_options is 1, but must be an object."),
]


@pytest.mark.parametrize(("body", "says"), WRONG)
def test_a_wrong_chat_is_refused_in_one_sentence(speaker: Speaker, body: dict[str, Any], says: str):
    with pytest.raises(Refusal) as refused:
        chat(speaker, **body)
    assert str(refused.value).startswith(says)


def test_a_template_that_fails_is_a_refusal(speaker: Speaker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speaker.tokenizer._inner, "chat_template", "{{ messages[0].content + 3 }}")
    with pytest.raises(Refusal, match="The chat template cannot write this conversation"):
        chat(speaker)


FIELD = st.sampled_from(
    (
        *("messages", "tools", "tool_choice", "response_format", "stop", "n", "max_tokens", "logprobs", "top_logprobs"),
        *("chat_template_kwargs", "stream_options", "reasoning_effort", "seed", "logit_bias", "model", "input_ids"),
    )
)


@settings(max_examples=50, deadline=None)
@given(body=st.dictionaries(FIELD, JSON), role=JSON, content=JSON)
def test_any_chat_is_understood_or_refused(speaker: Speaker, body: dict[str, Any], role: object, content: object):
    for asked in (body, body | {"messages": [{"role": role, "content": content}, *ASK]}):
        try:
            found, _ = read_chat(asked, speaker, lambda: "new")
        except Refusal as refused:
            assert 400 <= refused.status < 500
        else:
            assert found.wishes


def test_completions_take_text_and_tokens_one_or_many():
    assert completions(prompt="a")[0][0].prompt == "a"
    assert [w.prompt for w in completions(prompt=["a", "b"], n=2)[0]] == ["a", "a", "b", "b"]
    assert completions(prompt=[1, 2])[0][0].prompt == (1, 2)
    assert [w.prompt for w in completions(prompt=[[1], [2]])[0]] == [(1,), (2,)]
    assert completions(prompt="a")[0][0].draw.limit == 16


def test_an_echo_brings_the_prompt_and_its_scores():
    (wish,), told = completions(prompt=[1, 2], echo=True, logprobs=2)
    assert (told.prompts, wish.scores_from, wish.tops, wish.logprobs) == (("<2>",), 0, 2, True)
    (wish,), told = completions(prompt="a", logprobs=0)
    assert (wish.scores_from, wish.tops, wish.logprobs) == (None, 0, True)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "prompt is missing, but must be a string, a list"),
        ({"prompt": ""}, "prompt is empty."),
        ({"prompt": []}, "prompt is empty, but a prompt has at least one token."),
        ({"prompt": ["a", 1]}, "prompt must be a list of integers, or a list of such lists."),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0, but must be at least 1."),
        ({"prompt": "a", "best_of": 3}, "best_of is 3, but this server returns all it writes"),
        ({"prompt": "a", "suffix": "x"}, "suffix is not supported by this server; leave it out."),
        ({"prompt": "a", "logprobs": True}, "logprobs is true, but must be an integer."),
    ],
)
def test_a_wrong_completion_is_refused_in_one_sentence(body: dict[str, Any], says: str):
    with pytest.raises(Refusal) as refused:
        completions(**body)
    assert str(refused.value).startswith(says)
