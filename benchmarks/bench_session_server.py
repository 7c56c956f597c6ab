"""Session server under many concurrent agents: overhead per turn beyond the engine, and memory.

    python benchmarks/bench_session_server.py [--sessions 500] [--rounds 10] [--seconds 2.0] [--api chat]

The engine is a stub that waits ``--seconds`` and returns 64 tokens, so that everything above that is overhead. Agents
run in a separate process (aiohttp), and send ``--rounds`` turns, each the whole conversation again plus a question of
60 words. Four rows:

- ``bare``: the same turns by calls of ``Engine.generate`` in one process, with no session and no HTTP;
- ``spread``: sessions begin evenly over the time of a turn, as agents do that have been running for a while;
- ``together``: all begin in the same instant, the worst case: each turn waits for all before it;
- ``at once``: an engine that does not wait, so that turns per second are the server's own limit.

``ours`` is the time of a turn as its agent sees it, less the engine's; ``cpu`` the CPU time of the server's process and
of the agents' per turn; ``others`` how many cores other processes used meanwhile: if they are busy, waiting is not the
server's. Every run ends with a check that what would be trained on is what was sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
import orjson
import uvloop

from miles.core.media import Images
from miles.core.protocols import Completion, SamplingParams
from miles.core.types import Author, Span, Status, Tokens, Version
from miles.models.tokenizer import HfTokenizer, load_tokenizer
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.session.server.app import SessionServer
from miles.rollout.session.server.registry import SessionLimits

REPLY = 64
QUESTION = 60
WORDS = tuple(f" {a}{b}" for a in ("ba", "do", "ki", "lu", "me") for b in ("n", "r", "st", "t", "x", "lo", "fi", "ra"))
MARKS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MOST_SECONDS = 300.0


# -- the parts --------------------------------------------------------------------------------


def make_tokenizer(folder: Path) -> HfTokenizer:
    """Bytes, a few words, ChatML's marks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = {name: i for i, name in enumerate((*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        letters = word.replace(" ", "Ġ")
        for end in range(1, len(letters)):
            if letters[: end + 1] not in pieces:
                merges.append((letters[:end], letters[end]))
                pieces[letters[: end + 1]] = len(pieces)
    inner = Tokenizer(models.BPE(vocab=pieces, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    inner.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    inner.add_special_tokens([AddedToken(name, special=True) for name in MARKS])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=MARKS[1])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return load_tokenizer(folder)


class Waiting:
    """An engine that waits and writes; it counts who is inside."""

    def __init__(self, tokenizer: HfTokenizer, seconds: float) -> None:
        word = tokenizer.encode("".join(WORDS))[: REPLY - 1]
        self._ids = np.array([*word, tokenizer.encode(MARKS[1])[0]], np.int32)
        self._seconds = seconds
        self.inside = self.most = self.written = 0

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images: Images = ()) -> Completion:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self.inside -= 1
        self.written += len(self._ids)
        scores = np.full(len(self._ids), -1.0, np.float32)
        span = Span(author=Author.POLICY, tokens=self._ids.copy(), logprobs=scores, version=Version())
        return Completion(spans=(span,), status=Status.COMPLETED, finish_reason="stop")


def question(random: Random) -> str:
    return "".join(random.choices(WORDS, k=QUESTION)).strip()


# -- agents -----------------------------------------------------------------------------------


async def agent(client: aiohttp.ClientSession, url: str, plan: dict[str, Any], number: int) -> list[float]:
    """One session from beginning to end; the seconds of each turn."""
    random, seconds = Random(number), []
    await asyncio.sleep(plan["spread"] * number / plan["sessions"])
    async with client.post(f"{url}/sessions", json={"id": f"s{number}"}) as reply:
        address = (await reply.json())["anthropic_base_url"]
    messages: list[dict[str, Any]] = []
    path = "v1/messages" if plan["api"] == "messages" else "v1/chat/completions"
    for _ in range(plan["rounds"]):
        messages.append({"role": "user", "content": question(random)})
        before = time.perf_counter()
        async with client.post(f"{address}/{path}", json={"messages": messages, "max_tokens": REPLY}) as reply:
            reported = orjson.loads(await reply.read())
        seconds.append(time.perf_counter() - before)
        assert reply.status == 200, reported
        content = reported["content"] if plan["api"] == "messages" else reported["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
    return seconds


async def agents(url: str, plan: dict[str, Any]) -> None:
    """All of them; prints the seconds of every turn as JSON."""
    connector = aiohttp.TCPConnector(limit=0)
    limit, encode = aiohttp.ClientTimeout(MOST_SECONDS), (lambda value: orjson.dumps(value).decode())
    async with aiohttp.ClientSession(connector=connector, timeout=limit, json_serialize=encode) as client:
        begun = time.perf_counter()
        seconds = await asyncio.gather(*(agent(client, url, plan, i) for i in range(plan["sessions"])))
        reported = {"wall": time.perf_counter() - begun, "turns": [x for row in seconds for x in row]}
    print(json.dumps(reported))


SILENT = {"cpu": 0.0, "theirs": 0.0, "grown": 0.0, "others": 0.0}


# -- rows -------------------------------------------------------------------------------------


async def bare(tokenizer: HfTokenizer, plan: dict[str, Any]) -> dict[str, Any]:
    engine, turns = Waiting(tokenizer, plan["seconds"]), []

    async def one(number: int) -> None:
        context = np.zeros(QUESTION, np.int32)
        for _ in range(plan["rounds"]):
            before = time.perf_counter()
            completion = await engine.generate(context, SamplingParams())
            turns.append(time.perf_counter() - before)
            context = np.concatenate([context, completion.spans[0].tokens])

    begun = time.perf_counter()
    await asyncio.gather(*map(one, range(plan["sessions"])))
    return {"wall": time.perf_counter() - begun, "turns": turns, "most": engine.most} | SILENT


async def run_server(tokenizer: HfTokenizer, plan: dict[str, Any]) -> dict[str, Any]:
    engine = Waiting(tokenizer, plan["seconds"])
    limits = SessionLimits(sessions=plan["sessions"])
    server = SessionServer(build_renderer(tokenizer), tokenizer.decode, engine=engine, limits=limits)
    port = await server.start()
    resident, cpu, theirs, busy = resident_bytes(), time.process_time(), children_seconds(), busy_seconds()
    words = [sys.executable, __file__, "--agents", f"http://127.0.0.1:{port}", json.dumps(plan)]
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    try:
        out, _ = await asyncio.wait_for(process.communicate(), MOST_SECONDS)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode == 0, "the agents failed"
    reported = json.loads(out)
    mine, of_agents = time.process_time() - cpu, children_seconds() - theirs
    reported |= {
        "most": engine.most,
        "cpu": mine / len(reported["turns"]),
        "theirs": of_agents / len(reported["turns"]),
    }
    reported["others"] = (busy_seconds() - busy - mine - of_agents) / reported["wall"]
    reported["grown"] = (resident_bytes() - resident) / plan["sessions"]
    check(server, engine, plan)
    await server.stop()
    return reported


def check(server: SessionServer, engine: Waiting, plan: dict[str, Any]) -> None:
    """Every session is one conversation, and all that was sampled is trained on."""
    trained = 0
    for entry in server.sessions:
        trajectory = entry.session.trajectory(status=entry.status)
        assert len(trajectory.branches) == 1 and entry.num_turns == plan["rounds"], (
            "a conversation was taken for another"
        )
        trained += trajectory.response_length
    assert trained == engine.written, "trained and sampled tokens differ"


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def busy_seconds() -> float:
    """Of all cores together, since the machine began."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, soft, steal, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def format_row(name: str, result: dict[str, Any], engine_seconds: float) -> str:
    ours = sorted(1000 * (x - engine_seconds) for x in result["turns"])
    at = [ours[min(len(ours) - 1, int(q * len(ours)))] for q in (0.5, 0.95, 0.99)]
    rate = len(result["turns"]) / result["wall"]
    return (
        f"{name:9} {statistics.mean(ours):8.1f} {at[0]:8.1f} {at[1]:8.1f} {at[2]:8.1f} {1000 * result['cpu']:7.2f} "
        f"{1000 * result['theirs']:7.2f} {result['others']:7.1f} {result['most']:7d} {rate:8.0f} "
        f"{result['grown'] / 1024:8.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--api", choices=("chat", "messages"), default="chat")
    parser.add_argument("--agents", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.agents:
        uvloop.run(agents(flags.agents[0], json.loads(flags.agents[1])))
        return
    plan = {"sessions": flags.sessions, "rounds": flags.rounds, "api": flags.api}
    rows = {"bare": (flags.seconds, 0.0), "spread": (flags.seconds, flags.seconds), "together": (flags.seconds, 0.0)}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder))
        print(
            f"{flags.sessions} sessions x {flags.rounds} turns, engine {flags.seconds:g} s a turn, {REPLY} tokens each"
        )
        print("              ours, ms a turn                 cpu, ms a turn   others  most in  turns/s   KiB a")
        print("              mean      p50      p95      p99  server  agents   cores   engine           session")
        for name, (seconds, spread) in (rows | {"at once": (0.0, 0.0)}).items():
            run = bare if name == "bare" else run_server
            reported = uvloop.run(run(tokenizer, plan | {"seconds": seconds, "spread": spread}))
            print(format_row(name, reported, seconds), flush=True)


if __name__ == "__main__":
    main()
