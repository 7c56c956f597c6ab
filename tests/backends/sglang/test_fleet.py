"""Several servers are one engine: the same answers as from one, whoever of them is lost on the way."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.backends.sglang.near import DRAWN, LONG, PROMPT, mortal, stand, until, url_of

from miles.backends.sglang.fleet import State
from miles.core.errors import EngineError
from miles.core.types import Status, Version


def written(completion):
    return np.concatenate([span.tokens for span in completion.spans]).tolist()


def logprobs(completion):
    return np.concatenate([span.logprobs for span in completion.spans])


def alone(hosted, prompt, sampling):
    """What the engine itself answers."""
    return hosted.call(hosted.engine.generate(prompt, sampling))


def test_a_fleet_answers_as_the_engines_in_it(pair, folders):
    asks = [(PROMPT[: 3 + i % 4], replace(DRAWN, seed=i, temperature=1.0 if i % 3 else 0.0)) for i in range(12)]

    async def run():
        async with stand(folders.a, [url_of(h) for h in pair]) as made:
            answers = await asyncio.gather(*(made.fleet.generate(*ask) for ask in asks))
            assert all(seat.load == 0 for seat in made.fleet.seats) and not made.troubles
            return answers

    for ask, answer in zip(asks, asyncio.run(run()), strict=True):
        expected = alone(pair[0], *ask)
        assert written(answer) == written(expected) and answer.reason == expected.reason == "length"
        assert np.allclose(logprobs(answer), logprobs(expected), atol=1e-5)
        assert [span.version for span in answer.spans] == [Version()]


def test_attempts_at_one_prompt_go_to_one_server_until_it_has_too_much_to_do(pair, folders):
    async def run():
        async with stand(folders.a, [url_of(h) for h in pair]) as made:
            first = [asyncio.create_task(made.fleet.generate(PROMPT, replace(LONG, seed=i))) for i in range(4)]
            await asyncio.sleep(0)
            assert sorted(seat.load for seat in made.fleet.seats) == [0, 4]
            more = [asyncio.create_task(made.fleet.generate(PROMPT, replace(LONG, seed=i))) for i in range(8)]
            await asyncio.sleep(0)
            assert min(seat.load for seat in made.fleet.seats) >= 3
            await made.fleet.abort()
            assert {answer.status for answer in await asyncio.gather(*first, *more)} == {Status.ABORTED}

    asyncio.run(run())


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_answer_goes_on_elsewhere_from_the_tokens_that_came(pair, folders, after):
    async def run():
        async with (
            mortal(url_of(pair[0]), after) as dying,
            stand(folders.a, [dying, url_of(pair[1])]) as made,
        ):
            answer = await made.fleet.generate(PROMPT, DRAWN)
            assert made.troubles and made.troubles[0][0] == "engine 0" and made.fleet.retried == 1
            return answer

    answer, expected = asyncio.run(run()), alone(pair[1], PROMPT, DRAWN)
    assert written(answer) == written(expected) and len(answer.spans) == 1
    assert np.allclose(logprobs(answer), logprobs(expected), atol=1e-5)


def test_when_no_server_is_left_whoever_waits_is_told_why(pair, folders):
    async def run():
        async with stand(folders.a, [url_of(pair[0])]) as made:
            seat = made.fleet.seats[0]
            made.fleet.drop(seat, "it ended with SIGKILL")
            waiting = asyncio.create_task(made.fleet.generate(PROMPT, DRAWN))
            await asyncio.sleep(0)
            assert not waiting.done()
            made.fleet.drop(seat, "it ended with SIGKILL", gone=True)
            await waiting

    with pytest.raises(EngineError, match="no server is left: engine 0: it ended with SIGKILL"):
        asyncio.run(run())


def test_a_request_that_is_wrong_is_refused_and_sent_to_nobody_else(pair, folders):
    async def run():
        async with stand(folders.a, [url_of(h) for h in pair]) as made:
            with pytest.raises(EngineError, match="outside the vocabulary"):
                await made.fleet.generate(np.array([100_000], np.int32), DRAWN)
            assert not made.troubles

    asyncio.run(run())


def test_a_server_whose_weights_someone_else_changes_is_found_out(pair, folders):
    async def run():
        async with stand(folders.a, [url_of(pair[0])]) as made:
            await made.clients[0].ask("POST", "/update_weight_version", {"new_version": "mine"})
            await made.fleet.generate(PROMPT, DRAWN)

    with pytest.raises(EngineError, match="answers with weights it calls mine"):
        asyncio.run(run())


def test_a_fleet_that_sleeps_answers_when_it_is_awake(pair, folders):
    async def run():
        async with stand(folders.a, [url_of(h) for h in pair]) as made:
            await made.fleet.wake()  # a run wakes what never slept
            running = asyncio.create_task(made.fleet.generate(PROMPT, LONG))
            await until(lambda: any(client.flying for client in made.clients))
            await made.fleet.sleep()
            assert not running.done() and all(hosted.engine.resting for hosted in pair)
            await made.sync.publish(Version(number=1))
            assert all(seat.asleep for seat in made.fleet.seats)
            await made.fleet.wake()
            answer = await running
            assert {seat.state for seat in made.fleet.seats} == {State.SERVING}
            return answer

    answer = asyncio.run(run())
    assert len(written(answer)) == 300 and answer.spans[-1].version == Version(number=1)


def test_health_and_load_are_told(pair, folders):
    async def run():
        async with stand(folders.a, [url_of(h) for h in pair]) as made:
            assert await made.clients[0].healthy(30.0, generate=True) is None
            assert (await made.clients[0].load())["num_reqs"] == 0
            assert (await made.clients[0].server_info())["weight_version"] == "actor-0"
            assert await made.clients[0].flush()
            await made.clients[0].pause("in_place")
            assert "503" in (await made.clients[0].healthy(30.0, generate=True) or "")
            await made.clients[0].resume()
            return await made.fleet.health()

    assert asyncio.run(run()) == {"engines": 2, "engines_serving": 2, "running": 0, "requests_retried": 0}
