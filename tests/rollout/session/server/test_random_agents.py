"""Random agents over HTTP: appends, retries, edits, cuts, weight updates, streams, hang-ups, in every API's words."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from random import Random
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.rollout.session.server.live_session_server import ADD, CALL, Hosted, Speaking, hosted
from tests.tiers import examples

from miles.rollout.session.server.registry import SessionLimits

SAYINGS = ("Yes.", "the quick brown fox", CALL, "ünï", " spaced ", f"{CALL}\n{CALL}", "")
Conversation = list[dict[str, Any]]


@pytest.fixture(scope="module")
def engine(tokenizer):
    return Speaking(tokenizer, lambda text, before: SAYINGS[Random(before).randrange(len(SAYINGS))])


@pytest.fixture(scope="module")
def host(tokenizer, engine):
    with hosted(tokenizer, engine, limits=SessionLimits(heartbeat_seconds=0.005)) as made:
        yield made


Asked = tuple[str, dict[str, Any]]
"""Where a request goes, and its body."""


def asked_in_chat(messages: Conversation, limit: int) -> Asked:
    return "chat/completions", {"messages": messages, "tools": [ADD], "max_tokens": limit}


def asked_in_responses(messages: Conversation, limit: int) -> Asked:
    items: list[Any] = []
    tools = [{"type": "function", **ADD["function"]}]
    for message in messages:
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **output})
            continue
        if message.get("content"):
            items.append({"role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return "responses", {"input": items, "tools": tools, "max_output_tokens": limit}


def asked_in_messages(messages: Conversation, limit: int) -> Asked:
    tools = [{"name": "add", "description": ADD["function"]["description"]}]
    tools[0]["input_schema"] = ADD["function"]["parameters"]
    expected: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            expected.append({"role": "user", "content": [block]})
            continue
        blocks: list[Any] = [{"type": "text", "text": message["content"]}] if message.get("content") else []
        for call in message.get("tool_calls", ()):
            use = {"id": call["id"], "name": "add", "input": json.loads(call["function"]["arguments"])}
            blocks.append({"type": "tool_use", **use})
        expected.append({"role": message["role"], "content": blocks})
    return "messages", {"messages": expected, "tools": tools, "max_tokens": limit}


def refused(host: Hosted, url: str, response: httpx.Response, messages: Conversation) -> bool:
    """Whether a turn was refused, which it may be only where the agent goes on from words that were cut off.

    It does so unknowingly: where it left out an empty reply it got these words whole, and where it did not, cut off.
    """
    if response.status_code != 400:
        assert response.status_code == 200, response.read()
        return False
    stored = host.server.sessions.find(url.rpartition("/")[2]).session.tree
    cut = [stored[n].messages[0]["content"] for n in range(len(stored)) if stored[n].finish_reason == "length"]
    assert b"cannot be extended" in response.read() and any(said.get("content") in cut for said in messages)
    return True


def hang_up(host: Hosted, engine: Speaking, url: str, messages: Conversation, asked: Asked) -> None:
    """Begin a streamed turn and leave while the engine writes; the engine forgets that it was asked, as all do."""
    path, body = asked
    engine.gate, gone = host.on_loop(asyncio.Event), engine.cancelled
    with host.http.stream("POST", f"{url}/v1/{path}", json=body | {"stream": True}) as response:
        if refused(host, url, response, messages):
            engine.gate = None
            return
        assert next(response.iter_lines())
    host.until(lambda: engine.cancelled > gone and host.server.sessions.num_turns == 0)
    engine.gate = None
    engine.asked.pop()


def behind(reply: dict[str, Any], random: Random) -> Conversation:
    """The reply, and what an agent sends behind it."""
    calls = reply.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": str(random.random())} for call in calls]
    return [reply, *(results or [{"role": "user", "content": f"And {random.random()}?"}])]


def play(host: Hosted, engine: Speaking, url: str, random: Random, turns: int) -> None:
    """An agent that goes on from, asks again, edits or forgets what was said. Replies are read in chat's words."""
    start: Conversation = [{"role": "user", "content": "Begin."}]
    known: list[Conversation] = [start]
    for _ in range(turns):
        messages = random.choice([known[-1], *known])
        if random.random() < 0.15:
            messages = [{"role": "system", "content": f"Sum: {random.random()}"}, *start]
        if random.random() < 0.2:
            engine.version = engine.version.next()
        limit = 4 if random.random() < 0.15 else 400
        ask = random.choice((asked_in_chat, asked_in_responses, asked_in_messages))
        if random.random() < 0.15:
            hang_up(host, engine, url, messages, ask(messages, limit))
            continue
        path, body = ask(messages, limit)
        response = host.http.post(f"{url}/v1/{path}", json=body | {"stream": random.random() < 0.5})
        if refused(host, url, response, messages):
            continue
        if limit == 400:
            stored = host.server.sessions.find(url.rpartition("/")[2]).session.tree
            reply = dict(stored[len(stored) - 1].messages[0])
            known.append([*messages, *behind(reply, random)])


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 8))
def test_every_sampled_token_is_trained_on_once_behind_the_context_it_was_sampled_in(host, engine, seed, turns):
    engine.asked.clear()
    engine.wrote.clear()
    url = host.open()
    play(host, engine, url, Random(seed), turns)
    trained: Counter[tuple[Any, ...]] = Counter()
    for branch in host.trajectory(url)["branches"]:
        before: list[int] = []
        for span in branch["spans"]:
            if span["author"] == "policy":
                places = enumerate(zip(span["tokens"], span["logprobs"], strict=True))
                trained.update((*before, *span["tokens"][:i], token, logprob) for i, (token, logprob) in places)
            before += span["tokens"]
    sampled: Counter[tuple[Any, ...]] = Counter()
    for (context, _), wrote in zip(engine.asked, engine.wrote, strict=True):
        sampled.update((*context, *wrote[: i + 1], -1.0 - i) for i in range(len(wrote)))
    assert trained == sampled
    host.http.delete(url)
