"""What ``/generate`` writes is what the weights say: tokens, log-probs, seeds, rules and names."""

import json
import re

import jsonschema
import pytest
from tests.server_api import results
from tests.server_api.exchanges import GREEDY, PAIR, PROMPT, SHORT
from tests.server_api.live_servers import Wire
from tests.server_api.oracle import Oracle
from tests.server_api.tiny import CONTEXT

pytestmark = pytest.mark.endpoint("/generate")
PROMPTS = [PROMPT, SHORT, [100, 101, 102], [7] * 40, [*range(3, 120)]]
NEAR = 1e-4


@pytest.fixture(scope="session")
def oracle(folders) -> Oracle:
    return Oracle(folders.a)


def near(server: Wire, message: list, expected: list[float], what: str) -> None:
    """Log-probs in the reply, against those expected; the largest difference is kept for the docs."""
    off = max(abs(entry[0] - value) for entry, value in zip(message, expected, strict=True))
    name = {"miles": "Miles", "sglang": "SGLang"}[server.kind]
    results.measure(f"log-probs of {what}, {name} against transformers", off)
    assert off <= NEAR


def test_greedy_tokens_and_their_log_probs_are_those_of_transformers(server: Wire, oracle: Oracle):
    answers = server.generate(input_ids=PROMPTS, sampling_params=GREEDY | {"ignore_eos": True}, return_logprob=True)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer["output_ids"] == oracle.greedy(prompt, 8)
        reported = answer["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in reported] == answer["output_ids"]
        near(server, reported, oracle.logprobs(prompt, answer["output_ids"]), "greedy tokens")


@pytest.mark.parametrize("how", [{}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_log_probs_of_drawn_tokens_are_scaled_by_temperature_and_not_cut(server: Wire, oracle: Oracle, how: dict):
    params = {"temperature": 0.7, "max_new_tokens": 12, "ignore_eos": True} | how
    answers = server.generate(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        reported, written = answer["meta_info"]["output_token_logprobs"], answer["output_ids"]
        near(server, reported, oracle.logprobs(prompt, written, 0.7), "drawn tokens")


def test_log_probs_of_a_prompt_are_those_of_transformers(server: Wire, oracle: Oracle):
    fields = {"sampling_params": {"max_new_tokens": 0, "temperature": 0.5}, "return_logprob": True}
    for prompt in PROMPTS:
        answer = server.generate(input_ids=prompt, logprob_start_len=0, **fields)
        first, *others = answer["meta_info"]["input_token_logprobs"]
        assert first[0] is None and [entry[1] for entry in (first, *others)] == prompt
        near(server, others, oracle.logprobs(prompt[:1], prompt[1:]), "prompts")


def test_the_likeliest_tokens_come_in_order_and_are_those_of_transformers(server: Wire, oracle: Oracle):
    answer = server.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, top_logprobs_num=4)
    rows = oracle.logits([*PROMPT, *answer["output_ids"]])[len(PROMPT) - 1 : -1].log_softmax(-1)
    for reported, row in zip(answer["meta_info"]["output_top_logprobs"], rows, strict=True):
        best = row.topk(4)
        assert [token for _, token, _ in reported] == best.indices.tolist()
        near(server, reported, best.values.tolist(), "the likeliest tokens")


def test_a_seed_draws_the_same_again_alone_and_among_others(server: Wire):
    params = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 7}
    alone = server.generate(input_ids=PROMPT, sampling_params=params)["output_ids"]
    among = server.generate(input_ids=[SHORT, PROMPT, [9] * 30], sampling_params=params)
    assert among[1]["output_ids"] == alone
    other = server.generate(input_ids=PROMPT, sampling_params=params | {"sampling_seed": 8})["output_ids"]
    assert other != alone


def test_trajectories_at_a_prompt_differ_and_each_is_scored(server: Wire, oracle: Oracle):
    params = {"temperature": 1.0, "max_new_tokens": 12, "n": 4, "ignore_eos": True}
    answers = server.generate(input_ids=PROMPT, sampling_params=params, return_logprob=True)
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 4
    for answer in answers:
        reported = answer["meta_info"]["output_token_logprobs"]
        near(server, reported, oracle.logprobs(PROMPT, answer["output_ids"]), "drawn tokens")


def test_a_repeated_prompt_is_found_in_the_cache_and_answered_alike(server: Wire):
    prompt = [*range(40, 140)]
    first = server.generate(input_ids=prompt, sampling_params=GREEDY)
    again = server.generate(input_ids=prompt, sampling_params=GREEDY)
    assert again["output_ids"] == first["output_ids"]
    assert 64 <= again["meta_info"]["cached_tokens"] < len(prompt)


def test_a_schema_is_followed(server: Wire):
    params = {"temperature": 1.0, "max_new_tokens": 200, "json_schema": json.dumps(PAIR), "n": 4}
    ended = [
        answer
        for answer in server.generate(input_ids=PROMPT, sampling_params=params)
        if answer["meta_info"]["finish_reason"]["type"] == "stop"
    ]
    assert ended
    for answer in ended:
        jsonschema.validate(json.loads(answer["text"]), PAIR)


def test_a_regular_expression_is_followed(server: Wire):
    params = {"temperature": 1.0, "max_new_tokens": 64, "regex": "[a-c]{3}-[0-9]{2}", "n": 4}
    for answer in server.generate(input_ids=PROMPT, sampling_params=params):
        assert re.fullmatch("[a-c]{3}-[0-9]{2}", answer["text"])
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_an_answer_runs_to_the_end_of_the_context_if_nothing_limits_it(server: Wire):
    prompt = [11] * 480
    params = {"temperature": 0, "max_new_tokens": None, "ignore_eos": True}
    answer = server.generate(input_ids=prompt, sampling_params=params)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert CONTEXT - 2 <= len(prompt) + len(answer["output_ids"]) <= CONTEXT


def test_an_answer_carries_what_was_counted(server: Wire):
    reported = server.generate(input_ids=PROMPT, sampling_params=GREEDY)["meta_info"]
    assert (reported["prompt_tokens"], reported["completion_tokens"], reported["num_retractions"]) == (
        len(PROMPT),
        8,
        0,
    )
    assert reported["weight_version"] == "default"
    assert isinstance(reported["e2e_latency"], float) and reported["e2e_latency"] > 0
