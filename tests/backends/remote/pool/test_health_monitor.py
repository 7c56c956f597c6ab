"""Servers are started, monitored and restarted with their weights, and no process is left over."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.backends.remote.harness import until, weights_of

from miles.backends.remote.client import SglangClient
from miles.backends.remote.pool.engine_pool import EnginePool, SlotState
from miles.backends.remote.pool.health_monitor import HealthConfig
from miles.backends.remote.process import server as server_process
from miles.backends.remote.process.server import ExternalServer, LocalServer, ServerCommand
from miles.backends.remote.remote_engine import RemoteEngine
from miles.backends.remote.transports.senders import HttpTransport
from miles.cluster import process as child_process
from miles.cluster.executor import InlineExecutor
from miles.cluster.process import restart_delay
from miles.core.errors import EngineError, MilesError
from miles.core.protocols import SamplingParams
from miles.core.types import Version
from miles.models.resolve import resolve_spec

STUB = Path(__file__).parents[1] / "stub_server.py"
CONFIG = HealthConfig(interval=0.2, timeout=0.5, first_wait=0.0, max_restarts=2, backoff=0.01)
PROMPT = np.array([100], np.int32)


def local_server(number, tmp_path, *words, seconds=60.0):
    command = ServerCommand(argv=(sys.executable, str(STUB), *words))
    name = f"engine {number}"
    connect = lambda url: SglangClient(url, name, vocab_size=100_000)  # noqa: E731
    return LocalServer(name, command, tmp_path / f"engine-{number}.log", connect, seconds=seconds)


@asynccontextmanager
async def servers(folders, hosts, config=CONFIG):
    said = []
    pool = EnginePool([each.name for each in hosts], eos_token_ids=frozenset())
    made = RemoteEngine(pool, hosts, config, said.append)
    weights = weights_of(folders.a)
    how = {"transport": HttpTransport(), "executor": InlineExecutor(), "bucket_bytes": 1 << 20, "seconds": 30.0}
    sync = made.sync(lambda: weights, resolve_spec(folders.a, "auto"), **how)
    try:
        await sync.publish(Version())
        yield made, sync, said
    finally:
        await made.close()


async def pid_of(slot):
    return (await slot.client.request("GET", "/server_info"))["pid"]


def counted(answer):
    return [token for span in answer.spans for token in span.tokens.tolist()]


def test_a_server_that_is_killed_is_replaced_and_its_requests_lose_nothing(folders, tmp_path):
    async def run():
        async with servers(folders, [local_server(i, tmp_path) for i in range(2)]) as (made, sync, said):
            await sync.publish(Version(number=4))
            asked = [
                asyncio.create_task(made.generate(PROMPT + 1000 * i, SamplingParams(max_new_tokens=300)))
                for i in range(6)
            ]
            await until(lambda: all(slot.load for slot in made.pool.slots))
            victim = made.pool.slots[0]
            os.kill(await pid_of(victim), signal.SIGKILL)
            answers = await asyncio.gather(*asked)
            await until(lambda: made.restarts == 1 and victim.state is SlotState.SERVING)
            assert (
                (victim.client and await victim.client.fetch_info()).weight_version
                == "actor-4"
                == f"actor-{victim.version.number}"
            )
            return answers, said, await made.health()

    answers, said, health = asyncio.run(run())
    for i, answer in enumerate(answers):
        assert counted(answer) == [100 + 1000 * i + n for n in range(1, 301)]
        assert {span.version for span in answer.spans} == {Version(number=4)}
    assert any("engine 0" in sentence and "restarting it (restart 1 of at most 2" in sentence for sentence in said)
    assert health["engines_serving"] == 2 and health["engines_restarted"] == 1 and health["requests_retried"] >= 1


def test_a_server_that_is_stuck_is_replaced_too(folders, tmp_path):
    async def run():
        async with servers(folders, [local_server(0, tmp_path, "--mute"), local_server(1, tmp_path)]) as (
            made,
            _,
            said,
        ):
            await until(lambda: made.pool.slots[0].state is SlotState.DEAD)
            return counted(await made.generate(PROMPT, SamplingParams(max_new_tokens=3))), said

    answer, said = asyncio.run(run())
    assert answer == [101, 102, 103] and "did not answer /health_generate within 0.5 s" in said[-1]
    assert "given up after 2 restarts" in said[-1]


def test_a_server_that_was_well_is_replaced_at_once_however_often_it_is_killed(folders, tmp_path):
    async def run():
        config = HealthConfig(
            interval=0.05, timeout=5.0, first_wait=0.0, max_restarts=9, backoff=3600.0, longest_backoff=3600.0
        )
        async with servers(folders, [local_server(0, tmp_path)], config) as (made, _, _):
            slot = made.pool.slots[0]
            for time_killed in range(3):
                await until(lambda: slot in made._monitor._healthy)  # found healthy in this life
                os.kill(await pid_of(slot), signal.SIGKILL)
                await until(lambda: made.restarts == time_killed + 1 and slot.state is SlotState.SERVING)  # noqa: B023

    asyncio.run(run())


def test_pauses_grow_with_failures_in_a_row_up_to_the_longest():
    assert [restart_delay(failures) for failures in range(1, 11)] == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_when_all_are_given_up_requests_and_publications_say_why(folders, tmp_path):
    async def run():
        config = HealthConfig(interval=10, timeout=0.5, first_wait=0.0, max_restarts=0)
        async with servers(folders, [local_server(0, tmp_path)], config) as (made, _, _):
            asked = asyncio.create_task(made.generate(PROMPT, SamplingParams(max_new_tokens=100_000)))
            await until(lambda: bool(made.pool.slots[0].load))
            os.kill(await pid_of(made.pool.slots[0]), signal.SIGKILL)
            await asked

    with pytest.raises(EngineError, match="no server is left: engine 0: "):
        asyncio.run(run())


def test_a_server_that_cannot_start_says_so_with_the_end_of_its_log(folders, tmp_path):
    async def run():
        async with servers(folders, [local_server(0, tmp_path, "--fail"), local_server(1, tmp_path)]):
            pass

    with pytest.raises(EngineError, match=r"(?s)engine 0 ended with exit code 1 while it started.*out of luck"):
        asyncio.run(run())


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path):
    slow = LocalServer(
        "engine 0",
        ServerCommand(argv=(sys.executable, "-c", "import time; print('still loading', flush=True); time.sleep(600)")),
        tmp_path / "engine-0.log",
        lambda url: SglangClient(url, "engine 0", vocab_size=9),
        seconds=1.0,
    )
    with pytest.raises(EngineError, match=r"(?s)was not ready within 1 s.*still loading"):
        asyncio.run(slow.open())
    assert slow.pid is None


def test_servers_that_run_already_are_used_and_left_alone(folders, tmp_path):
    async def run():
        own = local_server(0, tmp_path)
        url = (await own.open()).url
        visited = ExternalServer(
            "engine 0", url, lambda at: SglangClient(at, "engine 0", vocab_size=100_000), seconds=9
        )
        async with servers(folders, [visited]) as (made, _, _):
            assert counted(await made.generate(PROMPT, SamplingParams(max_new_tokens=2))) == [101, 102]
        assert own.exit_reason() is None
        await own.close()

    asyncio.run(run())


@pytest.mark.parametrize("then", ["generate", "publish"])
def test_when_all_servers_elsewhere_are_dead_the_run_ends_at_once(folders, tmp_path, then):
    async def run():
        own = [local_server(i, tmp_path) for i in range(2)]
        urls = [(await each.open()).url for each in own]
        visited = [
            ExternalServer(f"engine {i}", url, lambda at: SglangClient(at, "engine", vocab_size=100_000), seconds=600)
            for i, url in enumerate(urls)
        ]
        async with servers(folders, visited) as (made, sync, said):
            for each in own:
                await each.close()
            async with asyncio.timeout(60):  # far below the 600 s in which a server may come up
                with pytest.raises(MilesError, match=r"no server is left.*engine 0: .*; engine 1: "):
                    await until(lambda: not made.pool.serving())
                    await (
                        made.generate(PROMPT, SamplingParams(max_new_tokens=2))
                        if then == "generate"
                        else sync.publish(Version(number=1))
                    )
            assert any("No server is left, and this run starts none" in sentence for sentence in said)

    asyncio.run(run())


def test_a_server_whose_port_was_taken_meanwhile_starts_on_another(tmp_path, monkeypatch):
    async def run():
        with socket.create_server(("127.0.0.1", 0)) as other:
            ports = iter([other.getsockname()[1], other.getsockname()[1]])
            monkeypatch.setattr(server_process, "find_free_port", lambda host: next(ports, None) or free_port(host))
            own = local_server(0, tmp_path)
            client = await own.open()
            assert not client.url.endswith(f":{other.getsockname()[1]}")
            await own.close()
        assert "address already in use" in (tmp_path / "engine-0.log").read_text().lower()

    free_port = child_process.find_free_port
    asyncio.run(run())


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("who", ["the run", "the guard"])
def test_no_server_outlives_the_run_however_that_ends(who):
    inner = "import subprocess as s, time; print(s.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    driver = (
        "import os, subprocess, sys, time\n"
        "reading, writing = os.pipe()\n"
        f"words = [sys.executable, '-I', {child_process.__file__!r}, str(reading), sys.executable, '-c', {inner!r}]\n"
        "how = {'stdout': subprocess.PIPE, 'text': True, 'start_new_session': True}\n"
        "guard = subprocess.Popen(words, pass_fds=(reading,), **how)\n"
        "os.close(reading)\n"
        "print(guard.pid, guard.stdout.readline().strip(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        guard, grandchild = map(int, process.stdout.readline().split())
        child = next(
            int(pid.name)
            for pid in Path("/proc").iterdir()
            if pid.name.isdigit() and f" {guard} " in _stat(pid) and int(pid.name) != grandchild
        )
        assert alive(guard) and alive(child) and alive(grandchild)
        os.kill(process.pid if who == "the run" else guard, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while alive(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive(child)
        if who == "the run":  # a guard that lives ends everything the server started
            while (alive(grandchild) or alive(guard)) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not alive(grandchild) and not alive(guard)
        else:
            os.kill(grandchild, signal.SIGKILL)
        process.kill()


def _stat(pid: Path) -> str:
    """The parent of a process, between spaces."""
    try:
        return f" {(pid / 'stat').read_text().rpartition(')')[2].split()[1]} "
    except OSError:
        return ""
