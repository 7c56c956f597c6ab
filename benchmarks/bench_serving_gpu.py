"""Servers on one GPU under Poisson arrivals and with long contexts: `miles serve` beside stock SGLang, over HTTP.

    PYTHONPATH=src:. python benchmarks/bench_serving_gpu.py [--model Qwen3-0.6B] [--sides miles sglang]
        [--parts poisson prefill decode] [--rates 10 20 30] [--sglang FOLDER] [--attention fa3]

Both servers load the same checkpoint of random weights (bf16), answer the same requests to SGLang's ``/generate`` and
return log-probs; a client in this process sends them. FOLDER has SGLang and is put on its server's PYTHONPATH.

- ``poisson``: prompts and responses of 100 to 1,024 tokens that arrive at a rate (requests a second) as a Poisson
  process, at each rate those of 15 seconds, the same for both; every tenth asks for one token only, and its latency is
  the time to the first token. Latency a token is that of a whole response over its tokens.
- ``prefill``: 64 different prompts of 32,768 tokens at once, one token each.
- ``decode``: 8 requests with a context of 65,536 tokens: 257 tokens against 1, the prompts in the prefix cache.

The limits: prefill by FLOPs at 780 TFLOP/s, decoding by the bytes of weights and KV cache at 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.random_checkpoint import write_random_checkpoint

from miles.kernels.numerics import FAST
from miles.models.accounting.known_models import find_known_config
from miles.models.accounting.params import forward_flops_per_token, kv_bytes_per_token, weight_bytes
from miles.models.families.registry import spec_from_config

MAX_POSITIONS = 131_072
SECONDS, ONE_TOKEN = 15.0, 10
PREFILL, DECODE, NEW_TOKENS = (64, 32_768), (8, 65_536), 256
FLOPS, BANDWIDTH = 780e12, 4.3e12
START_SECONDS = 240.0


@contextmanager
def serve(side: str, folder: Path, args: argparse.Namespace) -> Iterator[str]:
    """A server of the checkpoint; yields its address once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = ["--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--dtype", "bfloat16"]
    environment = dict(os.environ)
    if side == "miles":
        command = ["miles.launch.main", "serve", str(folder), *where, "--engine-memory-fraction", "0.85"]
    else:
        environment["PYTHONPATH"] = f"{args.sglang}:{environment.get('PYTHONPATH', '')}"
        command = ["sglang.launch_server", "--model-path", str(folder), *where, "--log-level", "warning"]
        command += [
            "--attention-backend",
            args.attention,
            "--sampling-backend",
            "pytorch",
            "--mem-fraction-static",
            "0.85",
        ]
    with tempfile.TemporaryFile("w+") as log:
        began = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log, env=environment)
        try:
            asyncio.run(wait_until_ready(f"http://127.0.0.1:{port}", process))
            print(f"{side:7} ready after {time.monotonic() - began:.0f} s", flush=True)
            yield f"http://127.0.0.1:{port}"
        except Exception:
            log.seek(0)
            print(log.read()[-3000:], flush=True)
            raise
        finally:
            process.terminate()
            process.wait(60)


async def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            assert process.poll() is None, "the server has ended"
            try:
                async with session.get(f"{url}/health_generate", timeout=aiohttp.ClientTimeout(20)) as reply:
                    if reply.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(1.0)
    raise TimeoutError("the server did not start in time")


class Client:
    """Requests to one server."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def generate(self, session: aiohttp.ClientSession, tokens: Sequence[int], count: int) -> float:
        """Seconds of one request."""
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": count, "ignore_eos": True, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        began = time.perf_counter()
        async with session.post(f"{self._url}/generate", json=body) as reply:
            answer: dict[str, Any] = await reply.json()
        assert reply.status == 200, answer
        assert len(answer["output_ids"]) == count, (len(answer["output_ids"]), count)
        return time.perf_counter() - began

    async def generate_all(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        """Seconds until all of them are answered."""
        async with open_session() as session:
            began = time.perf_counter()
            await asyncio.gather(*(self.generate(session, prompt, count) for prompt in prompts))
            return time.perf_counter() - began

    async def arrive(self, rate: float) -> dict[str, float]:
        """Latencies at a rate of arrivals."""
        chance = random.Random(f"arrivals {rate}")
        requests = [
            (make_prompt(chance, chance.randint(100, 1024)), chance.randint(100, 1024))
            for _ in range(int(rate * SECONDS))
        ]
        first: list[float] = []
        each: list[float] = []

        async def send(session: aiohttp.ClientSession, number: int, after: float) -> None:
            await asyncio.sleep(after)
            prompt, count = requests[number]
            if number % ONE_TOKEN == 0:
                first.append(await self.generate(session, prompt, 1))
            else:
                each.append(await self.generate(session, prompt, count) / count)

        times = [chance.expovariate(rate)]
        while len(times) < len(requests):
            times.append(times[-1] + chance.expovariate(rate))
        async with open_session() as session:
            began = time.perf_counter()
            await asyncio.gather(*(send(session, number, after) for number, after in enumerate(times)))
            seconds = time.perf_counter() - began
        tokens = sum(1 if number % ONE_TOKEN == 0 else count for number, (_, count) in enumerate(requests))
        return {"tok/s": tokens / seconds, **quantiles("first token", first), **quantiles("a token", each)}

    async def flush(self) -> None:
        async with open_session() as session, session.post(f"{self._url}/flush_cache") as reply:
            assert reply.status == 200, await reply.text()


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600))


def make_prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(10_000) for _ in range(length)]


def quantiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile in milliseconds."""
    cuts = statistics.quantiles(seconds, n=20)
    return {f"{name} p50 ms": 1000 * cuts[9], f"{name} p95 ms": 1000 * cuts[18]}


def make_prompts(sizes: tuple[int, int]) -> list[list[int]]:
    chance = random.Random("long prompts")
    return [make_prompt(chance, sizes[1]) for _ in range(sizes[0])]


async def measure_prefill(client: Client) -> dict[str, float]:
    prompts = make_prompts(PREFILL)
    await client.generate_all(prompts[:2], 1)
    await client.flush()
    seconds = await client.generate_all(prompts, 1)
    return {"s": seconds, "prompt tok/s": PREFILL[0] * PREFILL[1] / seconds}


async def measure_decode(client: Client) -> dict[str, float]:
    prompts = make_prompts(DECODE)
    await client.flush()
    await client.generate_all(prompts, 1)
    await client.generate_all(prompts, 8)
    prefill = await client.generate_all(prompts, 1)
    seconds = await client.generate_all(prompts, NEW_TOKENS + 1) - prefill
    return {"ms a step": 1000 * seconds / NEW_TOKENS, "tok/s": DECODE[0] * NEW_TOKENS / seconds}


def show(name: str, found: dict[str, float]) -> None:
    print(f"{name:24} " + ", ".join(f"{value:,.1f} {what}" for what, value in found.items()), flush=True)


def show_limits(model: str) -> None:
    """What the device's peaks allow."""
    spec = spec_from_config(dict(find_known_config(model) or {}))
    flops = forward_flops_per_token(spec, PREFILL[1] / 2) * PREFILL[0] * PREFILL[1]
    size = weight_bytes(spec, "bfloat16") + DECODE[0] * DECODE[1] * kv_bytes_per_token(spec, "bfloat16", FAST)
    show("limit prefill", {"s": flops / FLOPS})
    show("limit decode", {"ms a step": 1000 * size / BANDWIDTH})


def measure(side: str, url: str, args: argparse.Namespace) -> None:
    client = Client(url)
    if "poisson" in args.parts:
        asyncio.run(client.generate_all(make_prompts((64, 512)), 64))
        for rate in args.rates:
            asyncio.run(client.flush())
            show(f"{side} {rate:g} requests/s", asyncio.run(client.arrive(rate)))
    if "prefill" in args.parts:
        show(f"{side} prefill", asyncio.run(measure_prefill(client)))
    if "decode" in args.parts:
        show(f"{side} decode", asyncio.run(measure_decode(client)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-0.6B")
    parser.add_argument("--sides", nargs="+", choices=("miles", "sglang"), default=("miles", "sglang"))
    parser.add_argument(
        "--parts", nargs="+", choices=("poisson", "prefill", "decode"), default=("poisson", "prefill", "decode")
    )
    parser.add_argument("--rates", nargs="+", type=float, default=(10, 20, 30))
    parser.add_argument("--sglang", help="folder with SGLang")
    parser.add_argument("--attention", default="fa3", help="SGLang's attention backend")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "model")
        write_random_checkpoint(args.model, folder, max_position_embeddings=MAX_POSITIONS)
        for side in args.sides:
            with serve(side, folder, args) as url:
                measure(side, url, args)
    show_limits(args.model)


if __name__ == "__main__":
    main()
