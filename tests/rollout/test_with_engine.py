"""The rollout plane on the embedded engine: a random small model answers, is scored and is measured."""

import asyncio
import math

import pytest
import torch

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.core.protocols import SamplingParams
from miles.core.types import Author, Prompt, Status, Version
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.rollout.evaluate import Evaluator
from miles.rollout.generate.single_turn import SingleTurn
from miles.rollout.group_rollout import GroupRollout
from miles.rollout.prompt_renderer import PromptRenderer
from miles.rollout.reward.context import GraderContext
from miles.rollout.reward.mixture import build_builtin_reward
from miles.rollout.seeds import make_training_seed_fn
from miles.sync.publish import Publication

PROMPTS = [Prompt(id=i, messages=({"role": "user", "content": f"Say the number {i}."},)) for i in range(3)]
SAMPLING = SamplingParams(max_new_tokens=12)
VERSION = Version(number=4)


@pytest.fixture(scope="module")
def answering(tokenizer):
    """A function that makes a fresh engine with the same weights every time, and the way to ask it."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": len(tokenizer), "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 256,
        "tie_word_embeddings": True, "eos_token_id": tokenizer.eos_token_id, "hidden_act": "silu",
    }  # fmt: skip
    spec = spec_from_config(config)
    weights = dict(hf.init_random(spec, seed=0, device="cpu", dtype=torch.float32).named_parameters())

    async def engine() -> NativeEngine:
        made = NativeEngine(
            spec,
            device="cpu",
            dtype=torch.float32,
            config=NativeConfig(engine_kv_tokens=4096),
            run=InlineExecutor(),
            decode=tokenizer.decode,
        )
        publication = Publication(weights=lambda: weights, engines=[made], transport="shared", run=InlineExecutor())
        await publication.publish(VERSION)
        return made

    return engine, SingleTurn(PromptRenderer(tokenizer, chat=True), tokenizer.text)


def producer(engine, generate, group_size=4, **kwargs):
    return GroupRollout(
        engine=engine,
        generate=generate,
        sampling=SAMPLING,
        group_size=group_size,
        seed_fn=make_training_seed_fn(42),
        reward=build_builtin_reward("deterministic_random", GraderContext(seed=0)),
        **kwargs,
    )


def test_groups_from_the_engine_carry_what_a_trainer_needs(answering, tokenizer):
    make, generate = answering

    async def produce():
        return await producer(await make(), generate).produce(PROMPTS[1])

    group = asyncio.run(produce())
    replies = [t.branches[0][1] for t in group.trajectories]
    assert len({tuple(reply.tokens.tolist()) for reply in replies}) == 4
    for trajectory, reply in zip(group.trajectories, replies, strict=True):
        assert (reply.author, reply.version) == (Author.POLICY, VERSION)
        assert reply.logprobs is not None and (reply.logprobs < 0).all()
        assert trajectory.metadata["text"] == tokenizer.text(reply.tokens.tolist())
        assert trajectory.reward is not None and math.isfinite(trajectory.reward.value)


def test_attempts_do_not_depend_on_who_else_is_being_answered(answering):
    make, generate = answering

    async def alone(prompt, attempts):
        return await producer(await make(), generate, attempts).produce(prompt)

    async def together():
        maker = producer(await make(), generate)
        return await asyncio.gather(*map(maker.produce, PROMPTS))

    for group in asyncio.run(together()):
        fewer = asyncio.run(alone(group.prompt, 2))
        for mine, theirs in zip(fewer.trajectories, group.trajectories, strict=False):
            assert mine.branches[0][1].tokens.tolist() == theirs.branches[0][1].tokens.tolist()


def test_evaluation_measures_the_policy_the_same_every_time(answering):
    make, generate = answering

    async def measure():
        evaluate = Evaluator(
            {"numbers": PROMPTS},
            engine=await make(),
            generate=generate,
            sampling=SAMPLING,
            group_size=2,
            seed=7,
            reward=build_builtin_reward("deterministic_random", GraderContext(seed=0)),
            log_passrate=True,
        )
        return [await evaluate(), await evaluate()]

    first, second = asyncio.run(measure())
    assert first == second
    assert set(first) == {
        f"eval/numbers/{m}"
        for m in ("reward", "reward_stderr", "response_length", "truncated", "unscored", "pass@1", "pass@2")
    }


def test_attempts_that_were_cut_go_on_as_if_nothing_had_been(answering):
    make, generate = answering

    async def cut_after(steps):
        engine = await make()
        maker = producer(engine, generate, abort=engine.abort)
        coming = asyncio.create_task(maker.produce(PROMPTS[0]))
        while engine.stats()["generated_tokens"] < steps:
            await asyncio.sleep(0)
        await maker.interrupt()
        begun = await coming
        engine.check()
        return begun, await maker.resume_group(begun)

    whole = asyncio.run(undisturbed(answering))
    for steps in (1, 9, 23):
        begun, ended = asyncio.run(cut_after(steps))
        assert any(t.status is Status.ABORTED for t in begun.trajectories)
        assert all(t.reward is None for t in begun.trajectories if t.status is Status.ABORTED)
        for mine, theirs, cut in zip(ended.trajectories, whole.trajectories, begun.trajectories, strict=True):
            assert tokens_of(mine) == tokens_of(theirs)
            assert mine.reward == theirs.reward and mine.status == theirs.status
            assert mine.metadata["text"] == theirs.metadata["text"]
            assert tokens_of(mine)[: len(tokens_of(cut))] == tokens_of(cut)
            assert [s.version for s in mine.branches[0][1:]] == [VERSION] * (len(mine.branches[0]) - 1)


def test_attempts_aborted_by_others_are_renewed_where_they_are_wanted(answering):
    make, generate = answering

    async def disturbed():
        engine = await make()
        maker = producer(engine, generate, retry_aborted=True)
        coming = asyncio.create_task(maker.produce(PROMPTS[0]))
        for wanted in (5, 17):
            while engine.stats()["generated_tokens"] < wanted:
                await asyncio.sleep(0)
            await engine.abort()
        return await coming

    whole = asyncio.run(undisturbed(answering))
    for mine, theirs in zip(asyncio.run(disturbed()).trajectories, whole.trajectories, strict=True):
        assert tokens_of(mine) == tokens_of(theirs) and mine.status == theirs.status


async def undisturbed(answering):
    make, generate = answering
    return await producer(await make(), generate).produce(PROMPTS[0])


def tokens_of(trajectory):
    return [int(token) for span in trajectory.branches[0] for token in span.tokens]
