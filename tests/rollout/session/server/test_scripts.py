"""Random agents over HTTP: appends, retries, edits, new openings, cuts, weight updates, in every API's words."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.rollout.session.server.hosted import ADD, CALL, Hosted, Scripted, hosted

SAYINGS = ("Yes.", "the quick brown fox", CALL, "ünï", " spaced ", f"{CALL}\n{CALL}", "")
Conversation = list[dict[str, Any]]


@pytest.fixture(scope="module")
def engine(tokenizer):
    return Scripted(tokenizer, lambda text, before: SAYINGS[Random(before).randrange(len(SAYINGS))])


@pytest.fixture(scope="module")
def host(tokenizer, engine):
    with hosted(tokenizer, engine) as made:
        yield made


def asked_in_chat(http: httpx.Client, url: str, messages: Conversation, limit: int) -> httpx.Response:
    return http.post(f"{url}/v1/chat/completions", json={"messages": messages, "tools": [ADD], "max_tokens": limit})


def asked_in_responses(http: httpx.Client, url: str, messages: Conversation, limit: int) -> httpx.Response:
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
    return http.post(f"{url}/v1/responses", json={"input": items, "tools": tools, "max_output_tokens": limit})


def asked_in_messages(http: httpx.Client, url: str, messages: Conversation, limit: int) -> httpx.Response:
    tools = [{"name": "add", "description": ADD["function"]["description"]}]
    tools[0]["input_schema"] = ADD["function"]["parameters"]
    told: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            told.append({"role": "user", "content": [block]})
            continue
        blocks: list[Any] = [{"type": "text", "text": message["content"]}] if message.get("content") else []
        for call in message.get("tool_calls", ()):
            use = {"id": call["id"], "name": "add", "input": json.loads(call["function"]["arguments"])}
            blocks.append({"type": "tool_use", **use})
        told.append({"role": message["role"], "content": blocks})
    return http.post(f"{url}/v1/messages", json={"messages": told, "tools": tools, "max_tokens": limit})


def behind(reply: dict[str, Any], random: Random) -> Conversation:
    """The reply, and what an agent sends behind it."""
    calls = reply.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": str(random.random())} for call in calls]
    return [reply, *(results or [{"role": "user", "content": f"And {random.random()}?"}])]


def play(host: Hosted, engine: Scripted, url: str, random: Random, turns: int) -> None:
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
        response = ask(host.http, url, messages, limit)
        assert response.status_code == 200, response.text
        if limit == 400:
            stored = host.server.sessions.find(url.rpartition("/")[2]).session.tree
            reply = dict(stored[len(stored) - 1].messages[0])
            known.append([*messages, *behind(reply, random)])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
