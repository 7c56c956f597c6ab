"""Soak test of ``miles serve``: thousands of requests under aborts, disconnects, pauses, weight updates and flushes.

On loopback, a tiny model, a small KV cache. First every kind of request is answered undisturbed, under the weights of
two checkpoints; then they arrive at random, some aborted by id, some disconnected by their client, while the server is
paused (three modes), updated to the other checkpoint's weights and back, and flushed. In the end: was every request
answered exactly once, or reported as aborted? Is every page free? Is every complete response the undisturbed one?

    PYTHONPATH=. python benchmarks/bench_soak.py [--requests 10000] [--at-once 32] [--seed 0] [--in-flight 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from tests.server_api.live_servers import Hosted
from tests.server_api.tiny import VOCABULARY, make

EVERY = 15
"""Requests between two troubles."""
TROUBLES = {"abort some": 7, "abort all": 1, "flush": 3, "update": 2, "abort": 1, "retract": 3, "in_place": 3}
"""How many of a kind come in twenty; the last three are modes of a pause."""
OUTCOMES = ("answered: ", "answered before", "clients ", "lost")
PATIENCE = 300.0
NEAR = 1e-4
FLAGS = ("--engine-kv-tokens", "2048", "--engine-max-running", "16", "--engine-prefill-chunk", "64")
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What an answer says that must not depend on what else happens."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str
    version: str = ""

    def same(self, other: Result) -> bool:
        return self.reason == other.reason and self.tokens == other.tokens and self.begins(other)

    def begins(self, other: Result) -> bool:
        """Is this all, or the beginning, of the other?"""
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        return self.tokens == other.tokens[: len(self.tokens)] and all(abs(a - b) < NEAR for a, b in pairs)


def read(answer: Body) -> Result:
    reported = answer["meta_info"]
    lines = reported["output_token_logprobs"]
    reason = reported["finish_reason"]["type"] if reported["finish_reason"] else ""
    return Result(tuple(answer["output_ids"]), tuple(line[0] for line in lines), reason, reported["weight_version"])


def kinds(random: Random, count: int) -> list[Body]:
    """Greedy and seeded, short and long, alone and with a prefix in common, cut by a stop token or a limit."""
    prefixes = [[random.randrange(3, VOCABULARY) for _ in range(random.randrange(16, 80))] for _ in range(6)]
    bodies: list[Body] = []
    for number in range(count):
        shared = random.choice(prefixes) if random.random() < 0.6 else []
        prompt = [*shared, *(random.randrange(3, VOCABULARY) for _ in range(random.randrange(1, 30)))]
        params: Body = {"temperature": 0.0, "max_new_tokens": random.choice([1, 4, 12, 24, 48])}
        if random.random() < 0.5:
            params |= {"temperature": 0.8, "sampling_seed": number, "top_k": random.choice([-1, 8])}
        if random.random() < 0.3:
            params["stop_token_ids"] = [random.randrange(3, VOCABULARY) for _ in range(8)]
        bodies.append({"input_ids": prompt, "sampling_params": params, "return_logprob": True})
    return bodies


@dataclass(slots=True)
class Books:
    """Who was sent, what came back, and who said that it may be cut."""

    epoch: int = 0
    """Counts changes of weights under requests that are held; a request that saw none is of one version."""
    version: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    """Which checkpoint is behind a version's name."""
    live: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    cutting: int = 0
    """How many calls that cut everybody are under way."""
    answers: Counter[str] = field(default_factory=Counter)
    """How often each request was answered."""
    count: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0


class Soak:
    """One storm."""

    def __init__(
        self, hosted: Hosted, folders: dict[str, Path], *, requests: int, at_once: int, count: int, seed: int
    ) -> None:
        self._hosted = hosted
        self._folders = folders
        self._requests = requests
        self._at_once = asyncio.Semaphore(at_once)
        self._random = Random(seed)
        self._kinds = kinds(self._random, count)
        self._calm: dict[str, list[Result]] = {}
        self._steering = asyncio.Lock()
        self._deck: list[str] = []
        self.books = Books()

    async def run(self) -> Books:
        url = f"http://127.0.0.1:{self._hosted.port}"
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as self._http:
            for name in ("b", "a"):
                await self._update(name)
                self._calm[name] = await self._in_calm()
            await self._storm()
            await self._aftermath()
        return self.books

    # -- asking -----------------------------------------------------------------------------

    async def _post(self, path: str, body: Body) -> tuple[int, bytes]:
        async with asyncio.timeout(PATIENCE), self._http.post(path, json=body) as response:
            return response.status, await response.read()

    async def _in_calm(self) -> list[Result]:
        """Every kind once, a few at a time, and nothing else."""
        few = asyncio.Semaphore(8)

        async def one(body: Body) -> Result:
            async with few:
                return read(json.loads((await self._post("/generate", body))[1]))

        return await asyncio.gather(*map(one, self._kinds))

    async def _storm(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._requests):
                await self._at_once.acquire()
                group.create_task(self._request(number))
                if number % EVERY == EVERY - 1:
                    group.create_task(self._trouble())

    async def _request(self, number: int) -> None:
        random, books, rid = self._random, self.books, f"r{number}"
        kind, fate = random.randrange(len(self._kinds)), random.random()
        body = {**self._kinds[kind], "rid": rid, "priority": random.randrange(3)}
        epoch, oldest = books.epoch, list(books.versions).index(books.version)
        books.live.add(rid)
        books.cut |= {rid} if books.cutting else set()
        try:
            if fate < 0.08:
                await self._hang_up(body, random.randrange(1, 6))
            elif fate < 0.14:
                await self._give_up(body, random.random() / 10)
            else:
                answer = await (self._post_generate_stream(body) if fate < 0.4 else self._post_generate(body))
                books.answers[answer["meta_info"]["id"]] += 1
                self._judge(rid, kind, read(answer), oldest, one_version=epoch == books.epoch)
        except (aiohttp.ClientError, TimeoutError, AssertionError, ValueError) as error:
            books.count["lost"] += 1
            books.wrong.append(f"{rid} was lost: {type(error).__name__} {error}")
        finally:
            books.live.discard(rid)
            self._at_once.release()

    async def _post_generate(self, body: Body) -> Body:
        status, raw = await self._post("/generate", body)
        assert status == 200, raw[:200]
        return json.loads(raw)

    async def _post_generate_stream(self, body: Body) -> Body:
        status, raw = await self._post("/generate", {**body, "stream": True})
        events = [line for line in raw.decode().split("\n\n") if line]
        assert status == 200 and events[-1] == "data: [DONE]", events[-1:]
        return json.loads(events[-2].removeprefix("data: "))

    async def _hang_up(self, body: Body, after: int) -> None:
        """Read so many pieces of a stream, and close the connection."""
        self.books.cut.add(body["rid"])
        async with asyncio.timeout(PATIENCE), self._http.post("/generate", json={**body, "stream": True}) as response:
            for _ in range(after):
                await response.content.readline()
            response.close()
        self.books.count["clients hung up in a stream"] += 1

    async def _give_up(self, body: Body, seconds: float) -> None:
        """Wait for an answer not very long."""
        self.books.cut.add(body["rid"])
        try:
            async with asyncio.timeout(seconds), self._http.post("/generate", json=body) as response:
                await response.read()
            self.books.count["answered before the client gave up"] += 1
        except TimeoutError:
            self.books.count["clients gave up waiting"] += 1

    # -- judging ----------------------------------------------------------------------------

    def _judge(self, rid: str, kind: int, result: Result, oldest: int, *, one_version: bool) -> None:
        books = self.books
        books.tokens += len(result.tokens)
        books.count[f"answered: {result.reason}"] += 1
        folder = books.versions.get(result.version)
        if folder is None or list(books.versions).index(result.version) < oldest:
            books.wrong.append(
                f"{rid} is stamped {result.version!r}, but {list(books.versions)[oldest]!r} was in force"
            )
            return
        calm = self._calm[folder][kind]
        if result.reason == "abort":
            if rid not in books.cut:
                books.wrong.append(f"{rid} was aborted, and nobody asked for it")
            elif one_version and not result.begins(calm):
                books.wrong.append(f"{rid} was aborted, and is no beginning of the whole answer")
        elif result.same(calm):
            books.count["as in calm"] += 1
        elif one_version:
            books.wrong.append(f"{rid} (kind {kind}, {folder}) is not what it was in calm")
        elif self._is_complete(kind, result):
            books.count["begun under one version, ended under another"] += 1
        else:
            books.wrong.append(f"{rid} crossed versions, and its end is of none")

    def _is_complete(self, kind: int, result: Result) -> bool:
        """Some of its tokens may be an older version's, so that no answer in calm is like it; but it came to an end."""
        limit = self._kinds[kind]["sampling_params"]["max_new_tokens"]
        return result.reason == "stop" or len(result.tokens) == limit

    # -- troubles ---------------------------------------------------------------------------

    async def _trouble(self) -> None:
        """The next of a shuffled deck, so that all kinds have their turn."""
        if not self._deck:
            self._deck = [trouble for trouble, times in TROUBLES.items() for _ in range(times)]
            self._random.shuffle(self._deck)
        trouble = self._deck.pop()
        if trouble == "abort some":
            await self._abort_some()
        elif trouble == "abort all":
            await self._abort_all()
        elif trouble == "flush":
            await self._flush()
        else:
            async with self._steering:
                await (self._update(self._random.choice("ab")) if trouble == "update" else self._pause(trouble))

    async def _abort_some(self) -> None:
        for rid in self._random.sample(sorted(self.books.live), min(3, len(self.books.live))):
            self.books.cut.add(rid)
            await self._post("/abort_request", {"rid": rid})
            self.books.count["aborts by name"] += 1

    async def _abort_all(self) -> None:
        await self._cutting("/abort_request", {"abort_all": True})
        self.books.count["aborts of all"] += 1

    async def _cutting(self, path: str, body: Body) -> None:
        """Whoever is under way before or during this may be cut by it."""
        self.books.cut |= self.books.live
        self.books.cutting += 1
        await self._post(path, body)
        self.books.cutting -= 1

    async def _flush(self) -> None:
        status, _ = await self._post("/flush_cache", {})
        self.books.count[f"flushes {'done' if status == 200 else 'refused while busy'}"] += 1

    async def _pause(self, mode: str) -> None:
        books = self.books
        if mode == "abort":
            await self._cutting("/pause_generation", {"mode": mode})
        else:
            await self._post("/pause_generation", {"mode": mode})
        books.count[f"pauses: {mode}"] += 1
        if self._random.random() < 0.5:
            await self._flush()
        if self._random.random() < 0.6:
            books.epoch += 1
            await self._update(self._random.choice("ab"))
            books.epoch += 1
            books.count["updates while paused"] += 1
        if self._random.random() < 0.3:
            await self._abort_some()
        await self._post("/continue_generation", {})

    async def _update(self, name: str) -> None:
        books = self.books
        label = f"{name}{len(books.versions)}"
        books.versions[label] = name
        body = {"model_path": str(self._folders[name]), "weight_version": label}
        status, raw = await self._post("/update_weights_from_disk", body)
        books.version = label
        books.count["weight updates"] += 1
        if status != 200:
            books.wrong.append(f"an update failed: {raw[:200]!r}")

    # -- afterwards -------------------------------------------------------------------------

    async def _aftermath(self) -> None:
        """Nothing is held, nothing is lost, and the server answers as at first."""
        books = self.books
        await self._until_idle()
        self._hosted.engine.check()
        for name in ("b", "a"):
            await self._update(name)
            again = await self._in_calm()
            books.wrong += [
                f"kind {i} is not what it was" for i, r in enumerate(again) if not r.same(self._calm[name][i])
            ]
        status, _ = await self._post("/flush_cache", {})
        if status != 200:
            books.wrong.append("the cache of an idle server cannot be flushed")
        health = self._hosted.call(self._health())
        books.count["pages leaked"] = int(health["pages"] - health["free_pages"])
        books.count["preemptions"] = int(health["preemptions"])
        books.count["answered twice"] = sum(times > 1 for times in books.answers.values())
        books.count["lost"] += 0
        if sum(number for name, number in books.count.items() if name.startswith(OUTCOMES)) != self._requests:
            books.wrong.append("the ends of requests do not add up to the requests")
        response = {f"r{number}" for number in range(self._requests)}
        strangers = books.answers.keys() - response
        silent = response - books.answers.keys() - books.cut
        books.wrong += [f"{rid} was never asked" for rid in strangers] + [f"{rid} was never answered" for rid in silent]

    async def _health(self) -> dict[str, float]:
        return dict(await self._hosted.engine.health())

    async def _until_idle(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while (load := json.loads(await self._get("/get_load"))[0])["num_reqs"]:
                await asyncio.sleep(0.02)
        assert load["num_waiting_reqs"] == 0

    async def _get(self, path: str) -> bytes:
        async with self._http.get(path) as response:
            return await response.read()


def soak(
    folder: Path, *, requests: int, at_once: int = 32, count: int = 96, seed: int = 0, in_flight: int = 0
) -> Books:
    """A server, a storm of ``count`` kinds of requests, and what is in the books after it.

    With a step ``in_flight`` when the next is planned, it steps as it does on an accelerator.
    """
    folders = {"a": make(folder / "a", 0), "b": make(folder / "b", 1)}
    hosted = Hosted(folders["a"], *FLAGS)
    hosted.engine._inflight._depth = in_flight
    try:
        storm = Soak(hosted, folders, requests=requests, at_once=at_once, count=count, seed=seed)
        return asyncio.run(storm.run())
    finally:
        hosted.close()


def table(books: Books, requests: int, seconds: float) -> Iterable[str]:
    yield "| | |"
    yield "|---|--:|"
    yield f"| requests | {requests:,} |"
    yield from (f"| {name} | {number:,} |" for name, number in sorted(books.count.items()))
    yield f"| wrong | {len(books.wrong):,} |"
    yield f"| tokens in answers | {books.tokens:,} |"
    yield f"| seconds | {seconds:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="Requests in a storm of aborts, pauses, updates and flushes.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-flight", type=int, default=0, help="steps in flight when the next is planned")
    given = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        books = soak(
            Path(folder),
            requests=given.requests,
            at_once=given.at_once,
            seed=given.seed,
            in_flight=given.in_flight,
        )
    print("\n".join(table(books, given.requests, time.perf_counter() - started)))
    print(*books.wrong[:20], sep="\n")
    return 1 if books.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
