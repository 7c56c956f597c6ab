"""Engines fail and recover, and requests wait for them within their timeouts."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from tests.cluster.router.harness import ScriptedEngine, reply, run, running_router
from tests.cluster.router.test_proxy import hang, status

from miles.cluster.router.engine_state import EngineState

EVERY = 2.0
OPTIONS: dict[str, Any] = {"manual": True, "health_check_interval_secs": EVERY}


# -- quarantine and return --------------------------------------------------------------------------


def test_failed_probes_in_a_row_put_an_engine_away_and_a_good_one_between_does_not():
    async def test():
        async with running_router(2, health_failure_threshold=3, **OPTIONS) as h:
            h.engines[0].well = False
            await h.probe(EVERY, 2)
            assert h.engine(0).state is EngineState.HEALTHY and h.engine(0).consecutive_failures == 2
            h.engines[0].well = True
            await h.probe(EVERY)
            assert h.engine(0).consecutive_failures == 0
            h.engines[0].well = False
            await h.probe(EVERY, 3)
            assert h.engine(0).state is EngineState.QUARANTINED
            assert h.engine(0).why == "it answered /health with status 503"
            assert h.engine(1).state is EngineState.HEALTHY
            answers = [await h.ask() for _ in range(4)]
            assert {headers["x-miles-engine"] for _, _, headers in answers} == {h.engines[1].id}

    run(test)


def test_each_quarantine_lasts_twice_as_long_as_the_one_before_up_to_a_limit():
    async def test():
        async with running_router(1, quarantine_secs=1.0, max_quarantine_secs=5.0, **OPTIONS) as h:
            await h.engines[0].stop()
            await h.probe(EVERY)
            lasted = []
            for _ in range(5):
                (due,) = h.clock.pending("_start_check")
                lasted.append(round(due, 6))
                await h.probe(due)
            assert lasted == [1.0, 2.0, 4.0, 5.0, 5.0]

    run(test)


def test_an_engine_that_comes_back_is_tried_with_one_request_at_a_time_before_it_is_trusted():
    async def test():
        async with running_router(1, quarantine_secs=1.0, health_success_threshold=2, **OPTIONS) as h:
            engine = h.engines[0]
            await engine.stop()
            await h.probe(EVERY)
            assert h.engine(0).state is EngineState.QUARANTINED
            await engine.start()
            await h.probe(1.0)
            assert h.engine(0).state is EngineState.PROBATION
            release, engine.arrived.count = asyncio.Event(), 0

            async def wait(request: web.Request) -> web.StreamResponse:
                await release.wait()
                return await reply(request)

            engine.behave = wait
            asking = [asyncio.create_task(h.ask()) for _ in range(4)]
            await engine.arrived.reach(1)
            while len(h.router.pool.waiting) < 3:  # not all may have reached the router yet
                await asyncio.sleep(0)
            assert (h.engine(0).outstanding, len(h.router.pool.waiting)) == (1, 3)
            release.set()
            assert [code for code, _, _ in await asyncio.gather(*asking)] == 4 * [200]
            assert h.engine(0).state is EngineState.HEALTHY and h.engine(0).quarantine_secs == 0

    run(test)


def test_a_failure_in_probation_goes_straight_back_to_quarantine():
    async def test():
        async with running_router(2, quarantine_secs=1.0, **OPTIONS) as h:
            await h.engines[0].stop()
            await h.probe(EVERY)
            await h.engines[0].start()
            await h.probe(1.0)
            assert h.engine(0).state is EngineState.PROBATION
            h.engines[0].behave = status(500)
            while not h.engines[0].seen:
                assert (await h.ask())[0] == 200
            assert h.engine(0).state is EngineState.QUARANTINED and h.engine(0).quarantine_secs == 2.0

    run(test)


def test_a_refused_connection_puts_an_engine_away_at_once_and_the_request_goes_elsewhere():
    async def test():
        async with running_router(2, policy="round_robin", **OPTIONS) as h:
            await h.engines[0].stop()
            answers = [await h.ask() for _ in range(4)]
            assert {headers["x-miles-engine"] for _, _, headers in answers} == {h.engines[1].id}
            assert h.engine(0).state is EngineState.QUARANTINED
            assert "no connection could be opened" in h.engine(0).why

    run(test)


def test_errors_in_a_row_put_an_engine_away_but_not_the_last_one():
    async def test():
        async with running_router(2, health_failure_threshold=3, policy="round_robin", **OPTIONS) as h:
            h.engines[0].behave = status(500)
            for _ in range(6):
                assert (await h.ask())[0] == 200
            assert h.engine(0).state is EngineState.QUARANTINED
            h.engines[1].behave = status(500)
            assert [(await h.ask())[0] for _ in range(5)] == 5 * [500]
            assert h.engine(1).state is EngineState.HEALTHY, "the fault may be the requests'"

    run(test)


def test_a_request_that_fails_on_every_engine_condemns_none():
    async def poisoned(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500) if b"poison" in await request.read() else await reply(request)

    async def refused_elsewhere(request: web.Request) -> web.StreamResponse:
        return web.Response(status=400) if b"poison" in await request.read() else await reply(request)

    async def test():
        async with running_router(2, health_failure_threshold=1, policy="round_robin", **OPTIONS) as h:
            h.engines[0].behave = h.engines[1].behave = poisoned
            for _ in range(4):
                assert (await h.ask(body={"text": "poison"}))[0] == 500
            h.engines[1].behave = refused_elsewhere
            for _ in range(4):
                assert (await h.ask(body={"text": "poison"}))[0] == 400
            assert [h.engine(i).state for i in range(2)] == 2 * [EngineState.HEALTHY]
            h.engines[1].behave = reply
            assert [(await h.ask(body={"text": "poison"}))[0] for _ in range(2)] == [200, 200]
            assert h.engine(0).state is EngineState.QUARANTINED, "another engine could answer it"

    run(test)


def test_busy_is_no_illness():
    async def test():
        async with running_router(2, health_failure_threshold=1, **OPTIONS) as h:
            for engine in h.engines:
                engine.behave = status(503)
            for _ in range(3):
                assert (await h.ask())[0] == 503
            assert [h.engine(i).state for i in range(2)] == 2 * [EngineState.HEALTHY]

    run(test)


def test_what_an_engine_has_not_begun_to_answer_is_taken_from_it_when_its_health_fails():
    async def test():
        async with running_router(2, health_failure_threshold=1, **OPTIONS) as h:
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
        async with running_router(2, health_failure_threshold=1, **OPTIONS) as h:
            assert (await h.ask("/pause_generation"))[0] == 200
            h.engines[0].well = False
            await h.probe(EVERY, 3)
            assert h.engine(0).state is EngineState.HEALTHY
            assert (await h.ask("/continue_generation"))[0] == 200
            await h.probe(EVERY)
            assert h.engine(0).state is EngineState.QUARANTINED

    run(test)


# -- weights ----------------------------------------------------------------------------------------


def test_an_engine_with_other_weights_is_kept_out_until_they_match():
    async def test():
        async with running_router(1, **OPTIONS) as h:
            late = ScriptedEngine(h.arrived)
            late.version = "0"
            await late.start()
            code, body, _ = await h.ask("/engines", {"url": late.url})
            assert (code, body["state"]) == (201, "starting")
            await h.logs.wait_for("is outdated")
            facts = (await h.facts())[late.id]
            assert facts["why"] == "it has weight version 0, but the serving engines have 3"
            assert {(await h.ask())[2]["x-miles-engine"] for _ in range(4)} == {h.engines[0].id}
            late.version = "3"
            await h.probe(EVERY)
            assert h.router.pool.engines[late.id].state is EngineState.HEALTHY
            await late.stop()

    run(test)


def test_an_engine_with_other_weights_may_be_let_in():
    async def test():
        async with running_router(1, require_same_weights=False, **OPTIONS) as h:
            late = ScriptedEngine(h.arrived)
            late.version = "0"
            await late.start()
            await h.ask("/engines", {"url": late.url})
            await h.logs.wait_for(f"{late.id} is healthy")
            await late.stop()

    run(test)


# -- waiting ----------------------------------------------------------------------------------------


def test_a_request_waits_for_an_engine_to_come_back():
    async def test():
        async with running_router(1, quarantine_secs=1.0, **OPTIONS) as h:
            await h.engines[0].stop()
            await h.probe(EVERY)
            asking = asyncio.create_task(h.ask())
            await h.clock.has("_time_out", 1)
            await h.engines[0].start()
            await h.probe(1.0)
            assert (await asking)[0] == 200

    run(test)


def test_a_request_that_finds_no_engine_in_time_is_refused_with_a_sentence():
    async def test():
        async with running_router(1, queue_timeout_secs=0.5, quarantine_secs=1.0, **OPTIONS) as h:
            await h.engines[0].stop()
            await h.probe(EVERY)
            asking = asyncio.create_task(h.ask())
            await h.clock.has("_time_out", 1)
            h.clock.advance(0.6)
            code, body, headers = await asking
            assert code == 503 and headers["retry-after"] == "1"
            assert body["error"]["message"] == (
                f"No engine is free to take the request ({h.engines[0].id} is quarantined); "
                "none became free within 0.5 seconds."
            )

    run(test)


def test_the_line_is_bounded():
    async def test():
        async with running_router(1, queue_size=2, **OPTIONS) as h:
            await h.engines[0].stop()
            await h.probe(EVERY)
            waiting = [asyncio.create_task(h.ask()) for _ in range(2)]
            await h.clock.has("_time_out", 2)
            code, body, _ = await h.ask()
            assert code == 503 and body["error"]["message"].endswith("and 2 requests are waiting already.")
            for task in waiting:
                task.cancel()

    run(test)


def test_a_router_without_engines_says_so():
    async def test():
        async with running_router(0, queue_size=0) as h:
            code, body, _ = await h.ask()
            assert code == 503
            assert body["error"]["message"].startswith("The router has no engines (POST /engines adds one)")
            assert (await h.ask("/health", method="GET"))[0] == 503
            assert (await h.ask("/flush_cache"))[0] == 503

    run(test)


def test_no_more_requests_are_at_the_engines_than_allowed_and_none_is_lost():
    async def test():
        async with running_router(2, max_concurrent_requests=3) as h:
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
            assert [body["meta_info"]["id"] for _, body, _ in answers] == [str(i) for i in range(40)]
            assert most == 3
            assert h.router.pool.outstanding == 0

    run(test)


@pytest.mark.parametrize(("abort", "turned_away"), [({"abort_all": True}, 2), ({"rid": "a"}, 1)])
def test_an_abort_reaches_requests_that_wait_in_the_router(abort: dict[str, Any], turned_away: int):
    async def test():
        async with running_router(1, quarantine_secs=1.0, **OPTIONS) as h:
            await h.engines[0].stop()
            await h.probe(EVERY)
            waiting = [asyncio.create_task(h.ask(body={"rid": rid})) for rid in ("a", "b")]
            await h.clock.has("_time_out", 2)
            assert (await h.ask("/abort_request", abort))[0] == 502, "the engine itself could not be reached"
            await h.engines[0].start()
            await h.probe(1.0)
            codes = sorted([code for code, _, _ in await asyncio.gather(*waiting)])
            assert codes == (2 - turned_away) * [200] + turned_away * [503]

    run(test)
