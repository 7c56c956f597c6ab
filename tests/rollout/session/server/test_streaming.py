"""Streaming: chunks arrive while the engine still generates, in both official clients; a cancelled stream is undone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from tests.rollout.session.server.live_session_server import ADD, CALL, Hosted, Speaking, hosted, policy_tokens

from miles.rollout.session.server.registry import SessionLimits

QUESTION: Any = {"role": "user", "content": "What is 1 + 2?"}
TOOL: Any = {"type": "function", **ADD["function"]}
SAID = "It is three, sagt der Füchs\u00e9."


@pytest.fixture
def engine(tokenizer):
    return Speaking(tokenizer, lambda text, before: CALL if "# Tools" in text else SAID)


@pytest.fixture
def host(tokenizer, engine):
    with hosted(tokenizer, engine) as made:
        yield made


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)


def chat(url: str, **more: Any) -> Iterator[str]:
    asked: dict[str, Any] = {"model": "any", "messages": [QUESTION], "stream": True, **more}
    for piece in client_of(url).chat.completions.create(**asked):
        yield piece.choices[0].delta.content or ""


def responses(url: str) -> Iterator[str]:
    with client_of(url).responses.stream(model="any", input="What is 1 + 2?") as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                yield event.delta
        assert stream.get_final_response().output_text == SAID


def messages(url: str) -> Iterator[str]:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=30)
    with client.messages.stream(model="any", max_tokens=200, messages=[QUESTION]) as stream:
        yield from stream.text_stream
        assert stream.get_final_message().content[0].text == SAID


@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_words_arrive_while_the_engine_still_writes(
    host: Hosted, engine: Speaking, ask: Callable[[str], Iterator[str]]
):
    url = host.open()
    engine.gate = host.on_loop(asyncio.Event)
    deltas = ask(url)
    first = next(delta for delta in deltas if delta)
    assert SAID.startswith(first) and not engine.wrote, "the engine waits for what this test does next"
    host.on_loop(engine.gate.set)
    rest = list(deltas)
    assert first + "".join(rest) == SAID
    assert policy_tokens(host.trajectory(url)) == engine.wrote


def test_a_stop_string_that_comes_in_tokens_is_never_shown(host: Hosted, engine: Speaking):
    assert "".join(chat(host.open(), stop=["three, s"])) == "It is "
    assert len(engine.wrote) == 1


def test_text_before_a_call_arrives_before_the_call_is_whole(host: Hosted, engine: Speaking):
    url = host.open()
    engine.gate = host.on_loop(asyncio.Event)
    asked: dict[str, Any] = {"model": "any", "messages": [QUESTION], "tools": [ADD], "stream": True}
    pieces = iter(client_of(url).chat.completions.create(**asked))
    text = ""
    while len(text) < len("I add."):
        text += next(pieces).choices[0].delta.content or ""
    assert text == "I add." and not engine.wrote
    host.on_loop(engine.gate.set)
    ends = [piece.choices[0] for piece in pieces]
    calls = [call for end in ends for call in end.delta.tool_calls or ()]
    assert [call.function.arguments for call in calls] == ['{"a": 1, "b": 2}']
    assert ends[-1].finish_reason == "tool_calls" and not any(end.delta.content for end in ends)


def test_log_probs_and_usage_come_with_the_end(host: Hosted, engine: Speaking):
    asked: dict[str, Any] = {"model": "any", "messages": [QUESTION], "stream": True, "logprobs": True}
    pieces = client_of(host.open()).chat.completions.create(**asked, stream_options={"include_usage": True})
    reported = list(pieces)
    lines = [
        line
        for piece in reported
        for choice in piece.choices
        if choice.logprobs
        for line in choice.logprobs.content or ()
    ]
    assert [line.logprob for line in lines] == [-1.0 - i for i in range(len(engine.wrote[0]))]
    assert reported[-1].usage is not None and reported[-1].usage.completion_tokens == len(lines)


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_who_hangs_up_in_the_middle_of_a_stream_leaves_nothing_behind(host: Hosted, engine: Speaking, path: str):
    url = host.open(max_turns=2)
    engine.gate = host.on_loop(asyncio.Event)
    body = {"messages": [QUESTION], "input": "What?", "max_tokens": 200, "stream": True}
    with host.http.stream("POST", f"{url}/v1/{path}", json=body) as response:
        next(line for line in response.iter_lines() if '"I' in line)
    host.until(lambda: engine.cancelled == 1 and host.server.sessions.num_turns == 0)
    session = host.server.sessions.find(url.rpartition("/")[2])
    assert not session.session.num_pending and not session.num_turns and not session.num_tokens
    engine.gate = None
    assert "".join(chat(url)) == SAID and "".join(chat(url)) == SAID
    assert policy_tokens(host.trajectory(url)) == engine.wrote and len(engine.asked) == 3


def test_a_streamed_reply_that_was_cut_cannot_be_extended(host: Hosted, engine: Speaking):
    url = host.open()
    said = "".join(chat(url, max_tokens=5))
    assert SAID.startswith(said) and said
    behind: Any = [QUESTION, {"role": "assistant", "content": said}, QUESTION]
    with pytest.raises(openai.BadRequestError, match="cannot be extended"):
        client_of(url).chat.completions.create(model="any", messages=behind)


def test_a_stream_that_says_nothing_for_long_shows_signs_of_life(tokenizer, engine: Speaking):
    with hosted(tokenizer, engine, limits=SessionLimits(heartbeat_seconds=0.001)) as host:
        engine.gate = host.on_loop(asyncio.Event)
        with host.http.stream(
            "POST", f"{host.open()}/v1/chat/completions", json={"messages": [QUESTION], "stream": True}
        ) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if '"I' in line)
            assert next(line for line in lines if line.startswith(":")) == ": working"
            host.on_loop(engine.gate.set)
            assert [line for line in lines if line][-1] == "data: [DONE]"
