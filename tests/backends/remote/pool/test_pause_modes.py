"""Weight updates while servers keep their requests: every token has its version, also when a server dies."""

import asyncio
import os
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.remote.harness import LONG as LONGER
from tests.backends.remote.harness import PROMPT, client_of, running_pool, until, url_of, weights_of
from tests.server_api.oracle import Oracle
from tests.server_api.tiny import END

from miles.backends.remote.client import SglangClient
from miles.backends.remote.pool.engine_pool import EnginePool, SlotState
from miles.backends.remote.pool.health_monitor import HealthConfig
from miles.backends.remote.process.server import LocalServer, ServerCommand
from miles.backends.remote.remote_engine import RemoteEngine
from miles.backends.remote.transports.senders import HttpTransport
from miles.cluster.executor import InlineExecutor
from miles.core.errors import EngineError
from miles.core.protocols import SamplingParams
from miles.core.types import Version
from miles.models.resolve import resolve_spec

LONG = replace(LONGER, max_new_tokens=96)
PROMPTS = [PROMPT[: 3 + i] for i in range(4)]


@pytest.fixture(scope="module")
def oracles(folders):
    return {"a": Oracle(folders.a), "b": Oracle(folders.b)}


def tokens_of(completion):
    return [token for span in completion.spans for token in span.tokens.tolist()]


def logprobs_of(completion):
    return np.concatenate([span.logprobs for span in completion.spans])


def numbers_of(completion):
    return [span.version.number for span in completion.spans]


def counted(client: SglangClient) -> list[int]:
    """How many requests a client sends from now on."""
    sent, generate = [0], client.generate

    async def counting(tokens, sampling, on_tokens=lambda tokens: None, images=()):
        sent[0] += 1
        return await generate(tokens, sampling, on_tokens, images)

    client.generate = counting
    return sent


async def asked(made, hosts, sampling=LONG):
    """Requests that all have tokens, at servers that rest."""
    running = [
        asyncio.create_task(made.pool.generate(prompt, replace(sampling, seed=i))) for i, prompt in enumerate(PROMPTS)
    ]
    await until(lambda: sum(len(client._inflight) for client in made.clients) == len(PROMPTS))
    await until(lambda: all(reply.tokens for client in made.clients for reply in client._inflight.values()))
    for hosted in hosts:  # so that none ends before the weights come
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(hosted.engine.pause(), hosted._loop))
    return running


async def further(client: SglangClient) -> None:
    """Wait until each answer under way has more tokens than now."""
    before = {id(reply): len(reply.tokens) for reply in client._inflight.values()}
    await until(lambda: all(len(reply.tokens) > before[id(reply)] for reply in client._inflight.values()))


@torch.no_grad()
def written_on(oracles, prompt, written, kept):
    """Log-probs of what ``b`` wrote behind ``kept`` tokens with keys and values that ``a`` computed."""
    tokens = [*prompt, *written]
    at = len(prompt) + kept - 1  # the last of a's tokens was drawn and not computed yet
    before = oracles["a"]._model(torch.tensor([tokens[:at]]), use_cache=True).past_key_values
    rows = oracles["b"]._model(torch.tensor([tokens[at:-1]]), past_key_values=before).logits[0].log_softmax(-1)
    return rows.gather(1, torch.tensor(written[kept:])[:, None]).squeeze(1).numpy()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_kept_requests_go_on_under_the_new_weights_and_every_token_is_of_the_version_it_says(
    pair, folders, oracles, mode
):
    async def run():
        async with running_pool(folders.a, [url_of(h) for h in pair], mode=mode) as made:
            sent = [counted(client) for client in made.clients]
            running = await asked(made, pair)
            made.current = weights_of(folders.b)
            await made.sync.publish(Version(number=1))
            answers = await asyncio.gather(*running)
            assert sum(count for (count,) in sent) == len(PROMPTS), "no request was asked twice"
            assert [s for s in made.said if "keeps its in-flight requests" in s] == [
                f"engine {i} keeps its in-flight requests during weight updates (--pause-generation-mode {mode})."
                for i in (0, 1)
            ]
            assert not made.failures and all(slot.load == 0 for slot in made.pool.slots)
            return answers

    for prompt, answer in zip(PROMPTS, asyncio.run(run()), strict=True):
        assert numbers_of(answer) == [0, 1] and answer.finish_reason == "length"
        tokens, kept = tokens_of(answer), len(answer.spans[0])
        assert len(tokens) == 96 and 0 < kept < 96
        old = oracles["a"].logprobs(prompt.tolist(), tokens)[:kept]
        assert np.abs(answer.spans[0].logprobs - old).max() < 1e-4
        anew = np.array(oracles["b"].logprobs(prompt.tolist(), tokens)[kept:])
        expected = anew if mode == "retract" else written_on(oracles, prompt.tolist(), tokens, kept)
        assert np.abs(answer.spans[1].logprobs - expected).max() < 1e-4
        if mode == "in_place":
            assert np.abs(answer.spans[1].logprobs - anew).max() > 1e-3, "old keys and values were gone on with"


def test_a_request_may_see_many_versions_and_a_pause_alone_changes_nothing(pair, folders):
    calm = pair[0].call(pair[0].engine.generate(PROMPTS[0], replace(LONG, seed=0)))

    async def run():
        async with running_pool(folders.a, [url_of(pair[0])], mode="in_place") as made:
            running = await asked(made, pair[:1])
            for number in (1, 2, 5):
                await made.sync.publish(Version(number=number))  # the same weights, called otherwise
                (seen,) = {len(client._inflight) for client in made.clients}
                assert seen == len(PROMPTS)
                await further(made.clients[0])
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(pair[0].engine.pause(), pair[0]._loop))
            await made.clients[0].resume()
            return await asyncio.gather(*running)

    answers = asyncio.run(run())
    assert all(numbers_of(answer) == [0, 1, 2, 5] and len(tokens_of(answer)) == 96 for answer in answers)
    stamped = pair[0].call(pair[0].engine.generate(PROMPTS[0], replace(LONG, seed=0)))
    assert tokens_of(answers[0]) == tokens_of(stamped)
    assert np.allclose(logprobs_of(answers[0]), logprobs_of(stamped), atol=1e-4) and len(calm.spans) == 1


def test_a_server_that_tells_one_version_a_reply_is_asked_again_beside_one_that_keeps(pair, folders, oracles):
    class Stock(SglangClient):
        """As of stock SGLang: its tokens' versions cannot be distinguished."""

        @property
        def keeps_requests(self) -> bool:
            return False

    async def run():
        async with running_pool(folders.a, [url_of(h) for h in pair], mode="retract") as made:
            made.clients[0].__class__ = Stock
            sent = [counted(client) for client in made.clients]
            running = await asked(made, pair)
            had = [client.num_inflight for client in made.clients]
            made.current = weights_of(folders.b)
            await made.sync.publish(Version(number=1))
            answers = await asyncio.gather(*running)
            assert all(had) and sum(count for (count,) in sent) == len(PROMPTS) + had[0]
            await made.sync.publish(Version(number=2))
            return answers, made.said

    answers, said = asyncio.run(run())
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert numbers_of(answer) == [0, 1]
        found = oracles["b"].logprobs(prompt.tolist(), tokens_of(answer))[len(answer.spans[0]) :]
        assert np.abs(answer.spans[1].logprobs - found).max() < 1e-4
    assert not any("engine 0 keeps" in sentence for sentence in said[-1:])


def test_a_pool_logs_which_servers_cannot_keep_requests():
    pool, said = EnginePool(["engine 0"], eos_token_ids=frozenset(), mode="in_place"), []
    pool.log = said.append
    for _ in range(2):
        pool.mark_serving(pool.slots[0], client_of("http://nowhere", "engine 0"), Version())
    assert len(said) == 1 and "so --pause-generation-mode in_place is treated as abort" in said[0]


@pytest.mark.parametrize(("mode", "word"), [("retract", "pause"), ("in_place", "commit"), ("retract", "continue")])
def test_what_a_server_had_that_dies_while_it_is_paused_goes_on_elsewhere_from_the_tokens_that_came(
    pair, folders, oracles, mode, word
):
    paths = {"pause": "/pause_generation", "commit": "/weights_publication", "continue": "/continue_generation"}

    async def run():
        async with running_pool(folders.a, [url_of(h) for h in pair], mode=mode) as made:
            running = await asked(made, pair)
            first, ask = made.clients[0], made.clients[0].request
            had = first.num_inflight

            async def dies(method, path, body=None, **more):
                reported = await ask(method, path, body, **more)
                if path == paths[word] and (word != "commit" or b"commit" in str(body).encode()):
                    first.url = "http://127.0.0.1:9"  # nobody is there any more,
                    first.interrupt_all()  # and its connections are gone
                    return await ask(method, path, body, **more)
                return reported

            first.request = dies
            made.current = weights_of(folders.b)
            await made.sync.publish(Version(number=1))
            answers = await asyncio.gather(*running)
            assert had and [slot.state for slot in made.pool.slots] == [SlotState.FAILED, SlotState.SERVING]
            assert {name for name, _ in made.failures} == {"engine 0"}
            return answers

    for prompt, answer in zip(PROMPTS, asyncio.run(run()), strict=True):
        assert numbers_of(answer) == [0, 1] and len(tokens_of(answer)) == 96
        kept = len(answer.spans[0])
        old = oracles["a"].logprobs(prompt.tolist(), tokens_of(answer))[:kept]
        assert np.abs(answer.spans[0].logprobs - old).max() < 1e-4


def test_weights_that_nobody_published_are_found_out_in_what_was_kept_too(pair, folders):
    async def run():
        async with running_pool(folders.a, [url_of(pair[0])], mode="in_place") as made:
            running = await asked(made, pair[:1])
            await made.clients[0].request(
                "POST", "/update_weight_version", {"new_version": "actor-9", "abort_all_requests": False}
            )
            await made.clients[0].resume()
            await asyncio.gather(*running)

    with pytest.raises(EngineError, match="was given weights actor-0 but answered with weights actor-9"):
        asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_served_engine_that_is_killed_while_it_is_paused_is_replaced_and_no_token_is_lost(
    folders, tmp_path, oracles, mode
):
    """Two processes of ``miles serve``; one gets SIGKILL between its pause and its commit."""
    words = (
        sys.executable,
        "-m",
        "miles.launch.main",
        "serve",
        str(folders.a),
        "--device",
        "cpu",
        "--engine-kv-tokens",
        "16384",
    )
    names = ["engine 0", "engine 1"]

    async def run():
        pool = EnginePool(names, eos_token_ids=frozenset([END]), mode=mode)
        hosts = [
            LocalServer(
                name,
                ServerCommand(argv=words),
                tmp_path / f"{name}.log",
                lambda url, n=name: client_of(url, n),
                seconds=300,
            )
            for name in names
        ]
        made = RemoteEngine(
            pool, hosts, HealthConfig(interval=5, timeout=20, first_wait=0, max_restarts=2), lambda sentence: None
        )
        current = {"weights": weights_of(folders.a)}
        how = {"transport": HttpTransport(), "executor": InlineExecutor(), "bucket_bytes": 1 << 20, "seconds": 120.0}
        sync = made.sync(lambda: current["weights"], resolve_spec(folders.a, "auto"), **how)
        try:
            await sync.publish(Version())
            sampling = SamplingParams(max_new_tokens=480, ignore_eos=True)
            running = [asyncio.create_task(made.generate(p, replace(sampling, seed=i))) for i, p in enumerate(PROMPTS)]
            await until(lambda: all(slot.client and slot.client.num_inflight for slot in pool.slots))
            await until(lambda: all(r.tokens for s in pool.slots if s.client for r in s.client._inflight.values()))
            for slot in pool.slots:
                assert slot.client is not None
                await slot.client.pause("in_place")
            victim = hosts[0].pid
            client = pool.slots[0].client
            assert client is not None and victim is not None
            ask = client.request

            async def killed(method, path, body=None, **more):
                if path == "/weights_publication" and "commit" in str(body):
                    os.kill(victim, signal.SIGKILL)
                return await ask(method, path, body, **more)

            client.request = killed
            current["weights"] = weights_of(folders.b)
            await sync.publish(Version(number=1))
            answers = await asyncio.gather(*running)
            await until(lambda: made.restarts == 1 and pool.slots[0].state is SlotState.SERVING, 300)
            assert pool.slots[0].version == Version(number=1)
            return answers
        finally:
            await made.close()

    for prompt, answer in zip(PROMPTS, asyncio.run(run()), strict=True):
        assert numbers_of(answer) == [0, 1] and len(tokens_of(answer)) == 480
        kept = len(answer.spans[0])
        old = oracles["a"].logprobs(prompt.tolist(), tokens_of(answer))
        assert np.abs(answer.spans[0].logprobs - old[:kept]).max() < 1e-4
