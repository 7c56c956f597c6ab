"""A /generate body becomes parsed requests: prompts, samples, ids and options in SGLang's order."""

from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.serving.test_body import JSON
from tests.tiers import examples

from miles.backends.native.server.api.generate import parse_generate
from miles.backends.native.server.api.request_types import GrammarRule, ParsedRequest
from miles.rollout.serving.errors import RequestError


def parse(**body: Any) -> tuple[list[ParsedRequest], bool]:
    numbers = count()
    requests, single, _ = parse_generate(body, lambda: f"new-{next(numbers)}")
    return requests, single


def parse_one(**body: Any) -> ParsedRequest:
    return parse(**body)[0][0]


def test_what_is_not_said_is_as_sglang_has_it():
    request = parse_one(text="a")
    sampling = request.sampling
    assert (request.prompt, request.rid, request.max_new_tokens, request.seed) == ("a", "new-0", 128, None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, -1, 0.0)
    assert not request.return_logprob and request.logprob_start_len is None
    assert not request.top_logprobs_num and request.token_ids_logprob == ()
    assert request.skip_special_tokens and request.trim_stop and request.grammar is None


def test_a_limit_that_is_null_is_all_the_room_there_is():
    assert parse_one(text="a", sampling_params={"max_new_tokens": None}).max_new_tokens is None


def test_tokens_go_before_text():
    assert parse_one(text="a", input_ids=[1, 2]).prompt == (1, 2)


@pytest.mark.parametrize("given", [{"temperature": 0}, {"temperature": 1e-9}, {"temperature": 2.0, "top_k": 1}])
def test_greedy_is_one_thing_however_it_is_asked_for(given: dict[str, Any]):
    sampling = parse_one(text="a", sampling_params=given).sampling
    assert (sampling.temperature, sampling.top_k) == (0.0, -1)


def test_stop_tokens_are_not_looked_at_when_the_end_is_ignored():
    reported = {"ignore_eos": True, "stop_token_ids": [3], "stop": ["x", ""]}
    sampling = parse_one(text="a", sampling_params=reported).sampling
    assert (sampling.stop_token_ids, sampling.stop) == ((), ("x",))


def test_answers_are_ordered_by_prompt_and_then_by_trajectory():
    requests, single = parse(input_ids=[[1], [2]], sampling_params={"n": 2}, rid="r")
    assert [(request.prompt, request.sample_index, request.rid) for request in requests] == [
        ((1,), 0, "r_0"),
        ((1,), 1, "r_1"),
        ((2,), 0, "r_2"),
        ((2,), 1, "r_3"),
    ]
    assert not single


def test_one_prompt_alone_is_answered_by_one_object():
    assert parse(text="a")[1] and not parse(text=["a"])[1]
    assert not parse(text="a", sampling_params={"n": 2})[1]


def test_options_are_given_once_or_for_each_prompt():
    requests, _ = parse(
        input_ids=[[1], [2]],
        sampling_params=[{"temperature": 0}, {"max_new_tokens": 3}],
        return_logprob=[True, False],
        logprob_start_len=[0, 0],
        top_logprobs_num=2,
        token_ids_logprob=[[5], [6, 7]],
        rid=["a", "b"],
    )
    assert [request.rid for request in requests] == ["a", "b"]
    assert [request.max_new_tokens for request in requests] == [128, 3]
    options = [
        (each.return_logprob, each.logprob_start_len, each.top_logprobs_num, each.token_ids_logprob)
        for each in requests
    ]
    assert options == [(True, 0, 2, (5,)), (False, None, 0, ())]


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"json_schema": '{"type": "object"}'}, GrammarRule(kind="json_schema", source='{"type": "object"}')),
        ({"json_schema": {"type": "object"}}, GrammarRule(kind="json_schema", source='{"type": "object"}')),
        ({"json_schema": "$$ANY$$"}, GrammarRule(kind="json_schema", source="{}")),
        ({"regex": "a+", "json_schema": ""}, GrammarRule(kind="regex", source="a+")),
        ({"ebnf": 'root ::= "a"'}, GrammarRule(kind="ebnf", source='root ::= "a"')),
    ],
)
def test_a_rule_is_read(given: dict[str, Any], rule: GrammarRule):
    assert parse_one(text="a", sampling_params=given).grammar == rule


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "The prompt is missing: give text or input_ids."),
    ({"text": 3}, "text is 3, but must be a string."),
    ({"text": []}, "text is an empty list, but must hold at least one prompt."),
    ({"input_ids": []}, "input_ids is empty, but a prompt has at least one token."),
    ({"input_ids": [[1], []]}, "A prompt in input_ids is empty, but a prompt has at least one token."),
    ({"input_ids": [1, "a"]}, 'input_ids[1] is "a", but must be an integer.'),
    ({"input_ids": [True]}, "input_ids[0] is true, but must be an integer."),
    ({"input_ids": [[[1]]]}, "input_ids[0][0] is a list, but must be an integer."),
    ({"text": "a", "sampling_params": "x"}, 'sampling_params is "x", but must be an object.'),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params is a list of 1, but there is one prompt."),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params is a list of 1, but there are 2 prompts."),
    (
        {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
        "sampling_params.n must be the same for all prompts.",
    ),
    ({"text": "a", "rid": 5}, "rid is 5, but must be a string."),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid names 1 requests, but there are 2."),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid names two requests 'x', but ids must differ."),
    ({"text": "a", "stream": "no"}, 'stream is "no", but must be true or false.'),
    ({"text": "a", "priority": "high"}, 'priority is "high", but must be an integer.'),
    ({"text": "a", "logprob_start_len": -5}, "logprob_start_len is -5, but must be at least -1."),
    ({"text": "a", "video_data": "x"}, "video_data is not supported by this server; leave it out."),
    (
        {"text": "a", "return_hidden_states": True},
        "return_hidden_states is not supported by this server; leave it out.",
    ),
    (
        {"text": "a", "sampling_params": {"n": 5000}},
        "sampling_params.n is 5000, but must be at most 4096.",
    ),
]
WRONG_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"tempratur": 1}, "sampling_params has no tempratur; you may mean temperature."),
    ({"temperature": -1}, "sampling_params.temperature is -1, but must be at least 0."),
    ({"temperature": "hot"}, 'sampling_params.temperature is "hot", but must be a number.'),
    ({"max_new_tokens": 2.5}, "sampling_params.max_new_tokens is 2.5, but must be an integer."),
    ({"max_new_tokens": -1}, "sampling_params.max_new_tokens is -1, but must be at least 0."),
    ({"top_p": 0}, "sampling_params.top_p is 0, but must be at least 1e-06."),
    ({"top_k": 0}, "sampling_params.top_k is 0, but must be -1 (off) or at least 1."),
    ({"min_p": 2}, "sampling_params.min_p is 2, but must be at most 1."),
    ({"frequency_penalty": 3}, "sampling_params.frequency_penalty is 3, but must be at most 2."),
    ({"repetition_penalty": 0}, "sampling_params.repetition_penalty is 0, but must be at least 1e-06."),
    ({"repetition_penalty": 1e-300}, "sampling_params.repetition_penalty is 1e-300, but must be at least 1e-06."),
    ({"top_p": 1e-300}, "sampling_params.top_p is 1e-300, but must be at least 1e-06."),
    (
        {"max_new_tokens": 4, "min_new_tokens": 9},
        "sampling_params.min_new_tokens is 9, but must be at most the 4 tokens of the limit.",
    ),
    ({"stop": 3}, "sampling_params.stop is 3, but must be a string."),
    ({"stop_token_ids": ["a"]}, 'sampling_params.stop_token_ids[0] is "a", but must be an integer.'),
    ({"stop_regex": "("}, "stop_regex '(' is not a regular expression of RE2: missing ): (."),
    ({"stop_regex": r"(a)\1"}, "stop_regex '(a)\\\\1' is not a regular expression of RE2: invalid escape sequence"),
    ({"stop_regex": "a" * 5000}, "stop_regex has 5000 characters, but the limit is 4096."),
    ({"stop_regex": ["a"] * 65}, "stop_regex has 65 patterns, but the limit is 64."),
    ({"stop": ["a"] * 1025}, "stop has 1025 strings, but the limit is 1024."),
    ({"json_schema": "{"}, "json_schema is not valid JSON: Expecting property name enclosed in double quotes"),
    ({"json_schema": "3"}, "json_schema must be a JSON schema"),
    ({"json_schema": "{}", "regex": "a"}, "Only one of json_schema and regex can be set."),
    ({"logit_bias": {"x": 1}}, "logit_bias must be an object of token ids and numbers"),
    ({"logit_bias": {"3": 1e9}}, "logit_bias must be an object of token ids and numbers up to a million"),
    ({"min_new_tokens": 2, "regex": "a"}, "min_new_tokens and regex cannot both be set."),
    ({"logit_bias": [1]}, "sampling_params.logit_bias is a list, but must be an object."),
    ({"structural_tag": "x"}, "structural_tag is not supported by this server; leave it out."),
]


@pytest.mark.parametrize(
    ("body", "says"), [*WRONG, *(({"text": "a", "sampling_params": given}, says) for given, says in WRONG_SAMPLING)]
)
def test_a_wrong_body_is_refused_in_one_sentence(body: dict[str, Any], says: str):
    with pytest.raises(RequestError) as refused:
        parse(**body)
    assert str(refused.value).startswith(says) and refused.value.status == 400


FIELD = st.sampled_from(
    (
        *("sampling_params", "rid", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num", "priority"),
        *("token_ids_logprob", "return_routed_experts", "return_text_in_logprobs", "text", "input_ids"),
    )
)
PARAMETER = st.sampled_from(
    (
        *("max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "n", "json_schema", "regex"),
        *("logit_bias", "sampling_seed", "ignore_eos", "min_new_tokens", "stop_regex", "repetition_penalty"),
    )
)


@settings(max_examples=examples(60), deadline=None)
@given(body=st.dictionaries(FIELD, JSON), given=st.none() | st.dictionaries(PARAMETER, JSON))
def test_any_body_is_understood_or_refused(body: dict[str, Any], given: dict[str, Any] | None):
    if given is not None:
        body = {"input_ids": [1, 2]} | body | {"sampling_params": given}
    try:
        requests, _, _ = parse_generate(body, lambda: "new")
    except RequestError as refused:
        assert 400 <= refused.status < 500 and "\n" not in str(refused)
    else:
        assert requests
