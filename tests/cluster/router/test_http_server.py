"""HTTP from real clients: fragmented, pipelined, too long, HTTP/1.0, or invalid."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cluster.router.harness import RouterHarness, reply, run, running_router
from tests.tiers import examples


async def talk(h: RouterHarness, *pieces: bytes, end: bool = False) -> bytes:
    """Send pieces one by one, each on its way before the next; all that comes back until the connection closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    if end:
        writer.write_eof()
    raw = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return raw


def served(test: Callable[[RouterHarness], Awaitable[None]], count: int = 1, **options: Any) -> None:
    async def inner() -> None:
        async with running_router(count, **options) as h:
            await test(h)

    run(inner)


def bodies_of(raw: bytes) -> list[bytes]:
    """Replies one after another, by their content-length."""
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        (length,) = [
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
        ]
        found.append(raw[:length])
        raw = raw[length:]
    return found


def request(rid: str, *more: str) -> bytes:
    body = f'{{"rid": "{rid}"}}'.encode()
    head = "\r\n".join(["POST /generate HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}", *more])
    return head.encode() + b"\r\n\r\n" + body


def test_requests_sent_all_at_once_are_answered_in_their_order():
    async def test(h: RouterHarness):
        raw = await talk(h, b"".join(request(str(i)) for i in range(20)) + request("last", "connection: close"))
        bodies = bodies_of(raw)
        assert len(bodies) == 21
        assert [f'"id": "{i}"'.encode() in body for i, body in enumerate(bodies[:-1])] == 20 * [True]

    served(test, 2)


@settings(deadline=None, max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 160), max_size=6))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts: list[int]):
    whole = request("one") + request("two", "connection: close")

    async def test(h: RouterHarness):
        edges = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
        raw = await talk(h, *(whole[a:b] for a, b in pairwise(edges)))
        assert [b'"one"' in body or b'"two"' in body for body in bodies_of(raw)] == [True, True]

    served(test)


def test_a_body_in_chunks_is_passed_on_whole():
    async def test(h: RouterHarness):
        await talk(
            h,
            b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n",
            b'8\r\n{"rid": \r\n',
            b'4\r\n"a"}\r\n0\r\n\r\n',
        )
        assert h.engines[0].bodies() == [{"rid": "a"}]
        assert h.engines[0].seen[0][2]["content-length"] == "12"

    served(test)


def test_a_client_that_expects_to_be_told_to_go_on_is_told():
    async def test(h: RouterHarness):
        head, body = request("a", "expect: 100-continue", "connection: close").split(b"\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
        assert "expect" not in h.engines[0].seen[0][2]

    served(test)


def test_an_old_client_gets_no_chunks():
    async def test(h: RouterHarness):
        async def stream(request: web.Request) -> web.StreamResponse:
            out = web.StreamResponse()
            await out.prepare(request)
            await out.write(b"one ")
            await out.write(b"two")
            return out

        h.engines[0].behave = stream
        raw = await talk(h, b"POST /generate HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}")
        head, _, body = raw.partition(b"\r\n\r\n")
        assert b"chunked" not in head and b"connection: close" in head
        assert body == b"one two"

    served(test)


def test_headers_of_one_connection_do_not_travel_further():
    async def test(h: RouterHarness):
        await talk(
            h, request("a", "connection: close, x-secret", "x-secret: 1", "te: trailers", "keep-alive: 5", "x-y: 2")
        )
        headers = h.engines[0].seen[0][2]
        assert headers["x-y"] == "2"
        assert not {"x-secret", "te", "keep-alive", "connection"} & {name.lower() for name in headers}

    served(test)


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"this is not HTTP\r\n\r\n", b"HTTP/1.1 400 "),
        (b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: nine\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", b"HTTP/1.1 501 "),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", b"HTTP/1.1 431 "),
        (b"POST /generate HTTP/1.1\r\ncontent-length: 5000000\r\n\r\n" + b"x" * 100, b"HTTP/1.1 413 "),
        (
            b"POST /generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n" * 1,
            b"HTTP/1.1 413 ",
        ),
        (
            b"POST /generate HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"HTTP/1.1 400 ",
        ),
    ],
)
def test_what_cannot_be_read_is_answered_and_the_connection_closed(raw: bytes, line: bytes):
    async def test(h: RouterHarness):
        answer = await talk(h, raw)
        assert answer.startswith(line), answer
        assert b"connection: close" in answer
        assert not h.engines[0].seen

    served(test, max_payload_size=1000)


def test_a_question_for_the_head_alone_gets_no_body():
    async def test(h: RouterHarness):
        raw = await talk(h, b"HEAD /generate HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        head, _, body = raw.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 ") and body == b""

    served(test)


def test_an_engine_that_ends_a_reply_by_closing_is_understood():
    async def test(h: RouterHarness):
        async def close(request: web.Request) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nall of it")
            request.transport.close()
            return web.Response()

        h.engines[0].behave = close
        async with h.session.post(h.url + "/generate", json={}) as answer:
            assert await answer.text() == "all of it"

    served(test)


def test_an_engine_that_talks_nonsense_is_no_engine():
    async def test(h: RouterHarness):
        async def nonsense(request: web.Request) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.write(b"220 smtp ready\r\n")
            request.transport.close()
            return web.Response()

        h.engines[0].behave, h.engines[1].behave = nonsense, reply
        for _ in range(4):
            assert (await h.ask())[0] == 200
        assert "not valid HTTP/1.1" in h.engine(0).why

    served(test, 2)


def test_a_client_that_sends_half_a_request_and_nothing_more_is_let_go():
    async def test():
        async with running_router(1, manual=True) as h:
            reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
            writer.write(b"POST /generate HTTP/1.1\r\ncontent-len")
            await h.ask()  # the router has read the half by now, or will before it sweeps
            h.clock.advance(80)
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()

    run(test)


@pytest.mark.parametrize("policy", ["least_load", "prefix"])
def test_bodies_that_cannot_be_read_are_no_failure_of_the_router(policy: str):
    deep = b'{"routing_key": ' + b"[" * 3000 + b"]" * 3000 + b', "rid": "a", "abort_all": 1}'
    lone = rb'{"session_id": "\ud800", "rid": "\udfff", "url": "\ud800"}'

    async def echo_status(request: web.Request) -> web.StreamResponse:
        return web.Response(status=400)

    async def test(h: RouterHarness):
        for engine in h.engines:
            engine.behave = echo_status
            engine.parse_bodies = False
        for path in ("/generate", "/abort_request", "/open_session", "/engines", "/remove_worker", "/v1/responses"):
            for body in (deep, lone, b'{"text": "\xed\xa0\x80"}', '{"text": "a"}'.encode("utf-16"), b"\xff"):
                async with h.session.post(h.url + path, data=body) as answer:
                    assert answer.status in (400, 404, 502, 501), (path, body[:20], answer.status)
                    assert "failed on this request" not in await answer.text()
        assert all(h.engine(i).state.value == "healthy" for i in range(2))

    served(test, 2, policy=policy)


def test_unknown_transfer_codings_are_refused():
    async def test(h: RouterHarness):
        for coding in (b"gzip, chunked", b"identity", b"chunked\r\ntransfer-encoding: chunked", b"x"):
            head = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: " + coding
            raw = await talk(h, head + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
            assert raw.startswith((b"HTTP/1.1 501 ", b"HTTP/1.1 400 ")), raw
        assert h.engines[0].seen == []

    served(test)


def test_a_router_without_a_key_is_not_reached_under_a_rebound_name():
    async def test(h: RouterHarness):
        for host, status in (
            *((name, 403) for name in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[", "")),
            *((name, 200) for name in ("localhost", f"localhost:{h.port}", "127.0.0.1", "[::1]:80", "10.0.0.7:1")),
        ):
            assert (await h.ask(headers={"Host": host}))[0] == status, host
        assert (await h.ask("/flush_cache", headers={"Sec-Fetch-Site": "cross-site"}))[0] == 403

    served(test)

    async def open_to_all(h: RouterHarness):
        assert (await h.ask(headers={"Host": "router.example"}))[0] == 200

    served(open_to_all, allow_unauthenticated=True)


def test_the_body_of_a_request_without_the_key_is_not_read():
    async def test(h: RouterHarness):
        reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500000000\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401 ")
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 500_000_000:
                writer.write(bytes(1 << 20))
                await writer.drain()
                sent += 1 << 20
        assert sent < 64 << 20

    served(test, key="secret")


def test_a_request_that_comes_a_byte_at_a_time_does_not_hold_its_connection():
    async def drip(h: RouterHarness, start: bytes, byte: bytes) -> int:
        """Seconds until the router closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
        writer.write(start)
        seconds = 0
        closed = asyncio.ensure_future(reader.read())
        while not closed.done():
            h.clock.advance(2.0)
            seconds += 2
            assert seconds < 1000
            if not writer.transport.is_closing():
                writer.write(byte)
            for _ in range(50):
                await asyncio.sleep(0)
        writer.transport.abort()
        return seconds

    async def test(h: RouterHarness):
        assert await drip(h, b"GET /engines HTTP/1.1\r\nx: ", b"a") < 60
        head = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10000\r\n\r\n"
        assert await drip(h, head, b"a") < 120
        assert await drip(h, b"", b"\r\n") < 120
        assert (await h.ask())[0] == 200

    served(test, manual=True)
