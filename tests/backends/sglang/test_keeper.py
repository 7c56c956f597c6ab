"""Servers are started, watched and replaced: who dies is brought back with its weights, and nothing is left over."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.backends.sglang.near import until, weights_of

from miles.backends.sglang.carriers import InRequests
from miles.backends.sglang.client import Client
from miles.backends.sglang.fleet import Fleet, State
from miles.backends.sglang.keeper import Care
from miles.backends.sglang.launch import Launched, Visited
from miles.backends.sglang.process import GUARD, Command
from miles.backends.sglang.servers import Servers
from miles.cluster.local import Inline
from miles.core.errors import EngineError
from miles.core.protocols import Sampling
from miles.core.types import Version
from miles.models.choice import chosen_spec

STUB = Path(__file__).with_name("stub_server.py")
CARE = Care(interval=0.2, timeout=0.5, first_wait=0.0, max_restarts=2, backoff=0.01)
PROMPT = np.array([100], np.int32)


def home(number, tmp_path, *words, seconds=60.0):
    command = Command(words=(sys.executable, str(STUB), *words))
    name = f"engine {number}"
    connect = lambda url: Client(url, name, vocabulary=100_000)  # noqa: E731
    return Launched(name, command, tmp_path / f"engine-{number}.log", connect, seconds=seconds)


@asynccontextmanager
async def servers(folders, homes, care=CARE):
    said = []
    fleet = Fleet([each.name for each in homes], ends=frozenset())
    made = Servers(fleet, homes, care, said.append)
    weights = weights_of(folders.a)
    how = {"carrier": InRequests(), "run": Inline(), "bucket_bytes": 1 << 20, "seconds": 30.0}
    sync = made.sync(lambda: weights, chosen_spec(folders.a, "auto"), **how)
    try:
        await sync.publish(Version())
        yield made, sync, said
    finally:
        await made.close()


async def pid_of(seat):
    return (await seat.client.ask("GET", "/server_info"))["pid"]


def counted(answer):
    return [token for span in answer.spans for token in span.tokens.tolist()]


def test_a_server_that_is_killed_is_replaced_and_its_requests_lose_nothing(folders, tmp_path):
    async def run():
        async with servers(folders, [home(i, tmp_path) for i in range(2)]) as (made, sync, said):
            await sync.publish(Version(number=4))
            asked = [
                asyncio.create_task(made.generate(PROMPT + 1000 * i, Sampling(max_new_tokens=300))) for i in range(6)
            ]
            await until(lambda: all(seat.load for seat in made.fleet.seats))
            victim = made.fleet.seats[0]
            os.kill(await pid_of(victim), signal.SIGKILL)
            answers = await asyncio.gather(*asked)
            await until(lambda: made.restarts == 1 and victim.state is State.SERVING)
            assert (victim.client and await victim.client.look()).label == "actor-4" == f"actor-{victim.version.number}"
            return answers, said, await made.health()

    answers, said, health = asyncio.run(run())
    for i, answer in enumerate(answers):
        assert counted(answer) == [100 + 1000 * i + n for n in range(1, 301)]
        assert {span.version for span in answer.spans} == {Version(number=4)}
    assert any("engine 0" in sentence and "brought back (1 of at most 2" in sentence for sentence in said)
    assert health["engines_serving"] == 2 and health["engines_restarted"] == 1 and health["requests_retried"] >= 1


def test_a_server_that_is_stuck_is_replaced_too(folders, tmp_path):
    async def run():
        async with servers(folders, [home(0, tmp_path, "--mute"), home(1, tmp_path)]) as (made, _, said):
            await until(lambda: made.fleet.seats[0].state is State.GONE)
            return counted(await made.generate(PROMPT, Sampling(max_new_tokens=3))), said

    answer, said = asyncio.run(run())
    assert answer == [101, 102, 103] and "did not answer /health_generate within 0.5 s" in said[-1]
    assert "given up after 2 restarts" in said[-1]


def test_a_server_that_was_well_is_replaced_at_once_however_often_it_is_killed(folders, tmp_path):
    async def run():
        care = Care(interval=0.05, timeout=5.0, first_wait=0.0, max_restarts=9, backoff=3600.0, longest_backoff=3600.0)
        async with servers(folders, [home(0, tmp_path)], care) as (made, _, _):
            seat = made.fleet.seats[0]
            for time_killed in range(3):
                await until(lambda: seat in made._keeper._well)  # found healthy in this life
                os.kill(await pid_of(seat), signal.SIGKILL)
                await until(lambda: made.restarts == time_killed + 1 and seat.state is State.SERVING)  # noqa: B023

    asyncio.run(run())


def test_pauses_grow_with_failures_in_a_row_up_to_the_longest():
    care = Care(interval=1, timeout=1, first_wait=0, max_restarts=9, backoff=1.0, longest_backoff=60.0)
    assert [care.pause(failures) for failures in range(1, 11)] == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_when_all_are_given_up_requests_and_publications_say_why(folders, tmp_path):
    async def run():
        care = Care(interval=10, timeout=0.5, first_wait=0.0, max_restarts=0)
        async with servers(folders, [home(0, tmp_path)], care) as (made, _, _):
            asked = asyncio.create_task(made.generate(PROMPT, Sampling(max_new_tokens=100_000)))
            await until(lambda: bool(made.fleet.seats[0].load))
            os.kill(await pid_of(made.fleet.seats[0]), signal.SIGKILL)
            await asked

    with pytest.raises(EngineError, match="no server is left: engine 0: "):
        asyncio.run(run())


def test_a_server_that_cannot_start_says_so_with_the_end_of_its_log(folders, tmp_path):
    async def run():
        async with servers(folders, [home(0, tmp_path, "--fail"), home(1, tmp_path)]):
            pass

    with pytest.raises(EngineError, match=r"(?s)engine 0 ended with exit status 1 while it started.*out of luck"):
        asyncio.run(run())


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path):
    slow = Launched(
        "engine 0",
        Command(words=(sys.executable, "-c", "import time; print('still loading', flush=True); time.sleep(600)")),
        tmp_path / "engine-0.log",
        lambda url: Client(url, "engine 0", vocabulary=9),
        seconds=1.0,
    )
    with pytest.raises(EngineError, match=r"(?s)was not ready within 1 s.*still loading"):
        asyncio.run(slow.open())
    assert slow.pid is None


def test_servers_that_run_already_are_used_and_left_alone(folders, tmp_path):
    async def run():
        own = home(0, tmp_path)
        url = (await own.open()).url
        visited = Visited("engine 0", url, lambda at: Client(at, "engine 0", vocabulary=100_000), seconds=9)
        async with servers(folders, [visited]) as (made, _, _):
            assert counted(await made.generate(PROMPT, Sampling(max_new_tokens=2))) == [101, 102]
        assert own.alive() is None
        await own.close()

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
        f"words = [sys.executable, '-I', {str(GUARD)!r}, str(reading), sys.executable, '-c', {inner!r}]\n"
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
