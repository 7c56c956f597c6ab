"""The router in front of two native engines: the same answers, and weight updates of both."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.backends.native.server.tiny import write_model
from tests.cluster.router.harness import PATIENCE, LogCapture

from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.server.app import EngineServer
from miles.cluster.executor import ThreadExecutor
from miles.cluster.router.config import RouterConfig
from miles.cluster.router.router import Router
from miles.launch.commands.serve import build_server, read_serve_config

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


class Pair:
    """A router, the URLs of two engines behind it, and a client."""

    def __init__(
        self, url: str, engines: list[str], servers: list[EngineServer], session: aiohttp.ClientSession
    ) -> None:
        self.url = url
        self.engines = engines
        self.servers = servers
        self._session = session

    async def post(self, path: str, body: Any, url: str | None = None) -> tuple[Any, Any]:
        async with self._session.post((url or self.url) + path, json=body) as answer:
            raw = await answer.read()
            assert answer.status == 200, raw
            return (json.loads(raw) if answer.content_type == "application/json" else raw), answer.headers

    async def get(self, path: str) -> Any:
        async with self._session.get(self.url + path) as answer:
            assert answer.status == 200
            return await answer.json()

    async def everywhere(self, body: Any) -> list[Any]:
        """The same request, to each engine through the router."""
        found: dict[str, Any] = {}
        while len(found) < len(self.engines):
            answer, headers = await self.post("/generate", body)
            found[headers["x-miles-engine"]] = answer
        return list(found.values())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    return write_model(made[0], 0), write_model(made[1], 1)


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[Pair]:
    flags = ["--device", "cpu", "--num-threads", "1", "--engine-kv-tokens", "4096", "--served-model-name", "tiny"]
    runs = [ThreadExecutor("engine") for _ in range(2)]
    built: list[tuple[EngineServer, NativeEngine]] = [
        await build_server(read_serve_config([str(folder), *flags]), None, run) for run in runs
    ]
    urls = [f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}" for server, _ in built]
    logs = LogCapture()
    config = replace(RouterConfig(port=0, engine_urls=tuple(urls)), policy="round_robin")
    router = Router(config, log=logs)
    port = await router.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3 * PATIENCE)) as session:
            for url in urls:
                await logs.wait_for(f"{url.removeprefix('http://')} is healthy")
            yield Pair(f"http://127.0.0.1:{port}", urls, [server for server, _ in built], session)
    finally:
        await router.close()
        for (server, engine), run in zip(built, runs, strict=True):
            await server.stop()
            await engine.close()
            run.close()


def served(folder: Path, test: Callable[[Pair], Awaitable[None]]) -> None:
    async def inner() -> None:
        async with pair(folder) as p:
            await test(p)

    asyncio.run(inner())


def test_answers_through_the_router_are_those_of_the_engine(folders: tuple[Path, Path]):
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": GREEDY, "return_logprob": True, "rid": "mine"}

    async def test(p: Pair):
        routed, headers = await p.post("/generate", body)
        straight, _ = await p.post("/generate", body, p.engines[0])
        assert headers["x-miles-engine"] in {url.removeprefix("http://") for url in p.engines}
        assert routed["meta_info"]["id"] == "mine"
        for name in ("output_token_logprobs", "finish_reason", "weight_version", "prompt_tokens", "completion_tokens"):
            assert routed["meta_info"][name] == straight["meta_info"][name]
        assert routed["output_ids"] == straight["output_ids"]
        streamed, _ = await p.post("/generate", {**body, "stream": True})
        pieces = [line.removeprefix(b"data: ") for line in streamed.split(b"\n\n") if line]
        assert pieces[-1] == b"[DONE]"
        assert json.loads(pieces[-2])["output_ids"] == straight["output_ids"]
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
        said, _ = await p.post("/v1/chat/completions", chat)
        assert said["choices"][0]["message"]["role"] == "assistant"
        assert [model["id"] for model in (await p.get("/v1/models"))["data"]] == ["tiny"]

    served(folders[0], test)


def test_new_weights_reach_both_engines_and_every_answer_says_so(folders: tuple[Path, Path]):
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": GREEDY}

    async def test(p: Pair):
        before = await p.everywhere(body)
        assert before[0]["output_ids"] == before[1]["output_ids"]
        await p.post("/pause_generation", {"mode": "retract"})
        update = {"model_path": str(folders[1]), "flush_cache": False, "weight_version": "7"}
        answer, _ = await p.post("/update_weights_from_disk", update)
        assert answer["success"] is True and len(answer["engines"]) == 2
        await p.post("/continue_generation", {})
        await p.post("/flush_cache", {})
        after = await p.everywhere(body)
        assert after[0]["output_ids"] == after[1]["output_ids"] != before[0]["output_ids"]
        assert [each["meta_info"]["weight_version"] for each in after] == ["7", "7"]

    served(folders[0], test)


def test_a_client_that_leaves_leaves_nothing_running(folders: tuple[Path, Path]):
    body = {"input_ids": [5, 6, 7], "sampling_params": {**GREEDY, "max_new_tokens": 400}, "rid": "gone", "stream": True}

    async def test(p: Pair):
        async with aiohttp.ClientSession() as session:
            answer = await session.post(p.url + "/generate", json=body)
            assert await answer.content.readuntil(b"\n\n")
            answer.close()
        for server in p.servers:
            await asyncio.wait_for(server.handler.lock.wait_idle(), PATIENCE)

    served(folders[0], test)
