"""``miles route`` as a user starts and stops it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from aiohttp import web
from tests.cluster.router.harness import Arrivals, ScriptedEngine, reply

from miles.cluster.router.config import RouterConfig
from miles.core.errors import UsageError
from miles.launch.commands.route import ENGINE_API_KEY, RouterKeys, check_options, read_keys
from miles.launch.runtime.http_service import API_KEY

NONE = RouterKeys(own=None, engine=None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_this_machine_alone_needs_no_key(host: str):
    assert list(check_options(RouterConfig(host=host), NONE)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.org"])
def test_other_machines_need_a_key(host: str):
    (problem,) = check_options(RouterConfig(host=host), NONE)
    assert problem.startswith(f"--host {host} is reachable from other machines")
    assert list(check_options(RouterConfig(host=host), RouterKeys(own="k", engine="k"))) == []
    assert list(check_options(RouterConfig(host=host, allow_unauthenticated=True), NONE)) == []


@pytest.mark.parametrize("url", ["localhost:3000", "ftp://a", "http://", "http://a:port", "http://a:0", "a"])
def test_what_is_no_url_of_an_engine_is_refused(url: str):
    (problem,) = check_options(RouterConfig(engine_urls=(url, "http://127.0.0.1:1", "https://h.example/base")), NONE)
    assert problem == f"--engine-urls {url} is not the URL of an engine; write one like http://127.0.0.1:30000."


def test_keys_come_from_files_or_the_environment(tmp_path: Path):
    file = tmp_path / "key"
    file.write_text("from file\n")
    assert read_keys(RouterConfig(), {}) == NONE
    assert read_keys(RouterConfig(), {API_KEY: "a"}) == RouterKeys(own="a", engine="a")
    assert read_keys(RouterConfig(), {API_KEY: "a", ENGINE_API_KEY: "b"}) == RouterKeys(own="a", engine="b")
    assert read_keys(RouterConfig(api_key_file=str(file)), {API_KEY: "a"}) == RouterKeys(
        own="from file", engine="from file"
    )
    assert read_keys(RouterConfig(engine_api_key_file=str(file)), {}) == RouterKeys(own=None, engine="from file")
    file.write_text("\n")
    with pytest.raises(UsageError, match="has no key"):
        read_keys(RouterConfig(api_key_file=str(file)), {})
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_keys(RouterConfig(engine_api_key_file=str(tmp_path / "gone")), {})


def test_other_contradictions_are_told():
    odd = RouterConfig(health_check_endpoint="health", quarantine_secs=9.0, max_quarantine_secs=3.0)
    assert len(list(check_options(odd, NONE))) == 2


# -- a process of its own -----------------------------------------------------------------------------


def started(*flags: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "miles.launch.main", "route", "--port", "0", *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, API_KEY: ""}
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"Routing http://127\.0\.0\.1:(\d+) to \d+ engines \(\w+\)\.\n", line)
    assert found is not None, line
    return process, int(found[1])


def ask(port: int, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(f"http://127.0.0.1:{port}{path}", data), timeout=20) as answer:
        return json.load(answer)


def with_engine(test: Callable[[ScriptedEngine], Awaitable[None]]) -> None:
    async def inner() -> None:
        engine = await ScriptedEngine(Arrivals()).start()
        try:
            await test(engine)
        finally:
            await engine.stop()

    asyncio.run(inner())


def test_a_router_serves_and_stops_when_it_is_told():
    async def test(engine: ScriptedEngine):
        process, port = await asyncio.to_thread(started, "--engine-urls", engine.url)
        reported = await asyncio.to_thread(ask, port, "/generate", {"rid": "a"})
        assert reported["meta_info"]["id"] == "a"
        process.send_signal(signal.SIGTERM)
        out, err = await asyncio.to_thread(process.communicate, timeout=20)
        assert process.returncode == 0
        assert out == "" and f"Engine {engine.id} is healthy." in err

    with_engine(test)


def test_a_router_that_is_told_to_stop_finishes_what_is_under_way_first():
    async def test(engine: ScriptedEngine):
        release = asyncio.Event()

        async def wait(request: web.Request) -> web.StreamResponse:
            await release.wait()
            return await reply(request)

        engine.behave = wait
        process, port = await asyncio.to_thread(started, "--engine-urls", engine.url)
        asking = asyncio.create_task(asyncio.to_thread(ask, port, "/generate", {"rid": "a"}))
        await engine.arrived.reach(1)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "Finishing requests in flight" not in await asyncio.to_thread(process.stderr.readline):
            assert process.poll() is None
        release.set()
        assert (await asking)["meta_info"]["id"] == "a"
        assert await asyncio.to_thread(process.wait, 20) == 0
        process.communicate()

    with_engine(test)


def test_a_second_signal_ends_it_at_once():
    async def test(engine: ScriptedEngine):
        async def wait(request: web.Request) -> web.StreamResponse:
            await asyncio.Event().wait()
            return await reply(request)

        engine.behave = wait
        process, port = await asyncio.to_thread(started, "--engine-urls", engine.url)
        asking = asyncio.create_task(asyncio.to_thread(ask, port, "/generate", {}))
        await engine.arrived.reach(1)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "Finishing requests in flight" not in await asyncio.to_thread(process.stderr.readline):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 20) == 0
        with pytest.raises(OSError):
            await asking
        process.communicate()

    with_engine(test)


def test_a_port_that_is_taken_is_told():
    async def test(engine: ScriptedEngine):
        command = [sys.executable, "-m", "miles.launch.main", "route", "--port", str(engine.port)]
        run = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
        assert run.returncode == 2
        reported = (
            f"miles: --host 127.0.0.1 --port {engine.port} is not available: Address already in use; choose another.\n"
        )
        assert run.stderr == reported

    with_engine(test)
