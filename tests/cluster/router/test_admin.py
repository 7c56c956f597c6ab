"""Engines are added and removed under load, API keys are checked, and the admin endpoints report the state."""

import asyncio
import random
from typing import Any

import pytest
from aiohttp import web
from tests.cluster.router.harness import RouterHarness, ScriptedEngine, reply, run, running_router
from tests.cluster.router.test_proxy import die

from miles.cluster.router.router import SINGLE_ENGINE_PATHS


def test_engines_are_listed_with_how_they_are():
    async def test():
        async with running_router(2) as h:
            await h.ask()
            facts = await h.facts()
            assert set(facts) == {engine.id for engine in h.engines}
            one = facts[h.engines[0].id]
            assert one["state"] == "healthy" and one["outstanding"] == 0 and one["failures"] == 0
            assert one["weight_version"] == "3" and one["model_path"] == "/models/small"
            assert sum(each["requests"] for each in facts.values()) == 1
            assert (await h.ask("/health", method="GET"))[:2] == (200, {"serving": 2, "engines": 2})
            _, body, _ = await h.ask("/list_workers", method="GET")
            assert body == {"urls": [engine.url for engine in h.engines]}

    run(test)


@pytest.mark.parametrize("style", ["json", "query", "body"])
def test_an_engine_joins_and_leaves(style: str):
    async def test():
        async with running_router(1) as h:
            late = await ScriptedEngine(h.arrived).start()
            if style == "json":
                code, _, _ = await h.ask("/engines", {"url": late.url + "/"})
            elif style == "query":
                code, _, _ = await h.ask(f"/add_worker?url={late.url}")
            else:
                code, _, _ = await h.ask("/add_worker", {"url": late.url})
            assert code == 201
            await h.logs.wait_for(f"{late.id} is healthy")
            while not late.seen:
                await h.ask()
            if style == "json":
                code, body, _ = await h.ask(f"/engines/{late.id}", method="DELETE")
            else:
                code, body, _ = await h.ask(f"/remove_worker?url={late.url}")
            assert (code, body) == (200, {"removed": late.id, "cut": 0})
            assert set(await h.facts()) == {h.engines[0].id}
            assert (await h.ask(f"/engines/{late.id}", method="DELETE"))[0] == 404
            await late.stop()

    run(test)


@pytest.mark.parametrize(
    "body",
    [{}, {"url": 3}, {"url": "nonsense"}, {"url": "ftp://x"}, {"url": "http://a:99999"}, {"url": "http://u:p@a"}],
)
def test_what_is_no_engine_is_refused(body: Any):
    async def test():
        async with running_router(1) as h:
            code, answer, _ = await h.ask("/engines", body)
            assert code == 400 and answer["error"]["message"].endswith(".")
            assert (await h.ask("/engines", {"url": h.engines[0].url, "ranks": 0}))[0] == 400

    run(test)


def test_an_engine_that_leaves_finishes_what_it_has_and_gets_nothing_new():
    async def test():
        async with running_router(2) as h:
            release = asyncio.Event()

            async def wait(request: web.Request) -> web.StreamResponse:
                await release.wait()
                return await reply(request)

            for engine in h.engines:
                engine.behave = wait
            asking = [asyncio.create_task(h.ask()) for _ in range(6)]
            await h.arrived.reach(6)
            before = [engine.arrived.count for engine in h.engines]
            mark = len(h.logs.messages)
            leaving = asyncio.create_task(h.ask(f"/engines/{h.engines[0].id}", method="DELETE"))
            await h.logs.wait_for("is draining", since=mark)
            asking += [asyncio.create_task(h.ask()) for _ in range(4)]
            await h.arrived.reach(10)
            assert h.engines[0].arrived.count == before[0] and not leaving.done()
            assert (await h.ask("/engines", {"url": h.engines[0].url}))[0] == 409
            release.set()
            assert [code for code, _, _ in await asyncio.gather(*asking)] == 10 * [200]
            code, body, _ = await leaving
            assert (code, body["cut"]) == (200, 0)

    run(test)


def test_an_engine_that_does_not_finish_in_time_loses_its_requests_to_others():
    async def test():
        async with running_router(2, manual=True) as h:
            slow, other = h.engines

            async def wait(request: web.Request) -> web.StreamResponse:
                await asyncio.Event().wait()
                return await reply(request)

            slow.behave = other.behave = wait
            asking = asyncio.create_task(h.ask())
            await h.arrived.reach(1)
            slow, other = sorted(h.engines, key=lambda engine: -engine.arrived.count)
            other.behave = reply
            leaving = asyncio.create_task(h.ask(f"/engines/{slow.id}?timeout=5", method="DELETE"))
            await h.clock.has("_set_idle", 1)
            h.clock.advance(5.5)
            assert (await leaving)[1] == {"removed": slow.id, "cut": 1}
            code, _, headers = await asking
            assert code == 200 and headers["x-miles-engine"] == other.id

    run(test)


def test_who_asked_for_an_engine_to_leave_may_go_and_it_leaves_all_the_same():
    async def test():
        async with running_router(2) as h:
            release = asyncio.Event()

            async def wait(request: web.Request) -> web.StreamResponse:
                await release.wait()
                return await reply(request)

            for engine in h.engines:
                engine.behave = wait
            asking = [asyncio.create_task(h.ask()) for _ in range(2)]
            await h.arrived.reach(2)
            mark = len(h.logs.messages)
            leaving = asyncio.create_task(h.ask(f"/engines/{h.engines[0].id}", method="DELETE"))
            await h.logs.wait_for("is draining", since=mark)
            leaving.cancel()
            release.set()
            await asyncio.gather(*asking)
            await h.logs.wait_for("has left", since=mark)

    run(test)


def test_no_request_is_lost_or_answered_twice_while_engines_come_and_go():
    async def test():
        async with running_router(3, policy="prefix", spill_floor=2) as h:
            served: list[str] = []

            def counting(engine: ScriptedEngine):
                async def behave(request: web.Request) -> web.StreamResponse:
                    answer = await reply(request)
                    served.append(engine.bodies()[-1]["rid"])
                    return answer

                return behave

            for engine in h.engines:
                engine.behave = counting(engine)
            stop = asyncio.Event()
            changing = asyncio.create_task(_come_and_go(h, counting, stop))
            answers = []
            for start in range(0, 300, 20):
                batch = [h.ask(body={"rid": str(i), "routing_key": str(i % 7)}) for i in range(start, start + 20)]
                answers += await asyncio.gather(*batch)
            stop.set()
            await changing
            assert [code for code, _, _ in answers] == 300 * [200]
            assert [body["meta_info"]["id"] for _, body, _ in answers] == [str(i) for i in range(300)]
            assert sorted(served, key=int) == [str(i) for i in range(300)]
            assert h.router.pool.outstanding == 0
            assert all(engine.load == 0 for engine in h.router.pool.engines.values())

    run(test)


async def _come_and_go(h: RouterHarness, behave: Any, stop: asyncio.Event) -> None:
    """One engine after another joins, and leaves again."""
    while not stop.is_set():
        late = ScriptedEngine(h.arrived)
        late.behave = behave(late)
        await late.start()
        await h.ask("/engines", {"url": late.url})
        await h.logs.wait_for(f"{late.id} is healthy")
        code, body, _ = await h.ask(f"/engines/{late.id}", method="DELETE")
        assert (code, body["cut"]) == (200, 0)
        await late.stop()


def test_engines_that_are_killed_under_load_cost_no_request():
    async def test():
        async with running_router(3) as h:
            asking = [asyncio.create_task(h.ask(body={"rid": str(i)})) for i in range(60)]
            await h.arrived.reach(10)
            await h.engines[0].stop()
            await h.arrived.reach(30)
            await h.engines[1].stop()
            answers = await asyncio.gather(*asking)
            assert [code for code, _, _ in answers] == 60 * [200]
            assert [body["meta_info"]["id"] for _, body, _ in answers] == [str(i) for i in range(60)]

    run(test)


def test_whatever_engines_do_each_answer_is_the_right_one_and_nothing_is_left_behind():
    async def test():
        async with running_router(4, max_retries=3, quarantine_secs=0.01, max_quarantine_secs=0.02) as h:
            draw = random.Random(0)

            async def moody(request: web.Request) -> web.StreamResponse:
                mood = draw.random()
                if mood < 0.1:
                    return await die(request)
                if mood < 0.2:
                    return web.Response(status=draw.choice((429, 500, 503)))
                answer = await reply(request)
                if mood < 0.3:
                    answer.force_close()
                return answer

            for engine in h.engines:
                engine.behave = moody
            answers: list[Any] = []
            for start in range(0, 200, 25):
                answers += await asyncio.gather(*(h.ask(body={"rid": str(i)}) for i in range(start, start + 25)))
            good = [(i, body) for i, (code, body, _) in enumerate(answers) if code == 200]
            assert all(body["meta_info"]["id"] == str(i) for i, body in good)
            assert len(good) > 190
            assert {code for code, _, _ in answers} <= {200, 429, 500, 502, 503}
            assert h.router.pool.outstanding == 0 and not h.router.pool.waiting
            assert all(engine.load == 0 and not engine.retry_callbacks for engine in h.router.pool.engines.values())

    run(test)


# -- keys ---------------------------------------------------------------------------------------------------


def test_a_router_with_a_key_asks_for_it_and_shows_the_engines_theirs():
    async def test():
        async with running_router(1, key="secret", engine_key="inner") as h:
            for path in ("/generate", "/flush_cache", "/engines"):
                assert (await h.ask(path))[0] == 401
            assert (await h.ask(headers={"Authorization": "Bearer wrong"}))[0] == 401
            assert not h.engines[0].seen
            right = {"Authorization": "Bearer secret"}
            assert (await h.ask(headers=right))[0] == 200
            assert (await h.ask("/flush_cache", headers=right))[0] == 200
            assert [headers["Authorization"] for _, _, headers, _ in h.engines[0].seen] == 2 * ["Bearer inner"]
            assert (await h.ask("/health", method="GET"))[0] == 200

    run(test)


def test_a_router_without_a_key_passes_each_clients_own_on():
    async def test():
        async with running_router(1) as h:
            await h.ask(headers={"Authorization": "Bearer mine"})
            await h.ask("/flush_cache", headers={"Authorization": "Bearer mine"})
            assert [headers["Authorization"] for _, _, headers, _ in h.engines[0].seen] == 2 * ["Bearer mine"]

    run(test)


def test_a_web_page_may_ask_but_not_steer_unless_it_has_the_key():
    page = {"Origin": "http://evil.example"}

    async def test():
        async with running_router(1) as h:
            assert (await h.ask(headers=page))[0] == 200
            for path in (
                "/engines",
                "/add_worker?url=http://evil.example",
                "/flush_cache",
                "/update_weights_from_disk",
            ):
                assert (await h.ask(path, headers=page))[0] == 403
            assert h.arrived.count == 1
        async with running_router(1, key="secret") as h:
            assert (await h.ask("/flush_cache", headers={**page, "Authorization": "Bearer secret"}))[0] == 200

    run(test)


# -- other endpoints -------------------------------------------------------------------------------------------


def test_models_of_all_engines_are_listed_once():
    async def test():
        async with running_router(3) as h:
            for engine, names in zip(h.engines, (["a"], ["a", "b"], None), strict=True):

                async def models(request: web.Request, names: Any = names) -> web.StreamResponse:
                    if names is None:
                        return web.Response(status=500)
                    return web.json_response({"object": "list", "data": [{"id": name, "x": 1} for name in names]})

                engine.behave = models
            code, body, _ = await h.ask("/v1/models", method="GET")
            assert (code, [model["id"] for model in body["data"]]) == (200, ["a", "b"])

    run(test)


def test_metrics_are_text_that_prometheus_reads():
    async def test():
        async with running_router(2) as h:
            await h.ask()
            _, raw, headers = await h.ask("/metrics", method="GET")
            assert headers["content-type"].startswith("text/plain; version=0.0.4")
            values = {}
            for line in raw.decode().splitlines():
                if not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    values[name] = float(value)
            assert sum(v for name, v in values.items() if name.startswith("miles_route_engine_requests_total")) == 1
            assert values[f'miles_route_engine_state{{engine="{h.engines[0].id}",state="healthy"}}'] == 1
            assert values["miles_route_waiting"] == 0

    run(test)


@pytest.mark.parametrize("path", sorted(SINGLE_ENGINE_PATHS))
def test_every_generation_goes_to_one_engine(path: str):
    async def test():
        async with running_router(2) as h:
            assert (await h.ask(path))[0] == 200
            assert h.arrived.count == 1

    run(test)


def test_a_get_goes_to_one_engine_and_an_unknown_post_to_none():
    async def test():
        async with running_router(2) as h:
            assert (await h.ask("/server_info", method="GET"))[1] == {"tp_size": 1}
            code, body, _ = await h.ask("/do_something")
            assert code == 404 and "POST /do_something is for one engine or for all" in body["error"]["message"]
            assert h.arrived.count == 0

    run(test)


def test_a_session_lives_on_one_engine_or_is_refused():
    async def test():
        async with running_router(3, policy="prefix", spill_floor=1) as h:
            for name in "abcdef":
                where = {
                    (await h.ask(path, body))[2]["x-miles-engine"]
                    for path, body in (
                        ("/open_session", {"session_id": name, "capacity_of_str_len": 10}),
                        ("/generate", {"text": "x", "session_params": {"id": name}}),
                        ("/generate", {"text": "y", "session_params": {"id": name}}),
                        ("/close_session", {"session_id": name}),
                    )
                }
                assert len(where) == 1
            assert (await h.ask("/open_session", {}))[0] == 400
        async with running_router(1) as h:
            assert (await h.ask("/open_session", {"session_id": "a"}))[0] == 501

    run(test)
