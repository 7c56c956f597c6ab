"""Routed experts of a mixture: which, for which tokens, and how they are written."""

import base64

import numpy as np
import pytest
from tests.server_api.exchanges import GREEDY, PROMPT, SHORT
from tests.server_api.live_servers import Wire
from tests.server_api.oracle import Oracle
from tests.server_api.tiny import EXPERTS, SIZES

pytestmark = pytest.mark.endpoint("/generate")
LAYERS, EACH = SIZES["num_hidden_layers"], EXPERTS["num_experts_per_tok"]
ASKED = {"sampling_params": GREEDY | {"ignore_eos": True}, "return_routed_experts": True}


def experts_of(answer: dict) -> np.ndarray:
    reported = base64.b64decode(answer["meta_info"]["routed_experts"])
    return np.frombuffer(reported, np.int32).reshape(-1, LAYERS, EACH)


def test_the_experts_of_prompt_and_answer_are_those_of_transformers(expert_server: Wire, folders):
    oracle = Oracle(folders.experts)
    for prompt, answer in zip([PROMPT, SHORT], expert_server.generate(input_ids=[PROMPT, SHORT], **ASKED), strict=True):
        assert answer["output_ids"] == oracle.greedy(prompt, 8)
        sequence = [*prompt, *answer["output_ids"]][:-1]
        expected = oracle.experts(sequence, EACH).numpy()
        assert np.array_equal(np.sort(experts_of(answer)), np.sort(expected))


def test_a_prompt_found_in_the_cache_has_its_experts_too(expert_server: Wire):
    prompt = [*range(40, 140)]
    first, again = (experts_of(expert_server.generate(input_ids=prompt, **ASKED)) for _ in range(2))
    assert len(first) == len(prompt) + 7 and np.array_equal(np.sort(first), np.sort(again))


def test_experts_can_begin_behind_the_prompt(expert_server: Wire):
    whole = experts_of(expert_server.generate(input_ids=PROMPT, **ASKED))
    cut = experts_of(expert_server.generate(input_ids=PROMPT, **ASKED, routed_experts_start_len=len(PROMPT)))
    assert np.array_equal(whole[len(PROMPT) :], cut)


def test_experts_from_beyond_the_prompt_are_refused(expert_server: Wire):
    body = {"input_ids": PROMPT, **ASKED, "routed_experts_start_len": len(PROMPT) + 1}
    assert expert_server.post("/generate", body).status_code == 400


def test_a_stream_carries_experts_in_its_last_event(expert_server: Wire):
    *before, last = expert_server.events("/generate", input_ids=PROMPT, **ASKED)
    assert "routed_experts" in last["meta_info"]
    assert not any("routed_experts" in event["meta_info"] for event in before)


def test_experts_come_only_if_asked_for(expert_server: Wire):
    answer = expert_server.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert "routed_experts" not in answer["meta_info"]


@pytest.mark.endpoint("/v1/chat/completions")
def test_a_chat_carries_experts_beside_its_choices(expert_server: Wire):
    messages = [{"role": "user", "content": "the fox"}]
    reported = expert_server.ok(
        "/v1/chat/completions", model="tiny", messages=messages, max_tokens=3, return_routed_experts=True
    )
    rows = np.frombuffer(base64.b64decode(reported["sglext"]["routed_experts"]), np.int32).reshape(-1, LAYERS, EACH)
    assert len(rows) == reported["usage"]["total_tokens"] - 1
