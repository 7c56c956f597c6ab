"""Engines fall ill and come back, and requests wait for them, for so long and no longer."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from tests.cluster.route.house import ScriptedEngine, house, reply, run
from tests.cluster.route.test_forward import hang, status

from miles.cluster.route.engine import State

EVERY = 2.0
KNOBS: dict[str, Any] = {"manual": True, "health_check_interval_secs": EVERY}


# -- quarantine and return --------------------------------------------------------------------------


def test_failed_probes_in_a_row_put_an_engine_away_and_a_good_one_between_does_not():
    async def test():
        async with house(2, health_failure_threshold=3, **KNOBS) as h:
            h.engines[0].well = False
            await h.probe(EVERY, 2)
            assert h.engine(0).state is State.HEALTHY and h.engine(0).failed_in_a_row == 2
            h.engines[0].well = True
            await h.probe(EVERY)
            assert h.engine(0).failed_in_a_row == 0
            h.engines[0].well = False
            await h.probe(EVERY, 3)
            assert h.engine(0).state is State.QUARANTINED
            assert h.engine(0).why == "it answered /health with status 503"
            assert h.engine(1).state is State.HEALTHY
            answers = [await h.ask() for _ in range(4)]
            assert {headers["x-miles-engine"] for _, _, headers in answers} == {h.engines[1].id}

    run(test)


def test_each_quarantine_lasts_twice_as_long_as_the_one_before_up_to_a_limit():
    async def test():
        async with house(1, quarantine_secs=1.0, max_quarantine_secs=5.0, **KNOBS) as h:
            await h.engines[0].stop()
            await h.probe(EVERY)
            lasted = []
            for _ in range(5):
                (due,) = h.clock.pending("_start")
                lasted.append(round(due, 6))
                await h.probe(due)
            assert lasted == [1.0, 2.0, 4.0, 5.0, 5.0]

    run(test)


def test_an_engine_that_comes_back_is_tried_with_one_request_at_a_time_before_it_is_trusted():
    async def test():
        async with house(1, quarantine_secs=1.0, health_success_threshold=2, **KNOBS) as h:
            engine = h.engines[0]
            await engine.stop()
            await h.probe(EVERY)
            assert h.engine(0).state is State.QUARANTINED
            await engine.start()
            await h.probe(1.0)
            assert h.engine(0).state is State.PROBATION
            release, engine.arrived.count = asyncio.Event(), 0

            async def wait(request: web.Request) -> web.StreamResponse:
                await release.wait()
                return await reply(request)

            engine.behave = wait
            asking = [asyncio.create_task(h.ask()) for _ in range(4)]
            await engine.arrived.reach(1)
            while len(h.router.fleet.waiting) < 3:  # not all may have reached the router yet
                await asyncio.sleep(0)
            assert (h.engine(0).outstanding, len(h.router.fleet.waiting)) == (1, 3)
            release.set()
            assert [code for code, _, _ in await asyncio.gather(*asking)] == 4 * [200]
            assert h.engine(0).state is State.HEALTHY and h.engine(0).quarantine_secs == 0

    run(test)


def test_a_failure_in_probation_goes_straight_back_to_quarantine():
    async def test():
        async with house(2, quarantine_secs=1.0, **KNOBS) as h:
            await h.engines[0].stop()
            await h.probe(EVERY)
            await h.engines[0].start()
            await h.probe(1.0)
            assert h.engine(0).state is State.PROBATION
            h.engines[0].behave = status(500)
            while not h.engines[0].seen:
                assert (await h.ask())[0] == 200
            assert h.engine(0).state is State.QUARANTINED and h.engine(0).quarantine_secs == 2.0

    run(test)


def test_a_refused_connection_puts_an_engine_away_at_once_and_the_request_goes_elsewhere():
    async def test():
        async with house(2, policy="round_robin", **KNOBS) as h:
            await h.engines[0].stop()
            answers = [await h.ask() for _ in range(4)]
            assert {headers["x-miles-engine"] for _, _, headers in answers} == {h.engines[1].id}
            assert h.engine(0).state is State.QUARANTINED
            assert "no connection could be made" in h.engine(0).why

    run(test)


def test_errors_in_a_row_put_an_engine_away_but_not_the_last_one():
    async def test():
        async with house(2, health_failure_threshold=3, policy="round_robin", **KNOBS) as h:
            h.engines[0].behave = status(500)
            for _ in range(6):
                assert (await h.ask())[0] == 200
            assert h.engine(0).state is State.QUARANTINED
            h.engines[1].behave = status(500)
            assert [(await h.ask())[0] for _ in range(5)] == 5 * [500]
            assert h.engine(1).state is State.HEALTHY, "the fault may be the requests'"

    run(test)


def test_busy_is_no_illness():
    async def test():
        async with house(2, health_failure_threshold=1, **KNOBS) as h:
            for engine in h.engines:
                engine.behave = status(503)
            for _ in range(3):
                assert (await h.ask())[0] == 503
            assert [h.engine(i).state for i in range(2)] == 2 * [State.HEALTHY]

    run(test)


def test_what_an_engine_has_not_begun_to_answer_is_taken_from_it_when_its_health_fails():
    async def test():
        async with house(2, health_failure_threshold=1, **KNOBS) as h:
            for engine in h.engines:
                engine.behave = hang
            asking = asyncio.create_task(h.ask(body={"rid": "r"}))
            await h.arrived.reach(1)
            ill, other = sorted(h.engines, key=lambda engine: -engine.arrived.count)
            ill.well, other.behave = False, reply
            await h.probe(EVERY)
            code, _, headers = await asking
            assert code == 200 and headers["x-miles-engine"] == other.id

    run(test)


def test_an_engine_that_was_told_to_pause_may_be_unready_for_as_long_as_it_is():
    async def test():
        async with house(2, health_failure_threshold=1, **KNOBS) as h:
            assert (await h.ask("/pause_generation"))[0] == 200
            h.engines[0].well = False
            await h.probe(EVERY, 3)
            assert h.engine(0).state is State.HEALTHY
            assert (await h.ask("/continue_generation"))[0] == 200
            await h.probe(EVERY)
            assert h.engine(0).state is State.QUARANTINED

    run(test)


# -- weights ----------------------------------------------------------------------------------------


def test_an_engine_with_other_weights_is_kept_out_until_they_match():
    async def test():
        async with house(1, **KNOBS) as h:
            late = ScriptedEngine(h.arrived)
            late.version = "0"
            await late.start()
            code, told, _ = await h.ask("/engines", {"url": late.url})
            assert (code, told["state"]) == (201, "starting")
            await h.ears.hear("is outdated")
            facts = (await h.facts())[late.id]
            assert facts["why"] == "it has weight version 0, but the engines that serve have 3"
            assert {(await h.ask())[2]["x-miles-engine"] for _ in range(4)} == {h.engines[0].id}
            late.version = "3"
            await h.probe(EVERY)
            assert h.router.fleet.engines[late.id].state is State.HEALTHY
            await late.stop()

    run(test)


def test_an_engine_with_other_weights_may_be_let_in():
    async def test():
        async with house(1, require_same_weights=False, **KNOBS) as h:
            late = ScriptedEngine(h.arrived)
            late.version = "0"
            await late.start()
            await h.ask("/engines", {"url": late.url})
            await h.ears.hear(f"{late.id} is healthy")
            await late.stop()

    run(test)


# -- waiting ----------------------------------------------------------------------------------------


def test_a_request_waits_for_an_engine_to_come_back():
    async def test():
        async with house(1, quarantine_secs=1.0, **KNOBS) as h:
            await h.engines[0].stop()
            await h.probe(EVERY)
            asking = asyncio.create_task(h.ask())
            await h.clock.has("_turn_away", 1)
            await h.engines[0].start()
            await h.probe(1.0)
            assert (await asking)[0] == 200

    run(test)


def test_a_request_that_finds_no_engine_in_time_is_refused_with_a_sentence():
    async def test():
        async with house(1, queue_timeout_secs=0.5, quarantine_secs=1.0, **KNOBS) as h:
            await h.engines[0].stop()
            await h.probe(EVERY)
            asking = asyncio.create_task(h.ask())
            await h.clock.has("_turn_away", 1)
            h.clock.advance(0.6)
            code, told, headers = await asking
            assert code == 503 and headers["retry-after"] == "1"
            assert told["error"]["message"] == (
                f"No engine is free to take the request ({h.engines[0].id} is quarantined); "
                "none came free within 0.5 seconds."
            )

    run(test)


def test_the_line_is_bounded():
    async def test():
        async with house(1, queue_size=2, **KNOBS) as h:
            await h.engines[0].stop()
            await h.probe(EVERY)
            waiting = [asyncio.create_task(h.ask()) for _ in range(2)]
            await h.clock.has("_turn_away", 2)
            code, told, _ = await h.ask()
            assert code == 503 and told["error"]["message"].endswith("and 2 requests wait already.")
            for task in waiting:
                task.cancel()

    run(test)


def test_a_router_without_engines_says_so():
    async def test():
        async with house(0, queue_size=0) as h:
            code, told, _ = await h.ask()
            assert code == 503
            assert told["error"]["message"].startswith("The router has no engines (POST /engines adds one)")
            assert (await h.ask("/health", method="GET"))[0] == 503
            assert (await h.ask("/flush_cache"))[0] == 503

    run(test)


def test_no_more_requests_are_at_the_engines_than_allowed_and_none_is_lost():
    async def test():
        async with house(2, max_concurrent_requests=3) as h:
            now, most = 0, 0

            async def count(request: web.Request) -> web.StreamResponse:
                nonlocal now, most
                now += 1
                most = max(most, now)
                for _ in range(5):
                    await asyncio.sleep(0)
                now -= 1
                return await reply(request)

            for engine in h.engines:
                engine.behave = count
            answers = await asyncio.gather(*(h.ask(body={"rid": str(i)}) for i in range(40)))
            assert [told["meta_info"]["id"] for _, told, _ in answers] == [str(i) for i in range(40)]
            assert most == 3
            assert h.router.fleet.outstanding == 0

    run(test)


@pytest.mark.parametrize(("abort", "turned_away"), [({"abort_all": True}, 2), ({"rid": "a"}, 1)])
def test_an_abort_reaches_requests_that_wait_in_the_router(abort: dict[str, Any], turned_away: int):
    async def test():
        async with house(1, quarantine_secs=1.0, **KNOBS) as h:
            await h.engines[0].stop()
            await h.probe(EVERY)
            waiting = [asyncio.create_task(h.ask(body={"rid": rid})) for rid in ("a", "b")]
            await h.clock.has("_turn_away", 2)
            assert (await h.ask("/abort_request", abort))[0] == 502, "the engine itself could not be reached"
            await h.engines[0].start()
            await h.probe(1.0)
            codes = sorted([code for code, _, _ in await asyncio.gather(*waiting)])
            assert codes == (2 - turned_away) * [200] + turned_away * [503]

    run(test)
