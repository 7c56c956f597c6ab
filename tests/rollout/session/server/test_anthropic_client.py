"""Anthropic's own client drives an agent through a session; what is trained on is what was sampled."""

import asyncio
from itertools import chain

import pytest
from tests.rollout.session.server.live_session_server import ADD, CALL, Scripted, all_tokens, hosted, policy_tokens

from miles.rollout.session.server.registry import SessionLimits

anthropic = pytest.importorskip("anthropic")

TOOL = {"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]}
QUESTION = {"role": "user", "content": "What is 1 + 2?"}
ASKED = {"model": "any", "max_tokens": 200, "system": "Be brief.", "tools": [TOOL]}


def said(text: str, before: int) -> str:
    return CALL if "<tool_response>" not in text else f"It is {before}, the fox says."


@pytest.fixture
def engine(tokenizer):
    return Scripted(tokenizer, said)


@pytest.fixture
def host(tokenizer, engine):
    with hosted(tokenizer, engine) as made:
        yield made


def client_of(url: str):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=30)


def results(message) -> dict:
    blocks = [
        {"type": "tool_result", "tool_use_id": b.id, "content": "3"} for b in message.content if b.type == "tool_use"
    ]
    return {"role": "user", "content": blocks}


def test_an_agent_with_tools_is_trained_on_exactly_what_was_sampled(host, engine):
    url = host.open()
    client, messages = client_of(url), [QUESTION]
    first = client.messages.create(**ASKED, messages=messages)
    assert first.stop_reason == "tool_use" and first.content[1].input == {"a": 1, "b": 2}
    messages += [{"role": "assistant", "content": first.content}, results(first)]
    second = client.messages.create(**ASKED, messages=messages)
    assert (second.content[0].text, second.stop_reason) == ("It is 1, the fox says.", "end_turn")
    messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "Sure?"}]
    client.messages.create(**ASKED, messages=messages)
    trajectory = host.trajectory(url)
    assert policy_tokens(trajectory) == [[*chain.from_iterable(engine.wrote)]]
    assert all_tokens(trajectory)[0] == engine.asked[-1][0] + engine.wrote[-1]
    assert first.usage.output_tokens == len(engine.wrote[0])


def test_a_stream_says_what_a_whole_reply_says_and_is_one_conversation_with_it(host, engine):
    url = host.open()
    client = client_of(url)
    with client.messages.stream(**ASKED, messages=[QUESTION]) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_message()
    assert [block.type for block in first.content] == ["text", "tool_use"]
    assert first.content[1].input == {"a": 1, "b": 2} and first.stop_reason == "tool_use"
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    messages = [QUESTION, {"role": "assistant", "content": first.content}, results(first)]
    with client.messages.stream(**ASKED, messages=messages) as stream:
        assert "".join(stream.text_stream) == "It is 1, the fox says."
    assert policy_tokens(host.trajectory(url)) == [engine.wrote[0] + engine.wrote[1]]


def test_signs_of_life_before_a_reply_are_passed_over_by_the_client(tokenizer, engine):
    with hosted(tokenizer, engine, limits=SessionLimits(heartbeat_seconds=0.001)) as host:
        engine.hold = host.on_loop(asyncio.Event)
        events = client_of(host.open()).messages.create(**ASKED, messages=[QUESTION], stream=True)
        host.on_loop(engine.hold.set)
        kinds = [event.type for event in events]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_a_retry_and_an_edit_are_branches(host, engine):
    url = host.open()
    client = client_of(url)
    for system in ("Be brief.", "Be brief.", "Be long."):
        client.messages.create(**ASKED | {"system": system}, messages=[QUESTION])
    assert policy_tokens(host.trajectory(url)) == engine.wrote


def test_a_stop_sequence_is_named(host):
    response = client_of(host.open()).messages.create(**ASKED, messages=[QUESTION], stop_sequences=["dd"])
    assert (response.content[0].text, response.stop_reason, response.stop_sequence) == ("I a", "stop_sequence", "dd")


def test_tokens_are_counted_as_the_engine_would_read_them(host, engine):
    url = host.open()
    client = client_of(url)
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    counted = client.messages.count_tokens(**asked, messages=[QUESTION]).input_tokens
    client.messages.create(**ASKED, messages=[QUESTION])
    assert counted == len(engine.asked[0][0])


def test_one_session_may_be_spoken_to_in_both_ways(host, engine):
    url = host.open()
    first = client_of(url).messages.create(model="any", max_tokens=100, messages=[QUESTION])
    messages = [QUESTION, {"role": "assistant", "content": first.content[0].text}, {"role": "user", "content": "Sure?"}]
    response = host.http.post(f"{url}/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200
    assert len(host.trajectory(url)["branches"]) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"messages": []}, "messages must have at least 1 item"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only Anthropic can run"),
        ({"tool_choice": {"type": "tool", "name": "sub"}}, "no such tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice would bias"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            r"messages\[0\].content has a block of type",
        ),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"extra_body": {"output_format": {"type": "json_schema"}}}, "output_format would bias"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(host, engine, change, sentence):
    with pytest.raises(anthropic.BadRequestError, match=sentence) as error:
        client_of(host.open()).messages.create(**ASKED | {"messages": [QUESTION]} | change)
    assert error.value.body["type"] == "error" and error.value.body["error"]["type"] == "invalid_request_error"
    assert not engine.asked


def test_a_key_is_asked_for_in_either_header(tokenizer, engine):
    with hosted(tokenizer, engine, api_key="secret") as host:
        url = host.http.post("/sessions", headers={"Authorization": "Bearer secret"}).json()["anthropic_base_url"]
        good = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)
        assert good.messages.create(**ASKED, messages=[QUESTION]).role == "assistant"
        with pytest.raises(anthropic.AuthenticationError, match="key is missing or wrong"):
            client_of(url).messages.create(**ASKED, messages=[QUESTION])
