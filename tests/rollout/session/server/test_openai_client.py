"""OpenAI's own client drives an agent through a session; what is trained on is what was sampled."""

import asyncio
from itertools import chain

import openai
import pytest
from tests.rollout.session.server.live_session_server import ADD, CALL, Scripted, all_tokens, hosted, policy_tokens

from miles.rollout.session.server.registry import SessionLimits

QUESTION = {"role": "user", "content": "What is 1 + 2?"}
TOOL = {"type": "function", **ADD["function"]}


def said(text: str, before: int) -> str:
    return CALL if "# Tools" in text and "<tool_response>" not in text else f"It is {before}, the fox says."


@pytest.fixture
def engine(tokenizer):
    return Scripted(tokenizer, said)


@pytest.fixture
def host(tokenizer, engine):
    with hosted(tokenizer, engine) as made:
        yield made


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)


def test_an_agent_with_tools_is_trained_on_exactly_what_was_sampled(host, engine):
    url = host.open()
    client, messages = client_of(url), [QUESTION]
    for _ in range(3):
        message = client.chat.completions.create(model="any", messages=messages, tools=[ADD]).choices[0].message
        messages.append(message)
        if message.tool_calls:
            assert message.tool_calls[0].function.name == "add"
            messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"})
        else:
            messages.append({"role": "user", "content": "Sure?"})
    trajectory = host.trajectory(url)
    assert policy_tokens(trajectory) == [[*chain.from_iterable(engine.wrote)]]
    assert all_tokens(trajectory)[0] == engine.asked[-1][0] + engine.wrote[-1]
    for (earlier, _), wrote, (later, _) in zip(engine.asked, engine.wrote, engine.asked[1:], strict=False):
        assert later[: len(earlier) + len(wrote)] == earlier + wrote


def test_spans_tell_log_probs_versions_and_authors(host, engine):
    url = host.open()
    response = client_of(url).chat.completions.create(model="any", messages=[QUESTION], logprobs=True)
    (branch,) = host.trajectory(url)["branches"]
    assert [span["author"] for span in branch["spans"]] == ["prompt", "policy", "policy"]
    assert [span["version"]["number"] for span in branch["spans"][1:]] == [0, 1]
    logprobs = [x for span in branch["spans"][1:] for x in span["logprobs"]]
    lines = response.choices[0].logprobs.content
    assert [line.logprob for line in lines] == logprobs == [-1.0 - i for i in range(len(logprobs))]
    assert "".join(line.token for line in lines) == response.choices[0].message.content + "<|im_end|>"
    assert response.usage.completion_tokens == len(logprobs) == len(engine.wrote[0])


def test_a_stream_says_what_a_whole_reply_says(host):
    asked = {"model": "any", "messages": [QUESTION], "tools": [ADD]}
    whole = client_of(host.open()).chat.completions.create(**asked)
    url = host.open()
    with client_of(url).chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    ours, theirs = final.choices[0], whole.choices[0]
    assert (ours.message.content, ours.finish_reason) == (theirs.message.content, theirs.finish_reason)
    assert ours.message.tool_calls[0].function.arguments == theirs.message.tool_calls[0].function.arguments
    assert final.usage.total_tokens == whole.usage.total_tokens
    assert len(host.trajectory(url)["branches"]) == 1


def test_signs_of_life_before_a_reply_are_passed_over_by_the_client(tokenizer, engine):
    with hosted(tokenizer, engine, limits=SessionLimits(heartbeat_seconds=0.001)) as host:
        engine.hold = host.on_loop(asyncio.Event)
        pieces = client_of(host.open()).chat.completions.create(model="any", messages=[QUESTION], stream=True)
        host.on_loop(engine.hold.set)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "It is 0, the fox says."


def test_the_same_messages_twice_make_a_branch_and_each_reply_trains_once(host, engine):
    url = host.open()
    client = client_of(url)
    for _ in range(2):
        client.chat.completions.create(model="any", messages=[QUESTION])
    assert engine.asked[0][0] == engine.asked[1][0]
    assert engine.asked[0][1].seed != engine.asked[1][1].seed
    assert policy_tokens(host.trajectory(url)) == engine.wrote


def test_an_edit_makes_a_branch_that_shares_what_stands_before_it(host, engine):
    url = host.open()
    client = client_of(url)
    first = client.chat.completions.create(model="any", messages=[QUESTION]).choices[0].message
    for more in ("Sure?", "Really?"):
        client.chat.completions.create(
            model="any", messages=[QUESTION, first.model_dump(), {"role": "user", "content": more}]
        )
    one, two = host.trajectory(url)["branches"]
    assert policy_tokens({"branches": [one, two]}) == [engine.wrote[0] + engine.wrote[1], engine.wrote[2]]
    assert [span["author"] for span in two["spans"]] == ["prompt", "env", "env", "env", "policy", "policy"]


def test_a_stop_string_ends_what_is_said_and_the_turn_goes_on_behind_it(host, engine):
    url = host.open()
    client = client_of(url)
    first = client.chat.completions.create(model="any", messages=[QUESTION], stop=[", the"]).choices[0]
    assert (first.message.content, first.finish_reason) == ("It is 0", "stop")
    client.chat.completions.create(
        model="any", messages=[QUESTION, first.message, {"role": "user", "content": "Go on."}], stop=[", the"]
    )
    assert policy_tokens(host.trajectory(url)) == [engine.wrote[0] + engine.wrote[1]]


def test_what_looks_like_a_call_is_text_where_no_tool_may_be_called(host, engine):
    url = host.open()
    client = client_of(url)
    asked = {"model": "any", "messages": [QUESTION], "tools": [ADD]}
    response = client.chat.completions.create(**asked, tool_choice="none").choices[0]
    assert response.message.content == CALL and not response.message.tool_calls and response.finish_reason == "stop"
    client.chat.completions.create(**asked)
    assert engine.asked[0][0] == engine.asked[1][0], "the tools stay in the conversation"


def test_a_reply_that_was_cut_cannot_be_extended(host):
    client = client_of(host.open())
    first = client.chat.completions.create(model="any", messages=[QUESTION], max_tokens=3).choices[0]
    assert first.finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="cannot be extended"):
        client.chat.completions.create(
            model="any", messages=[QUESTION, first.message, {"role": "user", "content": "Go on."}]
        )


def test_a_conversation_without_room_is_told_as_agents_know_it(tokenizer, engine):
    with hosted(tokenizer, engine, max_context_len=40) as host:
        client = client_of(host.open())
        response = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
        assert response.usage.total_tokens <= 40
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x" * 60}])
        assert error.value.code == "context_length_exceeded"


def test_responses_go_on_from_the_one_before(host, engine):
    url = host.open()
    client = client_of(url)
    first = client.responses.create(model="any", input="What is 1 + 2?", instructions="Add.", tools=[TOOL])
    (call,) = [item for item in first.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    second = client.responses.create(
        model="any", previous_response_id=first.id, input=[output], instructions="Add.", tools=[TOOL]
    )
    assert second.output_text == "It is 1, the fox says." and second.status == "completed"
    assert policy_tokens(host.trajectory(url)) == [engine.wrote[0] + engine.wrote[1]]


def test_responses_sent_back_as_items_are_the_same_conversation(host, engine):
    url = host.open()
    client = client_of(url)
    items: list = [{"role": "user", "content": "What is 1 + 2?"}]
    first = client.responses.create(model="any", input=items, tools=[TOOL], store=False)
    items += [*first.output, {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "3"}]
    with client.responses.stream(model="any", input=items, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "It is 1, the fox says."
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert policy_tokens(host.trajectory(url)) == [engine.wrote[0] + engine.wrote[1]]


def test_streamed_calls_of_responses_arrive_whole(host):
    with client_of(host.open()).responses.stream(model="any", input="1 + 2?", tools=[TOOL]) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert final.output[1].arguments == '{"a": 1, "b": 2}'


def test_chat_and_responses_of_one_session_are_one_conversation(host, engine):
    url = host.open()
    client = client_of(url)
    first = client.chat.completions.create(model="any", messages=[QUESTION]).choices[0].message.content
    items = [QUESTION, {"role": "assistant", "content": first}, {"role": "user", "content": "Sure?"}]
    client.responses.create(model="any", input=items)
    assert len(host.trajectory(url)["branches"]) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"n": 2}, "one reply"),
        ({"messages": []}, "messages must have at least 1 item"),
        ({"messages": [{"role": "judge", "content": "x"}]}, r"messages\[0\].role"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"temperature": -1}, "temperature is -1"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice would bias"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "no such tool"),
        ({"logit_bias": {"1": 3}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "a client cannot begin a reply"),
        ({"extra_body": {"functions": [{}]}}, "use tools"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(host, engine, change, sentence):
    client = client_of(host.open())
    with pytest.raises(openai.BadRequestError, match=sentence) as error:
        client.chat.completions.create(**{"model": "any", "messages": [QUESTION]} | change)
    assert error.value.type == "invalid_request_error" and not engine.asked
    assert error.value.response.headers["x-should-retry"] == "false"


def test_models_are_listed_and_an_unknown_session_is_not_found(host):
    url = host.open()
    assert [model.id for model in client_of(url).models.list()] == ["policy"]
    assert client_of(url).models.retrieve("org/any").id == "org/any"
    with pytest.raises(openai.NotFoundError, match="There is no session"):
        client_of(f"{host.url}/sessions/none").models.list()
