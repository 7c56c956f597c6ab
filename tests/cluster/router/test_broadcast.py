"""Broadcasts reach every engine, and the response reports the result of each."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from tests.cluster.router.harness import ScriptedEngine, reply, run, running_router
from tests.cluster.router.test_proxy import die, hang, status

from miles.cluster.router.broadcast import BROADCASTS
from miles.cluster.router.engine_state import EngineState


async def done(request: web.Request) -> web.StreamResponse:
    return web.json_response({"success": True, "message": "Succeeded."})


@pytest.mark.parametrize("path", sorted(BROADCASTS - {"/init_weights_update_group"}))
def test_all_engines_get_it_and_the_answer_has_each_ones_own(path: str):
    async def test():
        async with running_router(3) as h:
            for engine in h.engines:
                engine.behave = done
            code, body, _ = await h.ask(path, {"x": 1}, headers={"x-mine": "1"})
            assert code == 200 and body["success"] is True
            assert set(body["engines"]) == {engine.id for engine in h.engines}
            assert all(each["body"] == {"success": True, "message": "Succeeded."} for each in body["engines"].values())
            assert [engine.bodies(path) for engine in h.engines] == 3 * [[{"x": 1}]]
            assert h.engines[0].seen[0][2]["x-mine"] == "1"

    run(test)


def test_a_broadcast_may_be_a_get():
    async def test():
        async with running_router(2) as h:
            assert (await h.ask("/flush_cache", method="GET"))[0] == 200
            assert [engine.seen[0][0] for engine in h.engines] == ["GET", "GET"]

    run(test)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (status(400), 'status 400: {"error": {"message": "no"}}'),
        (die, "it closed the connection before it responded"),
    ],
)
def test_a_partial_failure_is_a_502_that_names_who_and_why(bad: Any, why: str):
    async def test():
        async with running_router(3) as h:
            h.engines[1].behave = bad
            code, body, _ = await h.ask("/update_weights_from_disk", {"model_path": "m"})
            assert code == 502 and body["success"] is False
            assert body["message"] == (f"1 of 3 engines failed /update_weights_from_disk: {h.engines[1].id}: {why}")
            assert [each["success"] for each in body["engines"].values()] == [True, False, True]
            assert len(h.engines[1].bodies("/update_weights_from_disk")) == 1, "sent once"

    run(test)


def test_success_false_in_a_200_is_a_failure_too():
    async def test():
        async with running_router(2) as h:

            async def no(request: web.Request) -> web.StreamResponse:
                return web.json_response({"success": False, "message": "Failed to update."})

            h.engines[0].behave = no
            code, body, _ = await h.ask("/update_weights_from_distributed", {"names": []})
            assert code == 502 and body["message"].endswith(f"{h.engines[0].id}: Failed to update.")

    run(test)


def test_an_engine_that_hangs_is_given_up_on():
    async def test():
        async with running_router(2, manual=True, broadcast_timeout_secs=7.0) as h:
            h.engines[0].behave = hang
            asking = asyncio.create_task(h.ask("/flush_cache"))
            await h.arrived.reach(2)
            await h.clock.has("time_out", 1)
            h.clock.advance(7.5)
            code, body, _ = await asking
            assert code == 502 and "it did not answer within 7 seconds" in body["message"]

    run(test)


def test_an_engine_that_missed_new_weights_serves_no_more_until_it_has_whole_ones():
    async def test():
        async with running_router(2, manual=True, quarantine_secs=1.0) as h:
            h.engines[0].behave = status(500)
            assert (await h.ask("/update_weights_from_tensor", {}))[0] == 502
            h.engines[0].behave = reply
            await h.probe(2.0, 2)
            assert h.engine(0).state is EngineState.OUTDATED
            assert h.engine(0).why.startswith("it missed /update_weights_from_tensor (status 500")
            assert {(await h.ask())[2]["x-miles-engine"] for _ in range(4)} == {h.engines[1].id}
            assert (await h.ask("/update_weights_from_tensor", {}))[0] == 200
            await h.probe(2.0)
            assert h.engine(0).state is EngineState.OUTDATED, "one piece of the next weights does not make up for it"
            assert (await h.ask("/update_weights_from_disk", {}))[0] == 200
            await h.probe(2.0)
            assert h.engine(0).state is EngineState.PROBATION

    run(test)


def test_an_engine_that_missed_weights_may_be_added_again():
    async def test():
        async with running_router(2, manual=True, quarantine_secs=1.0) as h:
            h.engines[0].behave = status(500)
            assert (await h.ask("/update_weights_from_tensor", {}))[0] == 502
            await h.probe(2.0, 2)
            assert h.engine(0).state is EngineState.OUTDATED
            before = len(h.logs.messages)
            assert (await h.ask("/engines", {"url": h.engines[0].url}))[0] == 201
            await h.logs.wait_for("is healthy", since=before)

    run(test)


def test_the_version_of_new_weights_is_asked_for_at_once():
    async def test():
        async with running_router(2, manual=True) as h:
            for engine in h.engines:
                engine.version = "4"
            assert (await h.ask("/update_weights_from_distributed", {}))[0] == 200
            await h.clock.has("_start_check", 2)  # no time has passed, yet both have been asked
            assert [facts["weight_version"] for facts in (await h.facts()).values()] == ["4", "4"]

    run(test)


def test_nobody_is_behind_when_nobody_took_the_weights():
    async def test():
        async with running_router(2) as h:
            for engine in h.engines:
                engine.behave = status(400)
            assert (await h.ask("/update_weights_from_disk", {}))[0] == 502
            assert [h.engine(i).state for i in range(2)] == 2 * [EngineState.HEALTHY]

    run(test)


def test_an_engine_in_quarantine_gets_it_too():
    async def test():
        async with running_router(2, manual=True) as h:
            h.engines[0].well = False
            await h.probe(2.0, 3)
            assert h.engine(0).state is EngineState.QUARANTINED
            assert (await h.ask("/update_weights_from_disk", {}))[0] == 200
            assert h.engines[0].paths() == ["/update_weights_from_disk"]

    run(test)


# -- ranks ----------------------------------------------------------------------------------------------


def test_each_engine_joins_a_group_with_ranks_of_its_own():
    async def test():
        async with running_router(3) as h:
            for engine, size in zip(h.engines, (2, 1, 4), strict=True):
                engine.tp_size = size
            body = {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 8, "group_name": "g"}
            code, _, _ = await h.ask("/init_weights_update_group", body)
            assert code == 200
            sent = [engine.bodies("/init_weights_update_group")[0] for engine in h.engines]
            assert [each["rank_offset"] for each in sent] == [1, 3, 4]
            assert all({**each, "rank_offset": 1} == body for each in sent)

    run(test)


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ({"rank_offset": 1, "world_size": 2}, 400, "the 2 engines have 2 ranks"),
        ({"world_size": 2}, 400, "needs a JSON object"),
        ([], 400, "needs a JSON object"),
    ],
)
def test_a_group_that_could_never_meet_is_refused(body: Any, code: int, says: str):
    async def test():
        async with running_router(2) as h:
            got, answer, _ = await h.ask("/init_weights_update_group", body)
            assert got == code and says in answer["error"]["message"]
            assert not any(engine.seen for engine in h.engines)

    run(test)


def test_an_engine_that_does_not_say_its_ranks_needs_to_be_told_of():
    async def test():
        async with running_router(1) as h:
            h.engines[0].tp_size = None
            body = {"rank_offset": 1, "world_size": 3}
            code, answer, _ = await h.ask("/init_weights_update_group", body)
            assert code == 502 and "does not report its tp_size" in answer["error"]["message"]
            await h.ask("/engines", {"url": h.engines[0].url, "ranks": 2})
            assert (await h.ask("/init_weights_update_group", body))[0] == 200

    run(test)


# -- order -----------------------------------------------------------------------------------------------


def test_broadcasts_reach_all_engines_in_one_order_and_aborts_do_not_wait():
    async def test():
        async with running_router(2) as h:
            release = asyncio.Event()

            async def slow(request: web.Request) -> web.StreamResponse:
                if request.path == "/pause_generation":
                    await release.wait()
                return await done(request)

            h.engines[0].behave = slow
            pausing = asyncio.create_task(h.ask("/pause_generation"))
            await h.arrived.reach(2)
            going_on = asyncio.create_task(h.ask("/continue_generation"))
            assert (await h.ask("/abort_request", {"abort_all": True}))[0] == 200
            assert h.engines[1].paths() == ["/pause_generation", "/abort_request"]
            release.set()
            assert [code for code, _, _ in await asyncio.gather(pausing, going_on)] == [200, 200]
            assert [engine.paths()[-1] for engine in h.engines] == 2 * ["/continue_generation"]

    run(test)


def test_nothing_asked_before_an_abort_of_all_is_tried_again_after_it():
    async def test():
        async with running_router(2, manual=True, first_byte_timeout_secs=10.0) as h:

            async def wait(request: web.Request) -> web.StreamResponse:
                return await (done if request.path == "/abort_request" else hang)(request)

            for engine in h.engines:
                engine.behave = wait
            asking = asyncio.create_task(h.ask())
            await h.arrived.reach(1)
            assert (await h.ask("/abort_request", {"abort_all": True}))[0] == 200
            h.clock.advance(11)
            code, body, _ = await asking
            assert code == 503 and "aborted" in body["error"]["message"]
            assert sum(len(engine.bodies()) for engine in h.engines) == 1

    run(test)


def test_an_engine_that_joins_is_part_of_the_next_broadcast():
    async def test():
        async with running_router(1) as h:
            late = await ScriptedEngine(h.arrived).start()
            await h.ask("/engines", {"url": late.url})
            _, body, _ = await h.ask("/flush_cache")
            assert set(body["engines"]) == {h.engines[0].id, late.id}
            await late.stop()

    run(test)
