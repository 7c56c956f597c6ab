"""Connections to engines: how long an idle one stays open, how many stay, and those of engines that have left."""

import asyncio
import contextlib
import socket

import pytest
from aiohttp import web
from tests.cluster.router.harness import PATIENCE, RouterHarness, ScriptedEngine, reply, run, running_router

from miles.cluster.router import http_client
from miles.cluster.router.http_client import IDLE_SECONDS
from miles.cluster.router.http_server import STALLED_SECONDS
from miles.cluster.router.router import _IDLE_CHECK_SECONDS


def count_connections(engine: ScriptedEngine) -> int:
    """Connections that an engine has, idle or not; the engine itself never closes one."""
    assert engine._runner is not None and engine._runner.server is not None
    return len(engine._runner.server.connections)


async def wait_for_connections(engine: ScriptedEngine, count: int) -> None:
    """Wait until the engine has noticed that all but ``count`` connections are closed."""
    async with asyncio.timeout(PATIENCE):
        while count_connections(engine) != count:
            await asyncio.sleep(0)


async def ask_at_once(h: RouterHarness, number: int) -> None:
    """So many requests at the same time, each on a connection of its own to the first engine."""
    release = asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return await reply(request)

    engine = h.engines[0]
    engine.behave = hold
    before = engine.arrived.count
    asking = [asyncio.ensure_future(h.ask()) for _ in range(number)]
    await engine.arrived.reach(before + number)
    release.set()
    assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}


def test_connections_close_when_no_request_comes():
    async def test():
        async with running_router(1, manual=True, health_check_interval_secs=1e6) as h:
            await ask_at_once(h, 5)
            await wait_for_connections(h.engines[0], 5)
            h.clock.advance(IDLE_SECONDS + _IDLE_CHECK_SECONDS)
            await wait_for_connections(h.engines[0], 0)

    run(test)


def test_health_checks_and_broadcasts_leave_no_connections_behind():
    async def test():
        async with running_router(2, manual=True, health_check_interval_secs=0.01) as h:
            await h.probe(0.01, times=10)
            for _ in range(5):
                assert (await h.ask("/flush_cache"))[0] == 200
            for engine in h.engines:
                await wait_for_connections(engine, 0)

    run(test)


def test_a_burst_leaves_only_so_many_idle_connections(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_client, "MAX_IDLE_CONNECTIONS", 3)

    async def test():
        async with running_router(1, manual=True, health_check_interval_secs=1e6) as h:
            await ask_at_once(h, 8)
            await wait_for_connections(h.engines[0], 3)

    run(test)


def test_connections_of_a_removed_engine_close_at_once():
    async def test():
        async with running_router(1, manual=True, health_check_interval_secs=1e6) as h:
            await ask_at_once(h, 4)
            assert (await h.ask(f"/engines/{h.engines[0].id}", method="DELETE"))[0] == 200
            await wait_for_connections(h.engines[0], 0)

    run(test)


def test_idle_connections_of_an_engine_in_quarantine_close_at_once():
    async def test():
        async with running_router(2, manual=True, health_check_interval_secs=5.0) as h:
            engine = h.engines[0]
            await asyncio.gather(*(h.ask() for _ in range(8)))
            assert count_connections(engine)
            engine.well = False
            await h.probe(5.0, times=3)
            await h.logs.wait_for(f"{engine.id} is quarantined")
            await wait_for_connections(engine, 0)

    run(test)


@pytest.mark.parametrize("kib", range(1408, 2304, 128))
def test_a_connection_is_used_again_after_a_response_that_its_client_does_not_read(kib: int):
    """The client's full buffer pauses the reading of a response; it must not pause the connection's next one."""

    async def test():
        async with running_router(1, manual=True, health_check_interval_secs=1e6) as h:

            async def send_much(request: web.Request) -> web.StreamResponse:
                return web.Response(body=bytes(kib << 10))

            h.engines[0].behave = send_much
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 10)
            slow.setblocking(False)
            await asyncio.get_running_loop().sock_connect(slow, ("127.0.0.1", h.port))
            reader, writer = await asyncio.open_connection(sock=slow, limit=1 << 10)
            writer.write(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{}")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            h.engines[0].behave = reply
            assert (await asyncio.wait_for(h.ask(), PATIENCE / 4))[0] == 200
            writer.transport.abort()

    run(test)


def test_a_client_that_reads_nothing_of_its_last_response_is_disconnected():
    async def test():
        async with running_router(1, manual=True, health_check_interval_secs=1e6) as h:
            size = 4 << 20

            async def send_much(request: web.Request) -> web.StreamResponse:
                return web.json_response({"success": False, "message": size * "a"})

            h.engines[0].behave = send_much
            reader, writer = await asyncio.open_connection("127.0.0.1", h.port, limit=1 << 10)
            head = b"POST /get_load HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: 2\r\n\r\n"
            writer.write(head + b"{}")
            assert b" 502 " in await reader.readuntil(b"\r\n\r\n")
            h.clock.advance(STALLED_SECONDS + 2 * _IDLE_CHECK_SECONDS)
            received = 0
            with contextlib.suppress(ConnectionResetError):
                while data := await reader.read(1 << 20):
                    received += len(data)
            assert received < size
            writer.close()

    run(test)
