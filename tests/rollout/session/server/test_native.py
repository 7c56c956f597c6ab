"""Sessions on the embedded engine: a random small model speaks, and what its tokens were is what is trained on."""

import asyncio
from itertools import chain
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from tests.rollout.session.server.live_session_server import ADD, all_tokens, policy_tokens

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.core.protocols import Completion, SamplingParams, StreamingEngine
from miles.core.types import Prompt, Status, Version
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.rollout.generate.agent import AgentGenerate
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.session.server.app import SessionServer
from miles.rollout.session.server.local_client import LocalSessions
from miles.rollout.session.server.session_api import format_trajectory
from miles.sync.publish import Publication

SAMPLING = SamplingParams(max_new_tokens=8, ignore_eos=False, seed=3)
QUESTION = {"role": "user", "content": "the quick brown fox"}


class Recorded:
    """An engine's door, and all that went through it."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self.wrote: list[list[int]] = []

    async def generate(self, tokens, sampling, images=()):
        return self._kept(await self._engine.generate(tokens, sampling))

    async def generate_stream(self, tokens, sampling, hear, images=()):
        return self._kept(await self._engine.generate_stream(tokens, sampling, hear))

    def _kept(self, completion: Completion) -> Completion:
        self.wrote.append([int(token) for span in completion.spans for token in span.tokens])
        return completion


@pytest.fixture(scope="module")
def weights(tokenizer):
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 320, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 1024,
        "tie_word_embeddings": True, "eos_token_id": tokenizer.encode("<|im_end|>")[0], "hidden_act": "silu",
    }  # fmt: skip
    spec = spec_from_config(config)
    return spec, dict(hf.init_random(spec, seed=0, device="cpu", dtype=torch.float32).named_parameters())


async def served(tokenizer, weights) -> tuple[SessionServer, Recorded, Publication]:
    spec, parameters = weights
    engine = NativeEngine(
        spec,
        device="cpu",
        dtype=torch.float32,
        config=NativeConfig(engine_kv_tokens=8192),
        run=InlineExecutor(),
        decode=tokenizer.decode,
    )
    publication = Publication(weights=lambda: parameters, engines=[engine], transport="shared", run=InlineExecutor())
    await publication.publish(Version(number=1))
    recorded = Recorded(engine)
    server = SessionServer(build_renderer(tokenizer), tokenizer.decode, engine=recorded, sampling=SAMPLING, hold=True)
    await server.start()
    return server, recorded, publication


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def converse(client: openai.AsyncOpenAI, turns: int) -> None:
    """Ask; where the reply was cut, which is most of the time, ask something else."""
    messages: list = [QUESTION]
    for turn in range(turns):
        response = (await client.chat.completions.create(model="any", messages=messages, tools=[ADD])).choices[0]
        if response.finish_reason != "length":
            messages += [response.message, {"role": "user", "content": "and"}]
        else:
            messages = [*messages[:-1], {"role": "user", "content": f"{QUESTION['content']} {turn}"}]


def test_what_a_model_samples_under_changing_weights_is_what_is_trained_on(tokenizer, weights):
    async def run():
        server, engine, publication = await served(tokenizer, weights)
        entries = [server.open(engine, SAMPLING, id=f"s{i}") for i in range(3)]
        await asyncio.gather(*(converse(client_of(server.url(entry.key)), 3) for entry in entries))
        await publication.publish(Version(number=2))
        await converse(client_of(server.url(entries[0].key)), 2)
        bodies = [format_trajectory(entry, extras=True) for entry in entries]
        await server.stop()
        return bodies, engine.wrote

    bodies, wrote = asyncio.run(run())
    trained = [tokens for body in bodies for tokens in policy_tokens(body)]
    assert sorted(chain.from_iterable(trained)) == sorted(chain.from_iterable(wrote))
    assert {tuple(tokens) for tokens in wrote} >= {tuple(tokens) for tokens in trained if len(tokens) == 8}
    spans = [span for body in bodies for branch in body["branches"] for span in branch["spans"]]
    assert {span["version"]["number"] for span in spans if span["author"] == "policy"} == {1, 2}
    assert all(max(span["logprobs"]) < 0 for span in spans if span["author"] == "policy")


def test_a_session_does_not_depend_on_the_others(tokenizer, weights):
    async def run(sessions: int):
        server, engine, _ = await served(tokenizer, weights)
        entries = [server.open(engine, SAMPLING) for _ in range(sessions)]
        await asyncio.gather(*(converse(client_of(server.url(entry.key)), 2) for entry in entries))
        body = format_trajectory(entries[0], extras=False)
        await server.stop()
        return all_tokens(body)

    assert asyncio.run(run(1)) == asyncio.run(run(4))


def test_an_agent_is_trained_by_its_base_url_alone(tokenizer, weights):
    async def agent(base_url, prompt, request_kwargs, metadata):
        response = await client_of(base_url).chat.completions.create(model="any", messages=prompt, **request_kwargs)
        return {"reward": 0.5, "said": response.choices[0].message.content}

    async def run():
        server, engine, _ = await served(tokenizer, weights)
        generate = AgentGenerate(agent, LocalSessions(server))
        prompt = Prompt(id=4, messages=(QUESTION,), metadata={"kind": "test"})
        trajectory = await generate(prompt, engine, SAMPLING)
        left = len(server.sessions)
        await server.stop()
        return trajectory, engine.wrote, left

    trajectory, wrote, left = asyncio.run(run())
    assert [np.concatenate([s.tokens for s in trajectory.branches[0][1:]]).tolist()] == wrote
    assert trajectory.reward.value == 0.5 and "said" in trajectory.metadata and left == 0
    assert trajectory.status in (Status.COMPLETED, Status.TRUNCATED)


def test_the_agent_in_the_docs_runs(tokenizer, weights):
    page = (Path(__file__).parents[4] / "docs" / "agents.md").read_text(encoding="utf-8")
    names: dict = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)

    async def run():
        server, engine, _ = await served(tokenizer, weights)
        generate = AgentGenerate(names["agent"], LocalSessions(server, max_turns=32))
        trajectory = await generate(Prompt(id=1, messages=(QUESTION,)), engine, SAMPLING)
        await server.drain()
        await server.stop()
        return trajectory, engine.wrote

    trajectory, wrote = asyncio.run(run())
    assert trajectory.reward.value in (0.0, 1.0) and trajectory.response_length == len(wrote[0])


def test_an_agent_that_asks_too_often_or_never_is_told_apart(tokenizer, weights):
    async def greedy(base_url, prompt, request_kwargs, metadata):
        while True:
            await client_of(base_url).chat.completions.create(model="any", messages=prompt)

    async def idle(base_url, prompt, request_kwargs, metadata):
        return None

    async def run(agent):
        server, engine, _ = await served(tokenizer, weights)
        slots = LocalSessions(server, max_turns=2)
        trajectory = await AgentGenerate(agent, slots)(Prompt(id=1, messages=(QUESTION,)), engine, SAMPLING)
        await server.stop()
        return trajectory

    often, never = asyncio.run(run(greedy)), asyncio.run(run(idle))
    assert often.status is never.status is Status.FAILED
    assert "has used all of its 2 turns" in often.metadata["failure"] and len(often.branches) == 2
    assert never.response_length == 0


def test_what_is_heard_of_the_engine_is_what_it_wrote_and_a_stream_tells_it(tokenizer, weights):
    async def scenario() -> None:
        server, engine, _ = await served(tokenizer, weights)
        heard: list[int] = []
        streamed = await engine.generate_stream(np.array([3, 4, 5], np.int32), SAMPLING, heard.extend)
        whole = await engine.generate(np.array([3, 4, 5], np.int32), SAMPLING)
        assert isinstance(engine, StreamingEngine) and heard == engine.wrote[0] == engine.wrote[1]
        assert streamed.finish_reason == whole.finish_reason
        texts: list[str] = []
        for stream in (False, True):
            url = server.url(server.open(engine, SAMPLING).key)
            asked = {"model": "any", "messages": [QUESTION], "max_tokens": 40}
            if not stream:
                response = await client_of(url).chat.completions.create(**asked)
                texts.append(response.choices[0].message.content or "")
                continue
            pieces = await client_of(url).chat.completions.create(**asked, stream=True)
            texts.append("".join([piece.choices[0].delta.content or "" async for piece in pieces]))
        assert texts[0] == texts[1] and engine.wrote[2] == engine.wrote[3]
        await server.stop()

    asyncio.run(scenario())
