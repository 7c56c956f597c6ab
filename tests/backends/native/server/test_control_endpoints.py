"""Abort, pause, flush, sleep, keys, limits, disconnects and shutdown, on a live server."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.backends.native.server.live import GREEDY, PROMPT, Live, served, serving

from miles.backends.native.server.config import ServeConfig

LONG = {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}


async def begun(live: Live, *, rid: str = "long", **body: Any) -> asyncio.Task[Any]:
    """A long request that has drawn its first tokens."""
    task = asyncio.create_task(live.generate(rid=rid, sampling_params=LONG, **body))
    await live.until(lambda: rid in live.server.handler._running)
    state = live.server.handler._running[rid]
    await live.until(lambda: len(state.output.logprobs) > 2)
    return task


def test_an_aborted_request_answers_with_what_it_has(folder: Path):
    async def story(live: Live) -> None:
        victim, other = await begun(live, rid="victim"), await begun(live, rid="other")
        assert await live.post("/abort_request", {"rid": "victim"}) == (200, "")
        reply = await victim
        assert reply["meta_info"]["finish_reason"] == {
            **{"type": "abort", "message": "Aborted"},
            **{"status_code": None, "err_type": None},
        }
        assert 2 < len(reply["output_ids"]) < 120 and not other.done()
        assert await live.post("/abort_request", {"rid": "nobody"}) == (200, "")
        assert await live.post("/abort_request", {}) == (200, "")
        await live.post("/abort_request", {"abort_all": True})
        assert (await other)["meta_info"]["finish_reason"]["type"] == "abort"

    served(story, folder)


def test_all_answers_of_a_named_request_are_aborted_by_its_name(folder: Path):
    async def story(live: Live) -> None:
        body = {"rid": "group", "input_ids": [PROMPT, PROMPT], "sampling_params": LONG}
        task = asyncio.create_task(live.generate(**body))
        await live.until(lambda: live.server.handler.num_running == 2)
        await live.post("/abort_request", {"rid": "group"})
        assert [reply["meta_info"]["finish_reason"]["type"] for reply in await task] == ["abort", "abort"]

    served(story, folder)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_keeps_or_aborts_and_an_undisturbed_answer_comes_of_it(folder: Path, mode: str):
    async def story(live: Live) -> None:
        undisturbed = await live.generate(sampling_params=LONG)
        task = await begun(live)
        paused = {"message": "Generation paused successfully.", "status": "ok"}
        assert await live.post("/pause_generation", {"mode": mode}) == (200, paused)
        steps = live.engine.stats()["steps"]
        waiting = asyncio.create_task(live.generate())
        await live.until(lambda: live.server.handler.num_running == (1 if mode == "abort" else 2) or waiting.done())
        assert (await live.get("/health"))[0] == 200 and (await live.get("/health_generate"))[0] == 503
        assert live.engine.stats()["steps"] == steps and not waiting.done()
        resumed = {"message": "Generation continued successfully.", "status": "ok"}
        assert await live.post("/continue_generation", {}) == (200, resumed)
        assert (await waiting)["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
        reply = await task
        if mode == "abort":
            assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        else:
            assert reply["output_ids"] == undisturbed["output_ids"]

    served(story, folder)


def test_the_cache_is_flushed_when_nobody_holds_it(folder: Path):
    async def story(live: Live) -> None:
        await live.generate(input_ids=PROMPT * 4)
        assert (await live.post("/flush_cache"))[0] == 200
        assert (await live.generate(input_ids=PROMPT * 4))["meta_info"]["cached_tokens"] == 0
        task = await begun(live)
        assert (await live.get("/flush_cache"))[0] == 400
        assert (await live.post("/flush_cache", params={"timeout": "60"}))[0] == 200
        await task

    served(story, folder)


def test_a_sleeping_engine_holds_requests_until_it_wakes(folder: Path):
    async def story(live: Live) -> None:
        before = await live.generate()
        assert await live.post("/release_memory_occupation", {"tags": ["kv_cache"]}) == (200, None)
        task = asyncio.create_task(live.generate())
        await live.until(lambda: live.server.handler.num_running == 1)
        assert (await live.get("/health_generate"))[0] == 503
        assert await live.post("/resume_memory_occupation", {}) == (200, None)
        assert (await task)["output_ids"] == before["output_ids"]

    served(story, folder)


def test_without_the_key_nothing_is_told_but_health(folder: Path):
    async def story(live: Live) -> None:
        assert (await live.generate())["output_ids"]
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": ""}):
            assert await live.post("/generate", {"input_ids": PROMPT}, headers=headers) == (
                401,
                {"error": "Unauthorized"},
            )
            assert (await live.get("/v1/models", headers=headers))[0] == 401
            assert (await live.get("/nowhere", headers=headers))[0] == 401
            assert (await live.get("/health", headers=headers))[0] == 200
            assert (await live.get("/metrics", headers=headers))[0] == 200
        _, response = await live.get("/server_info")
        assert "secret" not in json.dumps(response)

    served(story, folder, key="secret")


def test_pages_of_other_sites_cannot_ask_an_open_server(folder: Path):
    async def story(live: Live) -> None:
        for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": f"evil.example:{live.port}"}):
            assert await live.post("/abort_request", {}, headers=headers) == (403, {"error": "Forbidden"})
        for headers in ({"Origin": live.url}, {"Host": "localhost"}, {"Host": "[::1]:3"}):
            assert (await live.post("/abort_request", {}, headers=headers))[0] == 200

    served(story, folder)


def test_a_body_that_is_too_large_is_refused(folder: Path):
    async def story(live: Live) -> None:
        status, refused = await live.post("/generate", raw=b" " * (1 << 21))
        assert status == 413 and "--max-body-mib" in refused["error"]["message"]
        assert (await live.generate())["output_ids"]

    served(story, folder, ServeConfig(max_body_mib=1))


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_hangs_up_is_forgotten_and_holds_nothing(folder: Path, stream: bool):
    async def story(live: Live) -> None:
        steady = asyncio.create_task(live.generate(sampling_params=LONG))
        body = {"input_ids": [PROMPT, [9, 8]], "sampling_params": {**LONG, "n": 3}, "stream": stream}
        for _ in range(3):
            async with aiohttp.ClientSession() as session:
                asking = asyncio.create_task(session.post(f"{live.url}/generate", json=body))
                await live.until(lambda: live.server.handler.num_running > 1)
                if stream:
                    await (await asking).content.readany()
                asking.cancel()
            await live.until(lambda: live.server.handler.num_running <= 1)
        assert (await steady)["meta_info"]["completion_tokens"] == 120
        health = await live.engine.health()
        await live.until(lambda: not live.engine._outputs and not live.engine._cancelled)
        assert health["waiting"] == 0
        live.engine.check()

    served(story, folder)


def test_a_server_told_to_stop_finishes_what_is_under_way(folder: Path):
    async def story() -> None:
        async with serving(folder) as live:
            task = await begun(live)
            draining = asyncio.create_task(live.server.drain(60))
            await live.until(lambda: live.server.handler.draining)
            assert (await task)["meta_info"]["completion_tokens"] == 120
            await draining
            with pytest.raises(aiohttp.ClientConnectorError):
                async with aiohttp.ClientSession() as session:
                    await session.get(f"{live.url}/health")

    asyncio.run(story())


def test_what_takes_too_long_is_ended_with_what_it_has(folder: Path):
    async def story() -> None:
        async with serving(folder) as live:
            await live.post("/pause_generation", {"mode": "in_place"})
            task = asyncio.create_task(live.generate(sampling_params=LONG))
            await live.until(lambda: live.server.handler.num_running == 1)
            await live.server.drain(0.01)
            assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"

    asyncio.run(story())


def test_a_draining_server_refuses_new_requests_on_old_connections(folder: Path):
    async def story(live: Live) -> None:
        assert (await live.get("/health"))[0] == 200
        live.server.handler.draining = True
        status, refused = await live.post("/generate", {"input_ids": PROMPT})
        assert status == 503 and "shutting down" in refused["error"]["message"]
        assert (await live.get("/health"))[0] == 503
        assert (await live.post("/v1/completions", {"prompt": "a"}))[0] == 503

    served(story, folder)


def test_what_the_server_says_of_itself(folder: Path):
    async def story(live: Live) -> None:
        await live.generate(return_logprob=True)
        _, info = await live.get("/model_info")
        assert (info["served_model_name"], info["weight_version"], info["is_generation"]) == ("tiny", "default", True)
        assert (await live.get("/get_model_info"))[1] == info
        _, response = await live.get("/server_info")
        assert (response["max_total_num_tokens"], response["context_length"]) == (8192, 512)
        assert "api_key_file" not in response and response["internal_states"][0]["generated_tokens"] == 8
        _, (load,) = await live.get("/get_load")
        assert set(load) == {"dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens", "num_pending_tokens", "ts_tic"}
        assert load["num_reqs"] == 0
        _, loads = await live.get("/v1/loads")
        assert loads["loads"][0]["max_total_num_tokens"] == 8192
        _, models = await live.get("/v1/models")
        assert [card["id"] for card in models["data"]] == ["tiny"] and models["data"][0]["max_model_len"] == 512
        assert (await live.get("/v1/models/tiny"))[0] == 200
        status, missing = await live.get("/v1/models/other")
        assert (status, missing["error"]["code"]) == (404, "model_not_found")
        _, text = await live.get("/metrics")
        assert 'miles_engine_generated_tokens_total{model_name="tiny"} 8.0' in text
        assert 'miles_server_requests_total{path="/generate",status="200"} 1.0' in text
        assert 'miles_server_answers_total{reason="length"} 1.0' in text
        assert (await live.get("/health_generate"))[0] == 200

    served(story, folder)


def test_every_path_is_in_the_document_and_every_one_in_it_is_there(folder: Path):
    async def story(live: Live) -> None:
        _, document = await live.get("/openapi.json")
        routes = {
            (route.method.lower(), route.resource.canonical)  # pyright: ignore
            for route in live.server._runner.app.router.routes()  # pyright: ignore
        }
        assert routes == {(method, path) for path, methods in document["paths"].items() for method in methods}
        ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
        assert len(set(ids)) == len(ids)
        assert document["openapi"].startswith("3.")

    served(story, folder)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/generate", 405), ("POST", "/nowhere", 404), ("DELETE", "/health", 405), ("GET", "/v1/completions", 405)],
)
def test_a_wrong_path_or_method_is_told_as_such(folder: Path, method: str, path: str, status: int):
    async def story(live: Live) -> None:
        async with live.session.request(method, live.url + path) as response:
            detail = {404: "Not Found", 405: "Method Not Allowed"}[status]
            assert (response.status, await response.json()) == (status, {"detail": detail})

    served(story, folder)


def test_an_error_in_the_engine_is_a_500_and_the_server_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch):
    async def story(live: Live) -> None:
        def broken(order: object) -> None:
            raise RuntimeError("out of luck: /secret/path")

        with monkeypatch.context() as patch:
            patch.setattr(live.engine._runner, "launch", broken)
            status, response = await live.post("/generate", {"input_ids": PROMPT})
            assert status == 500 and "/secret" not in json.dumps(response)
            pieces = await live.stream("/generate", {"input_ids": PROMPT, "stream": True})
            assert pieces[-1]["error"]["code"] == 500 and "/secret" not in json.dumps(pieces)
        assert (await live.generate())["meta_info"]["finish_reason"] == {"type": "length", "length": 8}

    served(story, folder)


def test_requests_beyond_the_context_are_refused(folder: Path):
    async def story(live: Live) -> None:
        for body, says in (
            ({"input_ids": [3] * 512}, "The prompt has 512 tokens, but the context has room for 512."),
            ({"input_ids": [3], "return_logprob": True, "top_logprobs_num": 513}, "513 top log-probs are requested"),
            ({"input_ids": [3], "return_logprob": True, "token_ids_logprob": [512]}, "Token 512 is outside"),
            ({"input_ids": [3], "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len is 2, but the"),
            ({"input_ids": [3, -1]}, "Token -1 of the prompt is outside the vocabulary of 512."),
            ({"input_ids": [2**70]}, "Token 1180591620717411303424 of the prompt is outside the vocabulary of 512."),
            (
                {"input_ids": [3] * 500, "sampling_params": {"max_new_tokens": 13}},
                "The prompt has 500 tokens and 13 more",
            ),
        ):
            status, refused = await live.post("/generate", body)
            assert status == 400 and refused["error"]["message"].startswith(says)
        all_of_it = {"temperature": 0, "max_new_tokens": None, "ignore_eos": True}
        reply = await live.generate(input_ids=[3] * 500, sampling_params=all_of_it)
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
        assert GREEDY["max_new_tokens"] == 8

    served(story, folder)
