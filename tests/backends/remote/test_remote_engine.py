"""Servers are added and removed while requests are in flight: new ones have the last weights, no request is lost."""

import asyncio

import pytest
from tests.backends.remote.harness import until
from tests.backends.remote.pool.test_health_monitor import PROMPT, counted, local_server, pid_of, servers

from miles.backends.remote.client import SglangClient
from miles.backends.remote.pool.engine_pool import SlotState
from miles.backends.remote.process.server import ExternalServer
from miles.core.errors import EngineError
from miles.core.protocols import SamplingParams
from miles.core.types import Version


def asked_of(made, count, tokens=300):
    return [
        asyncio.create_task(made.generate(PROMPT + 1000 * i, SamplingParams(max_new_tokens=tokens)))
        for i in range(count)
    ]


def whole(answers, tokens=300):
    return all(counted(a) == [100 + 1000 * i + n for n in range(1, tokens + 1)] for i, a in enumerate(answers))


def test_a_server_that_joins_has_the_last_weights_before_its_first_request(folders, tmp_path):
    async def run():
        async with servers(folders, [local_server(0, tmp_path)]) as (made, sync, said):
            await sync.publish(Version(number=3))
            asked = asked_of(made, 4, tokens=1500)
            slot = await made.add("engine 1", local_server(1, tmp_path))
            assert slot.version == Version(number=3) and slot.client is not None and not slot.load
            assert (await slot.client.fetch_info()).weight_version == "actor-3"
            more = asyncio.create_task(made.generate(PROMPT + 50_000, SamplingParams(max_new_tokens=300)))
            await until(lambda: slot.load > 0)
            await sync.publish(Version(number=4))
            answers = await asyncio.gather(*asked), await more
            return answers, said, {each.version for each in made.pool.slots}, await made.health()

    (asked, more), said, versions, health = asyncio.run(run())
    assert whole(asked, 1500) and counted(more) == list(range(50_101, 50_401))
    assert versions == {Version(number=4)} and health["engines_serving"] == 2
    assert "engine 1 has joined." in said


def test_a_server_that_leaves_finishes_what_it_has_or_gives_it_to_the_others(folders, tmp_path):
    async def run(seconds):
        async with servers(folders, [local_server(i, tmp_path) for i in range(2)]) as (made, sync, said):
            asked = asked_of(made, 6)
            await until(lambda: all(slot.load for slot in made.pool.slots))
            leaving = made.pool.slots[0]
            pid = await pid_of(leaving)
            await made.remove(leaving, seconds)
            stays = made.pool.slots
            assert [slot.name for slot in stays] == ["engine 1"] and leaving.state is SlotState.DEAD
            assert not leaving.load and pid
            await sync.publish(Version(number=1))
            answers = await asyncio.gather(*asked)
            assert counted(await made.generate(PROMPT, SamplingParams(max_new_tokens=2))) == [101, 102]
            return answers, said, made.pool.num_retries, made.restarts

    for seconds in (60.0, 0.0):
        answers, said, retried, restarts = asyncio.run(run(seconds))
        assert whole(answers) and "engine 0 has left." in said
        assert not retried and not restarts  # nobody took it for lost


def test_a_publication_does_not_wait_for_a_server_that_leaves(folders, tmp_path):
    async def run():
        async with servers(folders, [local_server(i, tmp_path) for i in range(2)]) as (made, sync, _):
            asked = asked_of(made, 2, tokens=2000)
            await until(lambda: all(slot.load for slot in made.pool.slots))
            leaving = asyncio.create_task(made.remove(made.pool.slots[0], 600.0))
            await until(lambda: made.pool.slots[0].state is SlotState.DRAINING)
            await sync.publish(Version(number=1))
            await leaving
            return await asyncio.gather(*asked)

    answers = asyncio.run(run())
    assert whole(answers, 2000)
    assert [span.version.number for span in answers[0].spans] == [0, 1]


def test_a_server_that_cannot_join_leaves_no_trace(folders, tmp_path):
    async def run():
        async with servers(folders, [local_server(0, tmp_path)]) as (made, sync, _):
            with pytest.raises(EngineError, match="engine 1 ended with exit code 1 while it started"):
                await made.add("engine 1", local_server(1, tmp_path, "--fail"))
            nobody = ExternalServer(
                "engine 2", "http://127.0.0.1:9", lambda at: SglangClient(at, "engine 2", vocab_size=9), seconds=0
            )
            with pytest.raises(EngineError, match=r"engine 2 at http://127\.0\.0\.1:9 does not answer"):
                await made.add("engine 2", nobody)
            assert [slot.name for slot in made.pool.slots] == ["engine 0"]
            await sync.publish(Version(number=1))
            return counted(await made.generate(PROMPT, SamplingParams(max_new_tokens=2)))

    assert asyncio.run(run()) == [101, 102]
