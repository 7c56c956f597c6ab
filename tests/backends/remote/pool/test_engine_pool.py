"""A pool of servers answers like one engine, whichever server is lost on the way."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.backends.remote.harness import LONG, PROMPT, SHORT, mortal, running_pool, until, url_of

from miles.backends.remote.client import SglangClient
from miles.backends.remote.pool import engine_pool
from miles.backends.remote.pool.engine_pool import EnginePool, EngineSlot, SlotState
from miles.cluster.straggler import EngineThroughput
from miles.core.errors import EngineError
from miles.core.types import Status, Version


def written(completion):
    return np.concatenate([span.tokens for span in completion.spans]).tolist()


def logprobs(completion):
    return np.concatenate([span.logprobs for span in completion.spans])


def alone(hosted, prompt, sampling):
    """What the engine itself answers."""
    return hosted.call(hosted.engine.generate(prompt, sampling))


def test_a_pool_answers_as_the_engines_in_it(pair, folders):
    asks = [(PROMPT[: 3 + i % 4], replace(SHORT, seed=i, temperature=1.0 if i % 3 else 0.0)) for i in range(12)]

    async def run():
        async with running_pool(folders.a, [url_of(h) for h in pair]) as made:
            answers = await asyncio.gather(*(made.pool.generate(*ask) for ask in asks))
            assert all(slot.load == 0 for slot in made.pool.slots) and not made.failures
            return answers

    for ask, answer in zip(asks, asyncio.run(run()), strict=True):
        expected = alone(pair[0], *ask)
        assert written(answer) == written(expected) and answer.finish_reason == expected.finish_reason == "length"
        assert np.allclose(logprobs(answer), logprobs(expected), atol=1e-5)
        assert [span.version for span in answer.spans] == [Version()]


def test_trajectories_at_one_prompt_go_to_one_server_until_it_has_too_much_to_do(pair, folders):
    async def run():
        async with running_pool(folders.a, [url_of(h) for h in pair]) as made:
            first = [asyncio.create_task(made.pool.generate(PROMPT, replace(LONG, seed=i))) for i in range(4)]
            await asyncio.sleep(0)
            assert sorted(slot.load for slot in made.pool.slots) == [0, 4]
            more = [asyncio.create_task(made.pool.generate(PROMPT, replace(LONG, seed=i))) for i in range(8)]
            await asyncio.sleep(0)
            assert min(slot.load for slot in made.pool.slots) >= 3
            await made.pool.abort()
            assert {answer.status for answer in await asyncio.gather(*first, *more)} == {Status.ABORTED}

    asyncio.run(run())


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_answer_goes_on_elsewhere_from_the_tokens_that_came(pair, folders, after):
    async def run():
        async with (
            mortal(url_of(pair[0]), after) as dying,
            running_pool(folders.a, [dying, url_of(pair[1])]) as made,
        ):
            answer = await made.pool.generate(PROMPT, SHORT)
            assert made.failures and made.failures[0][0] == "engine 0" and made.pool.num_retries == 1
            return answer

    answer, expected = asyncio.run(run()), alone(pair[1], PROMPT, SHORT)
    assert written(answer) == written(expected) and len(answer.spans) == 1
    assert np.allclose(logprobs(answer), logprobs(expected), atol=1e-5)


def test_when_no_server_is_left_whoever_waits_is_told_why(pair, folders):
    async def run():
        async with running_pool(folders.a, [url_of(pair[0])]) as made:
            slot = made.pool.slots[0]
            made.pool.mark_failed(slot, "it ended with SIGKILL")
            waiting = asyncio.create_task(made.pool.generate(PROMPT, SHORT))
            await asyncio.sleep(0)
            assert not waiting.done()
            made.pool.mark_failed(slot, "it ended with SIGKILL", dead=True)
            await waiting

    with pytest.raises(EngineError, match="no server is left: engine 0: it ended with SIGKILL"):
        asyncio.run(run())


def test_a_request_that_is_wrong_is_refused_and_sent_to_nobody_else(pair, folders):
    async def run():
        async with running_pool(folders.a, [url_of(h) for h in pair]) as made:
            with pytest.raises(EngineError, match="outside the vocabulary"):
                await made.pool.generate(np.array([100_000], np.int32), SHORT)
            assert not made.failures

    asyncio.run(run())


def test_a_server_whose_weights_someone_else_changes_is_found_out(pair, folders):
    async def run():
        async with running_pool(folders.a, [url_of(pair[0])]) as made:
            await made.clients[0].request("POST", "/update_weight_version", {"new_version": "mine"})
            await made.pool.generate(PROMPT, SHORT)

    with pytest.raises(EngineError, match="but answered with weights mine"):
        asyncio.run(run())


def test_a_fleet_that_sleeps_answers_when_it_is_awake(pair, folders):
    async def run():
        async with running_pool(folders.a, [url_of(h) for h in pair]) as made:
            await made.pool.wake()  # a run wakes what never slept
            running = asyncio.create_task(made.pool.generate(PROMPT, LONG))
            await until(lambda: any(client.num_inflight for client in made.clients))
            await made.pool.sleep()
            assert not running.done() and all(hosted.engine.is_paused for hosted in pair)
            await made.sync.publish(Version(number=1))
            assert all(slot.asleep for slot in made.pool.slots)
            await made.pool.wake()
            answer = await running
            assert {slot.state for slot in made.pool.slots} == {SlotState.SERVING}
            return answer

    answer = asyncio.run(run())
    assert len(written(answer)) == 300 and answer.spans[-1].version == Version(number=1)


def test_health_and_load_are_told(pair, folders):
    async def run():
        async with running_pool(folders.a, [url_of(h) for h in pair]) as made:
            assert await made.clients[0].check_health(30.0, generate=True) is None
            assert (await made.clients[0].load())["num_reqs"] == 0
            assert (await made.clients[0].server_info())["weight_version"] == "actor-0"
            assert await made.clients[0].flush()
            await made.clients[0].pause("in_place")
            assert "503" in (await made.clients[0].check_health(30.0, generate=True) or "")
            await made.clients[0].resume()
            return await made.pool.health()

    assert asyncio.run(run()) == {"engines": 2, "engines_serving": 2, "running": 0, "requests_retried": 0}


class Looked(EnginePool):
    """Counts how often a request looks for a server."""

    looks = 0

    @property
    def _num_pauses(self) -> int:
        self.looks += 1
        return self.__dict__["num_pauses"]

    @_num_pauses.setter
    def _num_pauses(self, value: int) -> None:
        self.__dict__["num_pauses"] = value


def test_requests_sleep_while_everyone_num_pauses_still_and_are_shared_out_after():
    async def run() -> None:
        pool = Looked([f"engine {i}" for i in range(64)], eos_token_ids=frozenset())
        client = SglangClient("http://nowhere", "engine", vocab_size=10)
        pool._num_pauses = 1
        waiting = [asyncio.create_task(chosen(pool, i)) for i in range(128)]
        await asyncio.sleep(0)
        before = pool.looks
        for slot in pool.slots:
            pool.mark_serving(slot, client, Version())
        for _ in range(3):
            await asyncio.sleep(0)
        assert pool.looks <= before + 2 * len(pool.slots), "each word woke every request"
        pool._num_pauses = 0
        pool.notify_change()
        slots = await asyncio.gather(*waiting)
        assert {slots.count(slot) for slot in pool.slots} == {2}

    asyncio.run(run())


async def chosen(pool: EnginePool, number: int) -> EngineSlot:
    slot = await pool._choose(hash(np.array([number], np.int32).tobytes()), set())
    pool._add_load(slot, +1)
    return slot


def test_the_pool_records_every_response_with_the_server_that_gave_it(pair, folders, monkeypatch):
    recorded: list[tuple[str, int]] = []

    class Recorder(EngineThroughput):
        def record(self, name, tokens, seconds, *, serving, version):
            assert serving == ["engine 0", "engine 1"] and version == 0 and seconds > 0
            recorded.append((name, tokens))

    monkeypatch.setattr(engine_pool, "EngineThroughput", Recorder)

    async def run():
        async with running_pool(folders.a, [url_of(hosted) for hosted in pair]) as made:
            prompts = [np.append(PROMPT, number).astype(np.int32) for number in range(6)]
            await asyncio.gather(*(made.pool.generate(prompt, SHORT) for prompt in prompts))

    asyncio.run(run())
    assert len(recorded) == 6 and {tokens for _, tokens in recorded} == {SHORT.max_new_tokens}
    assert {name for name, _ in recorded} == {"engine 0", "engine 1"}
