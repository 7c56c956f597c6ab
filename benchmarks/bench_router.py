"""Throughput of ``miles route``: requests per second, added latency, and the limit on this machine.

Everything runs here, each in its own process: an engine that returns a canned /generate response at once, the proxy
under test, and the load generator. The proxies, alternating: none; a relay that copies bytes without reading them (the
limit: no router can do with fewer system calls); a plain forwarder made of aiohttp's server and client; and ``miles
route`` with each policy. Two loads: 64 connections that send again as soon as they are answered (requests per second),
and 500 requests per second at fixed times, latency counted from the time a request was due. The CPU time per request in
the proxy is the kernel's count; it says what one core could do, also when the machine is busy with other things.

    python benchmarks/bench_router.py [--rounds 3] [--seconds 4]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import uvloop

RATE = 500
CONNECTIONS = 64
PIECES = 64  # of a streamed reply


# -- an engine that answers at once -------------------------------------------------------------


def build_canned_response() -> tuple[bytes, bytes]:
    """A reply of 64 tokens with log-probs as SGLang writes it, whole and streamed; and a stream of 64 pieces."""
    meta = {
        "id": "a" * 32,
        "finish_reason": {"type": "length", "length": 64},
        "prompt_tokens": 128,
        "completion_tokens": 64,
        "cached_tokens": 0,
        "weight_version": "3",
        "e2e_latency": 0.1,
        "output_token_logprobs": [[-0.123456, token, None] for token in range(64)],
    }
    body = json.dumps({"text": "x" * 200, "output_ids": list(range(100, 164)), "meta_info": meta}).encode()
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    piece = b"data: " + json.dumps({"text": "x", "output_ids": [7], "meta_info": {"id": "a" * 32}}).encode() + b"\n\n"
    return whole, b"%x\r\n%b\r\n" % (len(piece), piece)


class Stub(asyncio.Protocol):
    """Reads no more of HTTP than it must."""

    whole, piece = build_canned_response()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._held = b""

    def data_received(self, data: bytes) -> None:
        self._held += data
        while (end := self._held.find(b"\r\n\r\n")) >= 0:
            head = self._held[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._held) < end + 4 + length:
                return
            streamed = b'"stream"' in self._held[end + 4 : end + 4 + length]
            self._held = self._held[end + 4 + length :]
            if not streamed:
                self._transport.write(self.whole)
                continue
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            self._transport.write(b"transfer-encoding: chunked\r\n\r\n")
            self._write_piece(PIECES)

    def _write_piece(self, left: int) -> None:
        """A piece each time round the loop, so that they leave one by one as tokens do."""
        self._transport.write(self.piece if left else b"0\r\n\r\n")
        if left:
            asyncio.get_running_loop().call_soon(self._write_piece, left - 1)


async def serve_stub(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


# -- what may stand in between -----------------------------------------------------------------------


class Copy(asyncio.Protocol):
    """One side of a relay."""

    def __init__(self, other: Copy | None = None) -> None:
        self._other = other

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._other is not None:
            self._other.transport.close()


async def serve_relay(port: int, upstream: int) -> None:
    loop = asyncio.get_running_loop()

    class Near(Copy):
        """The side the load is on; holds what comes before the far side is there."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._early: list[bytes] = []
            self._task = loop.create_task(self._connect())

        def data_received(self, data: bytes) -> None:
            if self._other is None:
                self._early.append(data)
            else:
                super().data_received(data)

        async def _connect(self) -> None:
            _, self._other = await loop.create_connection(lambda: Copy(self), "127.0.0.1", upstream)
            self._other.transport.writelines(self._early)

    server = await loop.create_server(Near, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


async def serve_aiohttp(port: int, upstream: int) -> None:
    """As short as a forwarder on aiohttp can be: no policy, no retries, no deadlines, whole replies."""
    from aiohttp import ClientSession, DummyCookieJar, TCPConnector, web

    session = ClientSession(connector=TCPConnector(limit=0), cookie_jar=DummyCookieJar(), auto_decompress=False)

    async def forward(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        url = f"http://127.0.0.1:{upstream}{request.path}"
        async with session.request(request.method, url, data=body, headers={"content-type": "application/json"}) as got:
            headers = {"content-type": got.headers["content-type"], "x-miles-engine": "1"}
            return web.Response(body=await got.read(), status=got.status, headers=headers)

    runner = web.ServerRunner(web.Server(forward, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


# -- the load ---------------------------------------------------------------------------------------------


def message(kind: str) -> bytes:
    """A request of 128 prompt tokens; ``key`` names its routing key, ``stream`` asks for pieces."""
    fields = {
        "input_ids": list(range(128)),
        "sampling_params": {"max_new_tokens": 64, "temperature": 1.0},
        "return_logprob": True,
        "rid": "r" * 32,
    }
    body = json.dumps({**fields, "stream": True} if kind == "stream" else fields).encode()
    key = b"x-routing-key: prompt-7\r\n" if kind == "key" else b""
    head = b"POST /generate HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\n"
    return head + key + b"content-length: %d\r\n\r\n" % len(body) + body


class Asker(asyncio.Protocol):
    """A connection: ``ask`` sends, ``answered`` is called with the time it was due when the whole reply is there."""

    def __init__(self, kind: str, answered: object) -> None:
        self._message = message(kind)
        self._answered = cast("ResponseRecorder", answered)
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, due: float) -> None:
        self._due = due
        self.transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._held = self._held + data if self._held else data
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._held[:end].lower()
        assert head.startswith(b"http/1.1 200 "), self._held[:300]
        at = head.find(b"content-length:")
        if at >= 0:
            length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._held) < end + 4 + length:
                return
            assert length == len(Stub.whole.partition(b"\r\n\r\n")[2])
        elif not self._held.endswith(b"\r\n0\r\n\r\n"):
            return
        else:
            assert self._held.count(b"data: ") == PIECES
        self._held = b""
        self._answered(self, self._due)


class ResponseRecorder:
    """What happens when a connection is free again."""

    def __init__(self, *, closed: bool) -> None:
        self.latencies: list[float] = []
        self.closed = closed
        self.stopped = False
        self.free: list[Asker] = []

    def __call__(self, asker: Asker, due: float) -> None:
        now = time.perf_counter()
        self.latencies.append(now - due)
        if self.closed and not self.stopped:
            asker.ask(now)
        else:
            self.free.append(asker)


async def load(port: int, kind: str, seconds: float, rate: int) -> None:
    """Print what was measured; ``rate`` 0 asks as fast as it is answered."""
    loop, answered = asyncio.get_running_loop(), ResponseRecorder(closed=rate == 0)
    for _ in range(CONNECTIONS):
        _, asker = await loop.create_connection(lambda: Asker(kind, answered), "127.0.0.1", port)
        answered.free.append(asker)
    start = time.perf_counter()
    if rate == 0:
        for asker in answered.free:
            asker.ask(start)
        await asyncio.sleep(seconds)
        answered.stopped = True
    else:
        for i in range(int(rate * seconds)):
            due = start + i / rate
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            while not answered.free:
                await asyncio.sleep(0)
            answered.free.pop().ask(due)
    taken = time.perf_counter() - start
    found = sorted(answered.latencies[len(answered.latencies) // 10 :])
    p50, p99 = (1e3 * found[int(q * (len(found) - 1))] for q in (0.5, 0.99))
    print(json.dumps({"count": len(answered.latencies), "seconds": taken, "p50": p50, "p99": p99}))


# -- measuring ----------------------------------------------------------------------------------------------


def processor_seconds(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def running(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not ready(port):
            assert process.poll() is None, f"{' '.join(command)} has ended"
            time.sleep(0.05)
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def ready(port: int) -> bool:
    """Whether what listens there answers a request."""
    from http.client import HTTPConnection

    try:
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("POST", "/generate", b"{}")
        return connection.getresponse().status == 200
    except OSError:
        return False


def own(role: str, *arguments: object) -> list[str]:
    return [sys.executable, __file__, "--role", role, *map(str, arguments)]


def measure(port: int, kind: str, pid: int, seconds: float, rate: int) -> dict[str, float]:
    before = processor_seconds(pid)
    run = subprocess.run(own("load", port, kind, seconds, rate), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    found["cpu"] = 1e6 * (processor_seconds(pid) - before) / found["count"]
    found["rate"] = found["count"] / found["seconds"]
    return found


WAYS = {
    "straight to the engine": ("plain", None),
    "bytes copied, unread (the limit)": ("plain", "relay"),
    "aiohttp forwarder": ("plain", "aiohttp"),
    "miles route, round_robin": ("plain", "round_robin"),
    "miles route, least_load": ("plain", "least_load"),
    "miles route, prefix, key in a header": ("key", "prefix"),
    "miles route, prefix, key from the prompt": ("plain", "prefix"),
    f"straight, streams of {PIECES} pieces": ("stream", None),
    f"miles route, streams of {PIECES} pieces": ("stream", "least_load"),
}


def main(rounds: int, seconds: float) -> None:
    results: dict[str, list[tuple[dict[str, float], dict[str, float] | None]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, (kind, between) in WAYS.items():
            stub, port = free_port(), free_port()
            command = build_command(between, port, stub) if between else []
            with running(own("stub", stub), stub) as engine:
                if not command:
                    results[way].append(both(stub, kind, engine.pid, seconds))
                    continue
                with running(command, port) as process:
                    results[way].append(both(port, kind, process.pid, seconds))
    report(results)


def build_command(between: str, port: int, stub: int) -> list[str]:
    if between in ("relay", "aiohttp"):
        return own(between, port, stub)
    urls = [f"http://127.0.0.1:{stub}", f"http://localhost:{stub}"]
    command = [sys.executable, "-m", "miles.launch.main", "route", "--port", str(port), "--policy", between]
    return [*command, "--engine-urls", *urls]


def both(port: int, kind: str, pid: int, seconds: float) -> tuple[dict[str, float], dict[str, float] | None]:
    fast = measure(port, kind, pid, seconds, 0)
    return fast, None if kind == "stream" else measure(port, kind, pid, seconds, RATE)


def report(results: dict[str, list[tuple[dict[str, float], dict[str, float] | None]]]) -> None:
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    heads = f"{'requests/s':>10s} {'cpu us/request':>15s} {'one core':>9s} {'p50 ms':>7s} {'p99 ms':>7s}"
    print(f"{'medians of the rounds':42s} {heads} at {RATE}/s")
    for way, found in results.items():
        rate = statistics.median(fast["rate"] for fast, _ in found)
        cpu = statistics.median(fast["cpu"] for fast, _ in found)
        slow = [each for _, each in found if each is not None]
        times = "".join(f" {statistics.median(each[q] for each in slow):7.2f}" for q in ("p50", "p99")) if slow else ""
        print(f"{way:42s} {rate:10,.0f} {cpu:15.0f} {1e6 / cpu:9,.0f}{times}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Requests a second through miles route.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.role:
        case None:
            main(options.rounds, options.seconds)
        case ["stub", port]:
            uvloop.run(serve_stub(int(port)))
        case ["relay", port, upstream]:
            uvloop.run(serve_relay(int(port), int(upstream)))
        case ["aiohttp", port, upstream]:
            uvloop.run(serve_aiohttp(int(port), int(upstream)))
        case ["load", port, kind, seconds, rate]:
            uvloop.run(load(int(port), kind, float(seconds), int(rate)))
        case _:
            parser.error("no such role")
