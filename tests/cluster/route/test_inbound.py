"""HTTP as clients really send it: in pieces, several at once, too long, too old, or not HTTP at all."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cluster.route.house import House, house, reply, run


async def talk(h: House, *pieces: bytes, end: bool = False) -> bytes:
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


def served(test: Callable[[House], Awaitable[None]], count: int = 1, **knobs: Any) -> None:
    async def inner() -> None:
        async with house(count, **knobs) as h:
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
    head = "\r\n".join(["POST /generate HTTP/1.1", "host: x", f"content-length: {len(body)}", *more])
    return head.encode() + b"\r\n\r\n" + body


def test_requests_sent_all_at_once_are_answered_in_their_order():
    async def test(h: House):
        raw = await talk(h, b"".join(request(str(i)) for i in range(20)) + request("last", "connection: close"))
        bodies = bodies_of(raw)
        assert len(bodies) == 21
        assert [f'"id": "{i}"'.encode() in body for i, body in enumerate(bodies[:-1])] == 20 * [True]

    served(test, 2)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 160), max_size=6))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts: list[int]):
    whole = request("one") + request("two", "connection: close")

    async def test(h: House):
        edges = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
        raw = await talk(h, *(whole[a:b] for a, b in pairwise(edges)))
        assert [b'"one"' in body or b'"two"' in body for body in bodies_of(raw)] == [True, True]

    served(test)


def test_a_body_in_chunks_is_passed_on_whole():
    async def test(h: House):
        await talk(
            h,
            b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n",
            b'8\r\n{"rid": \r\n',
            b'4\r\n"a"}\r\n0\r\n\r\n',
        )
        assert h.engines[0].bodies() == [{"rid": "a"}]
        assert h.engines[0].seen[0][2]["content-length"] == "12"

    served(test)


def test_a_client_that_expects_to_be_told_to_go_on_is_told():
    async def test(h: House):
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
    async def test(h: House):
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
    async def test(h: House):
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
        (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: nine\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", b"HTTP/1.1 501 "),
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
    async def test(h: House):
        answer = await talk(h, raw)
        assert answer.startswith(line), answer
        assert b"connection: close" in answer
        assert not h.engines[0].seen

    served(test, max_payload_size=1000)


def test_a_question_for_the_head_alone_gets_no_body():
    async def test(h: House):
        raw = await talk(h, b"HEAD /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        head, _, body = raw.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 ") and body == b""

    served(test)


def test_an_engine_that_ends_a_reply_by_closing_is_understood():
    async def test(h: House):
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
    async def test(h: House):
        async def nonsense(request: web.Request) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.write(b"220 smtp ready\r\n")
            request.transport.close()
            return web.Response()

        h.engines[0].behave, h.engines[1].behave = nonsense, reply
        for _ in range(4):
            assert (await h.ask())[0] == 200
        assert "not HTTP/1.1" in h.engine(0).why

    served(test, 2)


def test_a_client_that_sends_half_a_request_and_nothing_more_is_let_go():
    async def test():
        async with house(1, manual=True) as h:
            reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
            writer.write(b"POST /generate HTTP/1.1\r\ncontent-len")
            await h.ask()  # the router has read the half by now, or will before it sweeps
            h.clock.advance(80)
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()

    run(test)
