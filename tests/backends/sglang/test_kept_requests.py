"""New weights while servers keep their requests: every token knows which weights drew it, also when a server dies."""

import asyncio
import os
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.sglang.near import LONG as LONGER
from tests.backends.sglang.near import PROMPT, client_of, stand, until, url_of, weights_of
from tests.wire.oracle import Oracle
from tests.wire.tiny import END

from miles.backends.sglang.carriers import InRequests
from miles.backends.sglang.client import Client
from miles.backends.sglang.fleet import Fleet, State
from miles.backends.sglang.keeper import Care
from miles.backends.sglang.launch import Launched
from miles.backends.sglang.process import Command
from miles.backends.sglang.servers import Servers
from miles.cluster.local import Inline
from miles.core.errors import EngineError
from miles.core.protocols import Sampling
from miles.core.types import Version
from miles.models.choice import chosen_spec

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


def counted(client: Client) -> list[int]:
    """How many requests a client sends from now on."""
    sent, attempt = [0], client.attempt

    async def counting(tokens, sampling, hear=lambda tokens: None):
        sent[0] += 1
        return await attempt(tokens, sampling, hear)

    client.attempt = counting
    return sent


async def asked(made, hosts, sampling=LONG):
    """Requests that all have tokens, at servers that rest."""
    running = [
        asyncio.create_task(made.fleet.generate(prompt, replace(sampling, seed=i))) for i, prompt in enumerate(PROMPTS)
    ]
    await until(lambda: sum(len(client._flying) for client in made.clients) == len(PROMPTS))
    await until(lambda: all(reply.tokens for client in made.clients for reply in client._flying.values()))
    for hosted in hosts:  # so that none ends before the weights come
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(hosted.engine.pause(), hosted._loop))
    return running


async def further(client: Client) -> None:
    """Wait until each answer under way has more tokens than now."""
    before = {id(reply): len(reply.tokens) for reply in client._flying.values()}
    await until(lambda: all(len(reply.tokens) > before[id(reply)] for reply in client._flying.values()))


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
        async with stand(folders.a, [url_of(h) for h in pair], mode=mode) as made:
            sent = [counted(client) for client in made.clients]
            running = await asked(made, pair)
            made.current = weights_of(folders.b)
            await made.sync.publish(Version(number=1))
            answers = await asyncio.gather(*running)
            assert sum(count for (count,) in sent) == len(PROMPTS), "no request was asked twice"
            assert [s for s in made.said if "keeps its requests" in s] == [
                f"engine {i} keeps its requests while new weights come (--pause-generation-mode {mode})."
                for i in (0, 1)
            ]
            assert not made.troubles and all(seat.load == 0 for seat in made.fleet.seats)
            return answers

    for prompt, answer in zip(PROMPTS, asyncio.run(run()), strict=True):
        assert numbers_of(answer) == [0, 1] and answer.reason == "length"
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
        async with stand(folders.a, [url_of(pair[0])], mode="in_place") as made:
            running = await asked(made, pair[:1])
            for number in (1, 2, 5):
                await made.sync.publish(Version(number=number))  # the same weights, called otherwise
                (seen,) = {len(client._flying) for client in made.clients}
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
    class Stock(Client):
        """As of stock SGLang: its tokens' versions cannot be told apart."""

        @property
        def keeps(self) -> bool:
            return False

    async def run():
        async with stand(folders.a, [url_of(h) for h in pair], mode="retract") as made:
            made.clients[0].__class__ = Stock
            sent = [counted(client) for client in made.clients]
            running = await asked(made, pair)
            had = [client.flying for client in made.clients]
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


def test_a_fleet_says_which_servers_cannot_keep_requests():
    fleet, said = Fleet(["engine 0"], ends=frozenset(), mode="in_place"), []
    fleet.tell = said.append
    for _ in range(2):
        fleet.admit(fleet.seats[0], client_of("http://nowhere", "engine 0"), Version())
    assert len(said) == 1 and "asked again (abort), whatever --pause-generation-mode in_place says" in said[0]


@pytest.mark.parametrize(("mode", "word"), [("retract", "pause"), ("in_place", "commit"), ("retract", "continue")])
def test_what_a_server_had_that_dies_while_it_is_paused_goes_on_elsewhere_from_the_tokens_that_came(
    pair, folders, oracles, mode, word
):
    paths = {"pause": "/pause_generation", "commit": "/weights_publication", "continue": "/continue_generation"}

    async def run():
        async with stand(folders.a, [url_of(h) for h in pair], mode=mode) as made:
            running = await asked(made, pair)
            first, ask = made.clients[0], made.clients[0].ask
            had = first.flying

            async def dies(method, path, body=None, **more):
                told = await ask(method, path, body, **more)
                if path == paths[word] and (word != "commit" or b"commit" in str(body).encode()):
                    first.url = "http://127.0.0.1:9"  # nobody is there any more,
                    first.cut()  # and its connections are gone
                    return await ask(method, path, body, **more)
                return told

            first.ask = dies
            made.current = weights_of(folders.b)
            await made.sync.publish(Version(number=1))
            answers = await asyncio.gather(*running)
            assert had and [seat.state for seat in made.fleet.seats] == [State.ILL, State.SERVING]
            assert {name for name, _ in made.troubles} == {"engine 0"}
            return answers

    for prompt, answer in zip(PROMPTS, asyncio.run(run()), strict=True):
        assert numbers_of(answer) == [0, 1] and len(tokens_of(answer)) == 96
        kept = len(answer.spans[0])
        old = oracles["a"].logprobs(prompt.tolist(), tokens_of(answer))[:kept]
        assert np.abs(answer.spans[0].logprobs - old).max() < 1e-4


def test_weights_that_nobody_published_are_found_out_in_what_was_kept_too(pair, folders):
    async def run():
        async with stand(folders.a, [url_of(pair[0])], mode="in_place") as made:
            running = await asked(made, pair[:1])
            await made.clients[0].ask(
                "POST", "/update_weight_version", {"new_version": "actor-9", "abort_all_requests": False}
            )
            await made.clients[0].resume()
            await asyncio.gather(*running)

    with pytest.raises(EngineError, match="was given actor-0 and answers with weights it calls actor-9"):
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
        fleet = Fleet(names, ends=frozenset([END]), mode=mode)
        homes = [
            Launched(
                name, Command(words=words), tmp_path / f"{name}.log", lambda url, n=name: client_of(url, n), seconds=300
            )
            for name in names
        ]
        made = Servers(fleet, homes, Care(interval=5, timeout=20, first_wait=0, max_restarts=2), lambda sentence: None)
        current = {"weights": weights_of(folders.a)}
        how = {"carrier": InRequests(), "run": Inline(), "bucket_bytes": 1 << 20, "seconds": 120.0}
        sync = made.sync(lambda: current["weights"], chosen_spec(folders.a, "auto"), **how)
        try:
            await sync.publish(Version())
            sampling = Sampling(max_new_tokens=480, ignore_eos=True)
            running = [asyncio.create_task(made.generate(p, replace(sampling, seed=i))) for i, p in enumerate(PROMPTS)]
            await until(lambda: all(seat.client and seat.client.flying for seat in fleet.seats))
            await until(lambda: all(r.tokens for s in fleet.seats if s.client for r in s.client._flying.values()))
            for seat in fleet.seats:
                assert seat.client is not None
                await seat.client.pause("in_place")
            victim = homes[0].pid
            client = fleet.seats[0].client
            assert client is not None and victim is not None
            ask = client.ask

            async def killed(method, path, body=None, **more):
                if path == "/weights_publication" and "commit" in str(body):
                    os.kill(victim, signal.SIGKILL)
                return await ask(method, path, body, **more)

            client.ask = killed
            current["weights"] = weights_of(folders.b)
            await sync.publish(Version(number=1))
            answers = await asyncio.gather(*running)
            await until(lambda: made.restarts == 1 and fleet.seats[0].state is State.SERVING, 300)
            assert fleet.seats[0].version == Version(number=1)
            return answers
        finally:
            await made.close()

    for prompt, answer in zip(PROMPTS, asyncio.run(run()), strict=True):
        assert numbers_of(answer) == [0, 1] and len(tokens_of(answer)) == 480
        kept = len(answer.spans[0])
        old = oracles["a"].logprobs(prompt.tolist(), tokens_of(answer))
        assert np.abs(answer.spans[0].logprobs - old[:kept]).max() < 1e-4
