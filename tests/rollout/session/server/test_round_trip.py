"""Round trip: a reply in each API's format, sent back, is read as the stored message."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.session.server.live_session_server import ADD

from miles.core.protocols import Completion
from miles.core.types import Status
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.output_parser import ParsedOutput
from miles.rollout.serving.tool_parsers import ToolCall
from miles.rollout.session.match import loose_tool_call, strict
from miles.rollout.session.server.chat import ChatChunks, format_chat, parse_chat
from miles.rollout.session.server.deltas import StreamFormatter
from miles.rollout.session.server.messages import AnthropicEvents, format_anthropic, parse_anthropic
from miles.rollout.session.server.responses import ResponseEcho, ResponseEvents, format_response, parse_responses
from miles.rollout.session.server.types import TurnRequest, TurnResult

USER = {"role": "user", "content": "go"}
ASK = TurnRequest(messages=(USER,))
ECHO = ResponseEcho(fields={}, history=(USER,), store=True)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
arguments = st.one_of(
    st.dictionaries(words, st.one_of(st.integers(), words, st.none()), max_size=2).map(json.dumps),
    st.sampled_from(["", "{", "[1]", '"x"', "not json", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}']),
)
moments = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=6)
calls = st.lists(st.tuples(st.sampled_from(["add", "look_up"]), arguments), max_size=3)


def told_of(content: str, reasoning: str, called: list[tuple[str, str]]) -> TurnResult:
    return TurnResult(
        id="1",
        created=0,
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(ToolCall(id=f"c{i}", name=name, arguments=text) for i, (name, text) in enumerate(called)),
        finish_reason="tool_calls" if called else "stop",
        matched_stop=None,
        context=np.zeros(3, np.int32),
        completion=Completion(spans=(), status=Status.COMPLETED, finish_reason="stop"),
    )


def streamed(formatter: StreamFormatter, expected: TurnResult, cuts: list[tuple[int, int]]) -> list[dict]:
    """Stream a turn in pieces that end at the given places of its reasoning and content."""
    found, thought, said = [], 0, 0
    for more, further in cuts:
        # Words begin when the thoughts have ended.
        thought = min(thought + more, len(expected.reasoning))
        said = min(said + further, len(expected.content)) if thought == len(expected.reasoning) else 0
        found += formatter.format_delta(
            ParsedOutput(reasoning=expected.reasoning[:thought], content=expected.content[:said])
        )
    return [*found, *formatter.format_end(expected)]


def no_past(id: str) -> tuple:
    raise AssertionError(id)


@settings(deadline=None)
@given(words, words, calls)
def test_a_chat_reply_sent_back_is_the_stored_message(content, reasoning, called):
    reported = told_of(content, reasoning, called)
    message = json.loads(json.dumps(format_chat(reported, ASK)["choices"][0]["message"]))
    back = parse_chat({"messages": [USER, message, USER]}).messages[1]
    assert strict(reported.message, back)


@settings(deadline=None)
@given(words, words, calls, moments)
def test_a_chat_stream_adds_up_to_the_reply(content, reasoning, called, cuts):
    reported = told_of(content, reasoning, called)
    deltas = [piece["choices"][0]["delta"] for piece in streamed(ChatChunks(reported, ASK), reported, cuts)]
    assert deltas[0] == {"role": "assistant", "content": ""} and all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == reasoning
    assert [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())] == [
        text for _, text in called
    ]


@settings(deadline=None)
@given(words, words, calls)
def test_anthropic_blocks_sent_back_are_the_stored_message(content, reasoning, called):
    reported = told_of(content, reasoning, called)
    blocks = json.loads(json.dumps(format_anthropic(reported, ASK)["content"]))
    body = {"max_tokens": 1, "messages": [USER, {"role": "assistant", "content": blocks}, USER]}
    assert loose_tool_call(reported.message, parse_anthropic(body).messages[1])


@settings(deadline=None)
@given(words, words, calls, moments)
def test_anthropic_events_add_up_to_the_blocks(content, reasoning, called, cuts):
    reported = told_of(content, reasoning, called)
    blocks: list[dict] = []
    partial, opened = "", False
    for event in streamed(AnthropicEvents(reported, ASK), reported, cuts):
        if event["type"] == "content_block_start":
            assert not opened and event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            partial, opened = "", True
        elif event["type"] == "content_block_stop":
            assert opened and event["index"] == len(blocks) - 1
            opened = False
        elif event["type"] == "content_block_delta":
            assert opened and event["index"] == len(blocks) - 1
            delta = event["delta"]
            kind = delta["type"].removesuffix("_delta")
            if kind == "input_json":
                partial += delta["partial_json"]
                blocks[-1]["input"] = json.loads(partial)
            else:
                blocks[-1][kind] += delta[kind]
    assert blocks == format_anthropic(reported, ASK)["content"] and not opened


@settings(deadline=None)
@given(words, words, calls)
def test_response_items_sent_back_are_the_stored_message(content, reasoning, called):
    reported = told_of(content, reasoning, called)
    items = json.loads(json.dumps(format_response(reported, ASK, ECHO)["output"]))
    ask, _ = parse_responses({"input": [USER, *items, USER]}, no_past)
    assert len(ask.messages) == 3
    assert strict(reported.message, ask.messages[1])


@settings(deadline=None)
@given(words, words, calls, moments)
def test_response_events_end_with_the_response(content, reasoning, called, cuts):
    reported = told_of(content, reasoning, called)
    events = streamed(ResponseEvents(reported, ASK, ECHO), reported, cuts)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == format_response(reported, ASK, ECHO)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for index, item in enumerate(done):
        grown = [event for event in events if event["type"].endswith(".delta") and event["output_index"] == index]
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in grown) == whole


def test_media_travel_untouched():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}, "detail": "high"}
    content = [{"type": "text", "text": "look"}, image]
    assert parse_chat({"messages": [{"role": "user", "content": content}]}).messages[0]["content"] == content


def test_images_of_every_api_become_the_same_part():
    url = "data:image/png;base64,AA=="
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    theirs = parse_anthropic(
        {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    )
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    ours, _ = parse_responses({"input": [item]}, no_past)
    part = {"type": "image_url", "image_url": {"url": url}}
    assert theirs.messages[0]["content"] == ours.messages[0]["content"] == [part]


def test_tools_of_every_api_become_the_same_tool():
    function = ADD["function"]
    theirs = {"name": "add", "description": function["description"], "input_schema": function["parameters"]}
    responses, _ = parse_responses({"input": "x", "tools": [{"type": "function", **function}]}, no_past)
    anthropic = parse_anthropic({"max_tokens": 1, "messages": [USER], "tools": [theirs]})
    chat = parse_chat({"messages": [USER], "tools": [ADD]})
    assert list(chat.tools) == list(responses.tools) == list(anthropic.tools) == [ADD]


def test_results_of_tools_stand_before_what_the_user_says_behind_them():
    blocks = [
        {"type": "tool_result", "tool_use_id": "c0", "content": [{"type": "text", "text": "3"}]},
        {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": "no"},
        {"type": "text", "text": "go "},
        {"type": "text", "text": "on"},
    ]
    body = {
        "max_tokens": 1,
        "system": [{"type": "text", "text": "s"}],
        "messages": [{"role": "user", "content": blocks}],
    }
    assert list(parse_anthropic(body).messages) == [
        {"role": "system", "content": "s"},
        {"role": "tool", "tool_call_id": "c0", "content": "3"},
        {"role": "tool", "tool_call_id": "c1", "content": "no"},
        {"role": "user", "content": "go on"},
    ]


def test_two_turns_of_the_assistant_in_a_row_stay_two():
    items = [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, USER]
    ask, _ = parse_responses({"input": items}, no_past)
    assert [message["content"] for message in ask.messages] == ["go", "a", "b", "go"]


def test_a_developer_is_a_system_to_templates():
    assert parse_chat({"messages": [{"role": "developer", "content": "d"}, USER]}).messages[0]["role"] == "system"


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(-2, 2), words, st.just("text"), st.just("user")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "function", "id"]), inner, max_size=4
        ),
    ),
    max_leaves=8,
)
names = ["messages", "input", "tools", "tool_choice", "stop", "temperature", "max_tokens", "system", "thinking"]
names += ["stream_options", "response_format", "text", "reasoning", "stop_sequences", "chat_template_kwargs", "n"]


@pytest.mark.parametrize("read", [parse_chat, parse_anthropic, lambda body: parse_responses(body, no_past)])
@settings(deadline=None)
@given(st.one_of(json_values, st.dictionaries(st.sampled_from(names), json_values, max_size=5)))
def test_any_json_is_read_or_refused_in_a_sentence(read, body):
    try:
        read(body)
    except RequestError as refusal:
        assert str(refusal).endswith(".") and refusal.status == 400
