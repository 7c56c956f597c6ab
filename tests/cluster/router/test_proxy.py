"""Proxied requests: what reaches the engine, what comes back, and when a request is retried."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.cluster.router.harness import PATIENCE, reply, run, running_router


def status(code: int):
    async def behave(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=code)

    return behave


async def die(request: web.Request) -> web.StreamResponse:
    """Close the connection without a word."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


# -- passing on -----------------------------------------------------------------------------------


def test_a_reply_and_its_metadata_come_back_as_the_engine_sent_them():
    async def test():
        async with running_router(2) as h:
            code, body, headers = await h.ask(body={"text": "hi", "rid": "r1"}, headers={"x-mine": "kept too"})
            assert code == 200
            assert body["meta_info"] == {
                "id": "r1",
                "weight_version": "3",
                "finish_reason": {"type": "stop"},
                "routed_experts": "AAEC",
            }
            assert headers["x-own"] == "kept"
            (engine,) = [engine for engine in h.engines if engine.seen]
            assert headers["x-miles-engine"] == engine.id
            assert "x-miles-attempts" not in headers
            _, _, sent, body = engine.seen[0]
            assert body == {"text": "hi", "rid": "r1"}
            assert sent["x-mine"] == "kept too"
            assert sent["host"] == engine.id

    run(test)


def test_the_body_reaches_the_engine_byte_for_byte():
    async def test():
        async with running_router(1) as h:
            got: list[bytes] = []

            async def keep(request: web.Request) -> web.StreamResponse:
                got.append(await request.read())
                return web.Response(body=b"\x00\xff" * 100_000, content_type="application/octet-stream")

            h.engines[0].behave = keep
            odd = b'{ "text" : "\\u00e9",\n "zzz":1.0e0}' + b" " * 300_000
            async with h.session.post(h.url + "/generate?a=b%20c", data=odd) as answer:
                assert await answer.read() == b"\x00\xff" * 100_000
            assert got == [odd]

    run(test)


@pytest.mark.parametrize("code", [400, 401, 404, 422])
def test_what_the_engine_refuses_is_passed_on_and_not_tried_again(code: int):
    async def test():
        async with running_router(2) as h:
            for engine in h.engines:
                engine.behave = status(code)
            got, body, _ = await h.ask()
            assert (got, body) == (code, {"error": {"message": "no"}})
            assert sum(engine.arrived.count for engine in h.engines) == 1

    run(test)


def test_a_stream_is_passed_on_piece_by_piece():
    async def test():
        async with running_router(1) as h:
            steps = [asyncio.Event() for _ in range(3)]

            async def stream(request: web.Request) -> web.StreamResponse:
                out = web.StreamResponse(headers={"content-type": "text/event-stream"})
                await out.prepare(request)
                for i, step in enumerate(steps):
                    await step.wait()
                    await out.write(f"data: {i}\n\n".encode())
                return out

            h.engines[0].behave = stream
            async with h.session.post(h.url + "/generate", json={"stream": True}) as answer:
                assert answer.headers["content-type"] == "text/event-stream"
                for i, step in enumerate(steps):  # the next piece is not written before this one has been read
                    step.set()
                    assert await answer.content.readuntil(b"\n\n") == f"data: {i}\n\n".encode()
                assert await answer.content.read() == b""

    run(test)


def test_a_slow_reader_holds_the_engine_back():
    async def test():
        async with running_router(1) as h:
            written = 0
            piece = b"x" * 65536

            async def flood(request: web.Request) -> web.StreamResponse:
                nonlocal written
                out = web.StreamResponse()
                await out.prepare(request)
                for _ in range(2000):
                    await out.write(piece)
                    written += len(piece)
                return out

            h.engines[0].behave = flood
            reader, writer = await asyncio.open_connection("127.0.0.1", h.port, limit=1024)
            writer.write(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{}")
            await reader.readuntil(b"\r\n\r\n")
            before = -1
            while before != written:  # until nothing moves any more
                before = written
                for _ in range(20):
                    await h.ask("/engines", method="GET")
            assert written < 2000 * len(piece) / 2
            writer.close()

    run(test)


# -- trying again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [die, status(500), status(503), status(429), status(502)])
def test_a_request_that_got_no_answer_is_tried_once_on_another_engine_unchanged(bad: Any):
    async def test():
        async with running_router(2, policy="round_robin") as h:
            first, second = h.engines
            first.behave = bad
            answers = [await h.ask(body={"text": "hi", "rid": f"r{i}"}) for i in range(2)]
            assert [code for code, _, _ in answers] == [200, 200]
            assert all(headers["x-miles-engine"] == second.id for _, _, headers in answers)
            assert len(first.bodies()) == 1, "it was asked once, and only one of the two went there"
            assert sorted(body["rid"] for body in second.bodies()) == ["r0", "r1"]
            (again,) = [headers for _, _, headers in answers if "x-miles-attempts" in headers]
            assert again["x-miles-attempts"] == "2"
            assert h.engine(0).retried == 1

    run(test)


def test_no_request_is_tried_more_often_than_allowed():
    async def test():
        async with running_router(4, max_retries=2) as h:
            for engine in h.engines:
                engine.behave = status(503)
            code, body, headers = await h.ask()
            assert code == 503 and body == {"error": {"message": "no"}}, "the last engine's own words"
            assert headers["x-miles-attempts"] == "3"
            assert sum(engine.arrived.count for engine in h.engines) == 3
            assert max(engine.arrived.count for engine in h.engines) == 1

    run(test)


def test_when_every_try_breaks_the_client_is_told_which_engine_and_why():
    async def test():
        async with running_router(2, max_retries=1) as h:
            for engine in h.engines:
                engine.behave = die
            code, body, _ = await h.ask()
            assert code == 502
            assert "127.0.0.1:" in body["error"]["message"]
            assert body["error"]["message"].endswith("did not answer: it closed the connection before it responded.")

    run(test)


def test_nothing_is_tried_again_once_a_byte_has_reached_the_client():
    async def test():
        async with running_router(2) as h:

            async def half(request: web.Request) -> web.StreamResponse:
                out = web.StreamResponse(headers={"content-type": "text/event-stream"})
                await out.prepare(request)
                await out.write(b"data: 0\n\n")
                await request.content.read()
                assert request.transport is not None
                request.transport.close()
                return out

            for engine in h.engines:
                engine.behave = half
            with pytest.raises(aiohttp.ClientPayloadError):
                async with h.session.post(h.url + "/generate", json={"stream": True}) as answer:
                    await answer.read()
            assert sum(len(engine.bodies()) for engine in h.engines) == 1

    run(test)


def test_a_reply_shorter_than_it_said_is_not_passed_off_as_whole():
    async def test():
        async with running_router(2) as h:

            async def short(request: web.Request) -> web.StreamResponse:
                assert request.transport is not None
                request.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this")
                request.transport.close()
                return web.Response()

            for engine in h.engines:
                engine.behave = short
            with pytest.raises(aiohttp.ClientPayloadError):
                async with h.session.post(h.url + "/generate", json={}) as answer:
                    await answer.read()
            assert sum(len(engine.bodies()) for engine in h.engines) == 1

    run(test)


def test_an_idle_connection_that_the_engine_closed_is_no_illness():
    async def test():
        async with running_router(1) as h:
            served = 0

            async def once(request: web.Request) -> web.StreamResponse:
                nonlocal served
                served += 1
                if served == 2:  # the second request comes on the connection of the first
                    return await die(request)
                return await reply(request)

            h.engines[0].behave = once
            assert (await h.ask())[0] == 200
            assert (await h.ask())[0] == 200
            assert h.engine(0).failures == 0 and served == 3

    run(test)


def test_without_retries_every_request_goes_out_once_on_a_connection_of_its_own():
    async def test():
        async with running_router(1, max_retries=0) as h:
            ports: list[Any] = []

            async def note(request: web.Request) -> web.StreamResponse:
                assert request.transport is not None
                ports.append(request.transport.get_extra_info("peername")[1])
                return await reply(request)

            h.engines[0].behave = note
            assert [(await h.ask())[0] for _ in range(3)] == 3 * [200]
            assert len(set(ports)) == 3
            h.engines[0].behave = die
            assert (await h.ask())[0] == 502
            assert len(h.engines[0].bodies()) == 4

    run(test)


# -- deadlines --------------------------------------------------------------------------------------


def test_an_engine_that_does_not_begin_in_time_loses_the_request_and_is_told_to_abort_it():
    async def test():
        async with running_router(2, manual=True, first_byte_timeout_secs=10.0) as h:
            first, second = h.engines
            first.behave, second.behave = hang, hang
            asking = asyncio.create_task(h.ask(body={"text": "hi", "rid": "slow"}))
            await h.arrived.reach(1)
            lost, other = (first, second) if first.seen else (second, first)
            other.behave = reply
            lost.behave = reply  # for the abort
            h.clock.advance(10.5)
            code, _, headers = await asking
            assert code == 200 and headers["x-miles-engine"] == other.id
            await lost.arrived.reach(2)
            assert lost.bodies("/abort_request") == [{"rid": "slow"}]

    run(test)


def test_a_request_ends_at_its_deadline_even_in_the_middle_of_a_stream():
    async def test():
        async with running_router(1, manual=True, request_timeout_secs=30.0, first_byte_timeout_secs=10.0) as h:

            async def endless(request: web.Request) -> web.StreamResponse:
                out = web.StreamResponse()
                await out.prepare(request)
                await out.write(b"a")
                await asyncio.Event().wait()
                return out

            h.engines[0].behave = endless
            async with h.session.post(h.url + "/generate", json={"rid": "x"}) as answer:
                assert await answer.content.readexactly(1) == b"a"
                h.clock.advance(11)  # its first byte came in time
                h.clock.advance(20)
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.read()
            await h.engines[0].arrived.reach(2)
            assert h.engines[0].bodies("/abort_request") == [{"rid": "x"}]

    run(test)


def test_a_request_that_hangs_everywhere_is_answered_at_its_deadline():
    async def test():
        async with running_router(1, manual=True, request_timeout_secs=5.0, first_byte_timeout_secs=9.0) as h:
            h.engines[0].behave = hang
            asking = asyncio.create_task(h.ask())
            await h.engines[0].arrived.reach(1)
            h.clock.advance(6)
            code, body, _ = await asking
            assert code == 504 and "--request-timeout-secs" in body["error"]["message"]

    run(test)


# -- clients that leave -------------------------------------------------------------------------------


@pytest.mark.parametrize("rid", ["one", ["one", "two"]])
def test_a_client_that_leaves_frees_the_engine(rid: Any):
    async def test():
        async with running_router(1) as h:
            ended = asyncio.Event()

            async def wait(request: web.Request) -> web.StreamResponse:
                if request.path == "/abort_request":
                    return await reply(request)
                try:
                    return await hang(request)
                finally:
                    ended.set()  # its connection was closed

            h.engines[0].behave = wait
            _, writer = await asyncio.open_connection("127.0.0.1", h.port)
            body = json.dumps({"text": "hi", "rid": rid}).encode()
            writer.write(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await h.engines[0].arrived.reach(1)
            writer.close()
            await asyncio.wait_for(ended.wait(), PATIENCE)
            wanted = rid if isinstance(rid, list) else [rid]
            await h.engines[0].arrived.reach(1 + len(wanted))
            assert [body["rid"] for body in h.engines[0].bodies("/abort_request")] == wanted
            assert h.engine(0).outstanding == 0 and h.engine(0).load == 0

    run(test)


def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_the_engine():
    async def test():
        async with running_router(1) as h:
            ended = asyncio.Event()

            async def endless(request: web.Request) -> web.StreamResponse:
                out = web.StreamResponse()
                await out.prepare(request)
                try:
                    await out.write(b"a")
                    await asyncio.Event().wait()
                finally:
                    ended.set()
                return out

            h.engines[0].behave = endless
            async with h.session.post(h.url + "/generate", json={}) as answer:
                await answer.content.readexactly(1)
                answer.close()
            await asyncio.wait_for(ended.wait(), PATIENCE)

    run(test)
