"""The server's own conduct: limits, deadlines, clients that leave, keys, held sampling, and how it ends."""

import asyncio
import logging

import aiohttp
import httpx
import pytest
from tests.rollout.session.server.live_session_server import ADD, Scripted, hosted, policy_tokens

from miles.core.errors import EngineError, UsageError
from miles.core.protocols import SamplingParams
from miles.core.types import Prompt
from miles.rollout.generate.agent import AgentGenerate
from miles.rollout.serving.http import find_own_address
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.session.server.app import SessionServer
from miles.rollout.session.server.local_client import LocalSessions
from miles.rollout.session.server.registry import SessionLimits

ASKED = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def engine(tokenizer):
    return Scripted(tokenizer, lambda text, before: f"Reply {before}.")


def chat(host, url, **more) -> httpx.Response:
    return host.http.post(f"{url}/v1/chat/completions", json=ASKED | more)


async def leave(url: str, engine: Scripted, **more: object) -> None:
    """Ask, and hang up once the engine is at work."""
    async with aiohttp.ClientSession() as client:
        asking = asyncio.ensure_future(client.post(f"{url}/v1/chat/completions", json=ASKED | more))
        while not engine.asked:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.wait((asking,))


# -- sessions -------------------------------------------------------------------------------


def test_a_session_says_what_it_is_and_ends_when_it_is_deleted(tokenizer, engine):
    with hosted(tokenizer, engine, sampling=SamplingParams(max_new_tokens=50)) as host:
        url = host.open(
            id="mine",
            metadata={"task": 3},
            visible_metadata=["task"],
            sampling={"temperature": 0.5},
            match="strict",
            max_turns=4,
        )
        assert chat(host, url).status_code == 200
        response = host.http.get(url).json()
        assert (response["id"], response["metadata"], response["match"]) == ("mine", {"task": 3}, "strict")
        assert response["sampling"]["temperature"] == 0.5 and response["sampling"]["max_new_tokens"] == 50
        assert (response["turns"], response["branches"], response["status"]) == (1, 1, "completed")
        assert response["tokens"] == len(engine.wrote[0]) and response["base_url"] == f"{url}/v1"
        assert host.http.delete(url).json() == {"id": "mine", "object": "session", "deleted": True}
        assert host.http.get(url).status_code == chat(host, url).status_code == 404


def test_a_prompt_that_nobody_answered_is_still_a_trajectory_and_nothing_at_all_is_none(tokenizer, engine):
    with hosted(tokenizer, engine) as host:
        url = host.open(prompt={"messages": ASKED["messages"], "id": 7, "label": "x"})
        trajectory = host.trajectory(url)
        assert [span["author"] for span in trajectory["branches"][0]["spans"]] == ["prompt"]
        assert trajectory["status"] == "failed"
        assert host.http.get(f"{host.open()}/trajectory").status_code == 409


@pytest.mark.parametrize(
    "body",
    [
        {"sample": {}},
        {"match": "roughly"},
        {"sampling": {"heat": 1}},
        {"id": "a/b"},
        {"visible_metadata": ["task"]},
        {"max_turns": 0},
        {"prompt": {}},
        [],
    ],
)
def test_terms_that_make_no_sense_are_refused(tokenizer, engine, body):
    with hosted(tokenizer, engine) as host:
        response = host.http.post("/sessions", json=body)
        assert response.status_code == 400 and response.json()["error"]["message"].endswith(".")


def test_sessions_are_bounded_and_one_long_unused_makes_room(tokenizer, engine):
    now = [0.0]
    with hosted(tokenizer, engine, limits=SessionLimits(sessions=2, idle_seconds=10), clock=lambda: now[0]) as host:
        old, young = host.open(), host.open()
        refused = host.http.post("/sessions")
        assert refused.status_code == 429 and refused.headers["x-should-retry"] == "true"
        now[0] = 9.0
        assert host.http.get(young).status_code == 200
        now[0] = 11.0
        new = host.open()
        assert [host.http.get(url).status_code for url in (old, young, new)] == [404, 200, 200]


def test_sessions_of_the_run_are_the_runs_to_bound(tokenizer, engine):
    now = [0.0]
    with hosted(tokenizer, engine, limits=SessionLimits(sessions=1, idle_seconds=10), clock=lambda: now[0]) as host:
        held = [host.on_loop(lambda: host.server.open(engine, SamplingParams())) for _ in range(3)]
        first = host.open()
        now[0] = 100.0
        host.open()
        assert host.http.get(first).status_code == 404
        assert [entry.closed for entry in held] == [False] * 3


def test_whatever_json_is_visible_metadata_comes_back(tokenizer, engine):
    metadata = {"large": 10**40, "deep": [[{"x": None}]], "text": "ü"}
    with hosted(tokenizer, engine) as host:
        assert (
            host.http.get(host.open(metadata=metadata, visible_metadata=list(metadata))).json()["metadata"] == metadata
        )


def test_turns_and_tokens_of_a_session_are_bounded(tokenizer, engine):
    with hosted(tokenizer, engine) as host:
        url = host.open(max_turns=2)
        assert [chat(host, url).status_code for _ in range(3)] == [200, 200, 400]
        url = host.open(max_tokens=12)
        replies = [chat(host, url) for _ in range(3)]
        written = [reply.json()["usage"]["completion_tokens"] for reply in replies[:2]]
        assert sum(written) == 12 and replies[1].json()["choices"][0]["finish_reason"] == "length"
        assert replies[2].json()["error"]["code"] == "token_limit"


# -- secrets --------------------------------------------------------------------------------


def test_a_session_is_found_by_its_secret_and_not_by_its_name(tokenizer, engine):
    with hosted(tokenizer, engine) as host:
        first, second = host.open(id="3-0-1a"), host.open(id="3-0-1a")
        assert first != second and "3-0-1a" not in first
        keys = [url.rpartition("/")[2] for url in (first, second)]
        assert all(len(key) >= 43 for key in keys)
        for guess in ("3-0-1a", keys[0][:-1], keys[0] + "a", keys[0].swapcase()):
            url = f"{host.url}/sessions/{guess}"
            answers = [host.http.get(url), host.http.get(f"{url}/trajectory"), chat(host, url), host.http.delete(url)]
            assert [answer.status_code for answer in answers] == [404] * 4
            assert not any(key in answer.text for answer in answers for key in keys)
        assert chat(host, first).status_code == 200
        assert [host.http.get(url).json()["turns"] for url in (first, second)] == [1, 0]
    seeds = {sampling.seed for _, sampling in engine.asked}
    assert len(seeds) == 1


def test_an_agent_sees_neither_label_nor_metadata(tokenizer, engine):
    hidden = {"messages": ASKED["messages"], "label": "assert label_of(1)", "metadata": {"test": "assert f(2)"}}
    with hosted(tokenizer, engine) as host:
        url = host.open(prompt=hidden, metadata={"tests": "assert g(3)", "task": 7}, visible_metadata=["task"])
        reply = chat(host, url)
        shown = [reply, host.http.get(url), host.http.get(f"{url}/trajectory"), host.http.get(f"{url}/v1/models")]
        assert "assert" not in "".join(answer.text for answer in shown)
        assert shown[1].json()["metadata"] == {"task": 7} and shown[2].json()["metadata"]["task"] == 7


@pytest.mark.parametrize("raises", [False, True])
def test_an_agent_of_a_run_leaves_no_secret_in_its_trajectory(tokenizer, raises):
    engine = Scripted(tokenizer, lambda text, before: "Always.")
    prompt = Prompt(id=3, messages=tuple(ASKED["messages"]), label="l4bel", metadata={"test": "t3st"})
    urls, shown = [], []

    async def agent(base_url, prompt, request_kwargs, metadata, session_id):
        urls.append(base_url)
        async with httpx.AsyncClient() as client:
            (await client.post(f"{base_url}/v1/chat/completions", json=ASKED)).raise_for_status()
            shown.extend([(await client.get(base_url)).text, (await client.get(f"{base_url}/trajectory")).text])
            others = [await client.get(base_url.replace(base_url.rpartition("/")[2], session_id))]
            assert [other.status_code for other in others] == [404]
            if raises:
                (await client.get(f"{base_url}/missing")).raise_for_status()
        return {"reward": 1.0, "log": [f"used {base_url}"], "at": {"url": base_url}}

    with hosted(tokenizer, engine) as host:
        generate = AgentGenerate(agent, LocalSessions(host.server))
        trajectories = [host.call(generate(prompt, engine, SamplingParams(seed=26))) for _ in range(2)]
    assert urls[0] != urls[1] and not any(word in text for text in shown for word in ("l4bel", "t3st"))
    first, second = (repr(trajectory) for trajectory in trajectories)
    assert first == second, "the secret differs, the trajectory does not"
    assert all(url.rpartition("/")[2] not in first for url in urls) and "sessions/3-0-1a" in first


# -- drawing --------------------------------------------------------------------------------


def test_a_held_session_draws_as_the_run_says_and_names_what_it_passes_over(tokenizer, engine):
    run = SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=20, stop=("END",), seed=5)
    with hosted(tokenizer, engine, sampling=run, hold=True) as host:
        said = {"temperature": 0, "top_p": 0.9, "seed": 1, "max_tokens": 9, "stop": "x", "tools": [ADD]}
        response = chat(host, host.open(), **said, tool_choice="required", frequency_penalty=1)
        drawn = engine.asked[0][1]
        assert (drawn.temperature, drawn.top_p, drawn.max_new_tokens, drawn.stop) == (0.8, 0.9, 9, ("END", "x"))
        assert response.headers["x-miles-unused"] == "temperature, seed, tool_choice, frequency_penalty"


def test_a_session_that_is_not_held_draws_as_it_is_asked(tokenizer, engine):
    with hosted(tokenizer, engine, sampling=SamplingParams(max_new_tokens=20)) as host:
        response = chat(host, host.open(), temperature=0.3, top_k=5, seed=11, max_tokens=500)
        drawn = engine.asked[0][1]
        assert (drawn.temperature, drawn.top_k, drawn.seed, drawn.max_new_tokens) == (0.3, 5, 11, 20)
        assert "x-miles-unused" not in response.headers


def test_seeds_go_by_session_context_and_how_often_it_was_asked(tokenizer, engine):
    other = {"messages": [{"role": "user", "content": "ho"}]}
    with hosted(tokenizer, engine) as host:
        for order in ((ASKED, other, ASKED), (other, ASKED, ASKED)):
            url = host.open(sampling={"seed": 3})
            for body in order:
                host.http.post(f"{url}/v1/chat/completions", json=body)
        chat(host, host.open(sampling={"seed": 4}))
    seeds = [(context[-3:], sampling.seed) for context, sampling in engine.asked]
    assert sorted(map(str, seeds[:3])) == sorted(map(str, seeds[3:6]))
    assert len({seed for _, seed in seeds}) == 4


def test_sessions_that_name_no_seed_draw_apart(tokenizer, engine):
    with hosted(tokenizer, engine) as host:
        for url in (host.open(), host.open()):
            chat(host, url)
    assert engine.asked[0][1].seed != engine.asked[1][1].seed


# -- turns that come to nothing ---------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_aborts_its_turn(tokenizer, engine, streaming):
    with hosted(tokenizer, engine, limits=SessionLimits(heartbeat_seconds=0.01)) as host:
        url = host.open()
        engine.hold = asyncio.Event()
        asyncio.run(leave(url, engine, stream=streaming))
        host.until(lambda: engine.cancelled == 1)
        host.until(lambda: host.server.sessions.num_turns == 0)
        engine.hold = None
        assert chat(host, url).status_code == 200
        assert policy_tokens(host.trajectory(url)) == engine.wrote and len(engine.asked) == 2


def test_a_turn_that_takes_too_long_is_ended_and_told(tokenizer, engine):
    with hosted(tokenizer, engine, limits=SessionLimits(turn_seconds=0.05)) as host:
        engine.hold = asyncio.Event()
        url = host.open()
        response = chat(host, url)
        assert response.status_code == 504 and response.headers["x-should-retry"] == "false"
        assert engine.cancelled == 1 and "0.05 s" in host.http.get(url).json()["failure"]


def test_an_engine_that_refuses_is_told_in_either_way(tokenizer, engine):
    with hosted(tokenizer, engine) as host:
        engine.error = EngineError("the engine has no weights yet")
        url = host.open()
        assert "no weights yet" in chat(host, url).json()["error"]["message"]
        body = ASKED | {"max_tokens": 5, "stream": True}
        response = host.http.post(f"{url}/v1/messages", json=body)
        assert response.status_code == 502 and response.json()["error"]["type"] == "api_error"


def test_an_error_behind_the_first_sign_of_life_is_an_event(tokenizer, engine):
    limits = SessionLimits(heartbeat_seconds=0.01, turn_seconds=0.2)
    with hosted(tokenizer, engine, limits=limits) as host:
        engine.hold = asyncio.Event()
        url = host.open()
        response = host.http.post(f"{url}/v1/messages", json=ASKED | {"max_tokens": 5, "stream": True})
        assert response.status_code == 200 and response.text.startswith(": working\n\n")
        assert response.text.splitlines()[-2].startswith('data: {"type":"error"') and "event: error" in response.text
        assert '{"error":{"message":"The engine did not end' in chat(host, url, stream=True).text


def test_what_an_aborted_turn_wrote_is_kept_and_not_retried(tokenizer, engine):
    with hosted(tokenizer, engine) as host:
        engine.abort = True
        url = host.open()
        response = chat(host, url)
        assert response.status_code == 503 and response.headers["x-should-retry"] == "false"
        trajectory = host.trajectory(url)
        assert trajectory["status"] == "aborted" and policy_tokens(trajectory) == engine.wrote


def test_what_is_not_ours_to_explain_stays_in_the_log(tokenizer, engine, caplog):
    with hosted(tokenizer, engine, api_key="secret-key") as host, caplog.at_level(logging.DEBUG):
        engine.error = RuntimeError("kv page 17")
        host.http.headers["Authorization"] = "Bearer secret-key"
        response = chat(host, host.open())
        assert response.status_code == 500 and "kv page" not in response.text and "RuntimeError" in response.text
        assert "kv page 17" in caplog.text and "secret-key" not in caplog.text


def test_a_session_deleted_under_a_turn_ends_it(tokenizer, engine):
    async def delete(url: str) -> int:
        async with aiohttp.ClientSession() as client:
            asking = asyncio.ensure_future(client.post(f"{url}/v1/chat/completions", json=ASKED))
            while not engine.asked:
                await asyncio.sleep(0.001)
            await client.delete(url)
            return (await asking).status

    with hosted(tokenizer, engine) as host:
        engine.hold = asyncio.Event()
        assert asyncio.run(delete(host.open())) == 404
        assert engine.cancelled == 1


# -- who may ask, what, and until when --------------------------------------------------------


def test_bodies_are_bounded_and_must_be_json(tokenizer, engine):
    with hosted(tokenizer, engine, limits=SessionLimits(body_mib=1)) as host:
        url = host.open()
        large = host.http.post(f"{url}/v1/messages", content=b" " * (1 << 20) + b"{}")
        assert large.status_code == 413 and large.json()["error"]["type"] == "request_too_large"
        for raw in (b"", b"{", b"[]", b'{"messages": NaN}', b'{"a": "\\ud800"}'):
            response = host.http.post(f"{url}/v1/chat/completions", content=raw)
            assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
        assert host.http.get(f"{url}/v1/chat/completions").status_code == 405
        assert host.http.post(f"{url}/v1/nothing").status_code == 404


def test_pages_of_other_sites_are_turned_away(tokenizer, engine):
    with hosted(tokenizer, engine) as host:
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            assert host.http.post("/sessions", headers=headers).status_code == 403


def test_other_machines_need_a_key(tokenizer, engine):
    async def start() -> None:
        await SessionServer(build_renderer(tokenizer), tokenizer.decode, engine=engine).start("0.0.0.0")

    with pytest.raises(UsageError, match="without an API key"):
        asyncio.run(start())
    with pytest.raises(UsageError, match="key is empty"):
        SessionServer(build_renderer(tokenizer), tokenizer.decode, api_key=" ")


def test_a_key_is_asked_of_other_machines_and_the_url_is_one_they_reach(tokenizer, engine):
    async def story() -> None:
        server = SessionServer(build_renderer(tokenizer), tokenizer.decode, engine=engine, api_key="secret")
        port = await server.start("0.0.0.0")
        try:
            entry = server.open(engine, SamplingParams())
            url = server.url(entry.key)
            assert url.startswith(f"http://{find_own_address()}:{port}/") and "0.0.0.0" not in url
            async with aiohttp.ClientSession() as client:
                statuses = [
                    (await client.get(f"{url}/v1/models", headers=headers)).status
                    for headers in ({}, {"x-api-key": "other"}, {"x-api-key": "secret"}, {"Host": "any.example"})
                ]
            assert statuses == [401, 401, 200, 401]
        finally:
            await server.stop()

    asyncio.run(story())


def test_a_server_that_ends_finishes_its_turns_and_takes_no_more(tokenizer, engine):
    async def ask_and_end(host) -> tuple[int, int]:
        url = await asyncio.to_thread(host.open)
        async with aiohttp.ClientSession() as client:
            asking = asyncio.ensure_future(client.post(f"{url}/v1/chat/completions", json=ASKED))
            while not engine.asked:
                await asyncio.sleep(0.001)
            draining = asyncio.ensure_future(asyncio.to_thread(host.call, host.server.drain()))
            while not host.server.sessions.draining:
                await asyncio.sleep(0.001)
            late = await client.post(f"{url}/v1/chat/completions", json=ASKED)
            await asyncio.to_thread(host.on_loop, engine.hold.set)
            await draining
            return (await asking).status, late.status

    with hosted(tokenizer, engine) as host:
        engine.hold = host.on_loop(asyncio.Event)
        assert asyncio.run(ask_and_end(host)) == (200, 503)
        assert host.http.get("/health").status_code == 503


def test_a_turn_that_does_not_end_in_time_is_aborted_when_the_server_ends(tokenizer, engine):
    async def ask_and_end(host) -> int:
        url = await asyncio.to_thread(host.open)
        async with aiohttp.ClientSession() as client:
            asking = asyncio.ensure_future(client.post(f"{url}/v1/chat/completions", json=ASKED))
            while not engine.asked:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(host.call, host.server.drain())
            return (await asking).status

    with hosted(tokenizer, engine, limits=SessionLimits(drain_seconds=0.05)) as host:
        engine.hold = asyncio.Event()
        assert asyncio.run(ask_and_end(host)) == 404
        assert engine.cancelled == 1
