"""Socket cost missing from ``bench_scale.py``: the driver's CPU time per request, response and streamed chunk.

A separate process answers as a server streams, with nothing to compute; the client is the driver's own.
Run it as ``python -m benchmarks.bench_scale_sockets``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

from miles.backends.remote.client import SglangClient
from miles.core.protocols import SamplingParams


def piece(tokens: int, number: int, *, last: bool) -> bytes:
    ids = [3 + i % 1000 for i in range(tokens)]
    meta = {
        "completion_tokens": tokens * (number + 1),
        "output_token_logprobs": [[-0.5123456, token, None] for token in ids],
        "finish_reason": {"type": "stop"} if last else None,
        "weight_version": "actor-1",
    }
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tokens: int) -> None:
    """As many pieces as the request asks for tokens, each flushed by itself."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:")[1].split()[0]) if b"content-length:" in head else 0
    body = json.loads(await reader.readexactly(length)) if length else None
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    pieces = body["sampling_params"]["max_new_tokens"] // tokens if body else 0
    for number in range(pieces):
        writer.write(piece(tokens, number, last=number == pieces - 1))
        await writer.drain()
        await asyncio.sleep(0.001)
    writer.write(b"data: [DONE]\n\n" if pieces else b"{}")
    await writer.drain()
    writer.close()


def serve(tokens: int, expected: Connection) -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda r, w: answer(r, w, tokens), "127.0.0.1", 0)
        expected.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def cost(count: int, one: Callable[[], Awaitable[object]]) -> float:
    """CPU seconds of this process for each of ``count``, sixteen at a time."""

    async def some(share: int) -> None:
        for _ in range(share):
            await one()

    await some(8)
    started = time.process_time()
    await asyncio.gather(*(some(count // 16) for _ in range(16)))
    return (time.process_time() - started) / (count // 16 * 16)


async def measure(port: int, tokens: int, pieces: int, count: int) -> tuple[float, float, float]:
    """Seconds of CPU for a word, for an answer in one piece, and for each piece more."""
    client = SglangClient(f"http://127.0.0.1:{port}", "engine", vocab_size=32_000)
    asked = list(range(3, 515))

    async def generate(number: int) -> None:
        reply, failure = await client.generate(asked, SamplingParams(max_new_tokens=number * tokens))
        assert failure is None and len(reply.tokens) == number * tokens, failure

    word = await cost(count, lambda: client.request("GET", "/health"))
    short = await cost(count, lambda: generate(1))
    long = await cost(count // 4, lambda: generate(pieces))
    await client.close()
    return word, short, (long - short) / (pieces - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[8, 64], help="tokens in a piece")
    parser.add_argument("--pieces", type=int, default=32)
    parser.add_argument("--count", type=int, default=512)
    args = parser.parse_args()
    print(f"{'tokens a piece':>15}{'us a word':>12}{'us an answer':>14}{'us a piece':>12}{'us a token':>12}")
    for tokens in args.tokens:
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("spawn").Process(target=serve, args=(tokens, theirs), daemon=True)
        child.start()
        word, short, each = asyncio.run(measure(ours.recv(), tokens, args.pieces, args.count))
        child.terminate()
        print(f"{tokens:15d}{1e6 * word:12.0f}{1e6 * short:14.0f}{1e6 * each:12.1f}{1e6 * each / tokens:12.2f}")


if __name__ == "__main__":
    main()
