"""A stream says in the end what the whole answer says, and on its way never takes anything back."""

from itertools import pairwise

import pytest
from tests.server_api.exchange import differences, steady
from tests.server_api.exchanges import GREEDY, PROMPT, SHORT
from tests.server_api.live_servers import Wire
from tests.server_api.openai_exchanges import MESSAGES

CHAT = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
TEXT = {"model": "tiny", "prompt": "the quick brown fox", "temperature": 0, "max_tokens": 12}


@pytest.mark.endpoint("/generate")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [4]},
        {"sampling_params": GREEDY | {"stop": [" f"]}, "return_logprob": True},
        {"sampling_params": GREEDY | {"max_new_tokens": 1}},
    ],
    ids=["tokens", "log-probs", "a stop string", "one token"],
)
def test_a_stream_ends_with_the_whole_answer(server: Wire, fields: dict):
    body = {"input_ids": PROMPT, "sampling_params": GREEDY} | fields
    whole = server.generate(**body)
    *_, last = server.events("/generate", **body)
    assert not differences(steady(last), steady(whole))


@pytest.mark.endpoint("/generate")
def test_every_event_of_a_stream_holds_all_that_came_before(server: Wire):
    events = server.events("/generate", input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)
    assert len(events) > 1
    for before, after in pairwise(events):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        lines = [event["meta_info"]["output_token_logprobs"] for event in (before, after)]
        assert lines[1][: len(lines[0])] == lines[0]
        assert len(before["meta_info"]["output_token_logprobs"]) == before["meta_info"]["completion_tokens"]
        assert before["meta_info"]["finish_reason"] is None
        assert after["text"].startswith(before["text"].rstrip("�"))


@pytest.mark.endpoint("/generate")
def test_the_events_of_a_batch_say_whose_they_are(server: Wire):
    body = {"input_ids": [PROMPT, SHORT], "sampling_params": GREEDY}
    whole = server.generate(**body)
    events = server.events("/generate", **body)
    for index, answer in enumerate(whole):
        *_, last = [event for event in events if event["index"] == index]
        assert last["output_ids"] == answer["output_ids"] and last["meta_info"]["finish_reason"] is not None


@pytest.mark.endpoint("/generate")
def test_trajectories_are_streamed_side_by_side(server: Wire):
    params = {"temperature": 1.0, "max_new_tokens": 5, "n": 3, "ignore_eos": True}
    events = server.events("/generate", input_ids=PROMPT, sampling_params=params)
    ends = {event["index"]: event["output_ids"] for event in events if event["meta_info"]["finish_reason"]}
    assert sorted(ends) == [0, 1, 2] and all(len(tokens) == 5 for tokens in ends.values())


@pytest.mark.endpoint("/generate")
def test_a_client_that_hangs_up_leaves_nothing_behind(server: Wire):
    params = {"temperature": 0, "max_new_tokens": 480, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params, "stream": True}
    with server.http.stream("POST", "/generate", json=body) as response:
        assert next(response.iter_lines()).startswith("data: ")
    server.until(lambda: not server.busy())


@pytest.mark.endpoint("/v1/chat/completions")
def test_the_pieces_of_a_chat_make_up_the_whole(server: Wire):
    whole = server.ok("/v1/chat/completions", **CHAT)
    events = server.events("/v1/chat/completions", **CHAT)
    assert {event["object"] for event in events} == {"chat.completion.chunk"} and len({e["id"] for e in events}) == 1
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["choices"][0]["message"]["content"]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert set(reasons[:-1]) == {None} and reasons[-1] == whole["choices"][0]["finish_reason"]


@pytest.mark.endpoint("/v1/chat/completions")
def test_the_usage_of_a_streamed_chat_comes_last_if_asked_for(server: Wire):
    usage = server.ok("/v1/chat/completions", **CHAT)["usage"]
    *_, last = server.events("/v1/chat/completions", **CHAT, stream_options={"include_usage": True})
    assert last["choices"] == [] and {name: last["usage"][name] for name in usage} == usage


@pytest.mark.endpoint("/v1/chat/completions")
def test_the_log_probs_of_a_streamed_chat_make_up_the_whole(server: Wire):
    asked = CHAT | {"logprobs": True, "top_logprobs": 2}
    whole = server.ok("/v1/chat/completions", **asked)["choices"][0]["logprobs"]["content"]
    reported = [event["choices"][0]["logprobs"] for event in server.events("/v1/chat/completions", **asked)]
    pieces = [line for lines in reported if lines for line in lines["content"]]
    assert not differences(steady(pieces), steady(whole))


@pytest.mark.endpoint("/v1/chat/completions")
def test_choices_of_a_streamed_chat_each_come_to_an_end(server: Wire):
    asked = CHAT | {"n": 2, "temperature": 1.0}
    events = server.events("/v1/chat/completions", **asked)
    ends = [event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1]


@pytest.mark.endpoint("/v1/completions")
def test_the_pieces_of_a_completion_make_up_the_whole(server: Wire):
    whole = server.ok("/v1/completions", **TEXT, logprobs=1)["choices"][0]
    events = server.events("/v1/completions", **TEXT, logprobs=1, stream_options={"include_usage": True})
    *pieces, last = events
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    choices = [event["choices"][0] for event in pieces]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    reported = [line for choice in choices if choice["logprobs"] for line in choice["logprobs"]["token_logprobs"]]
    assert not differences(steady(reported), steady(whole["logprobs"]["token_logprobs"]))
