"""Rewards from real servers: a judge and a scalar model that our own trainer made and our own servers serve."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.fsdp.test_reward_server import serving as serving_rewards
from tests.backends.native.server.live import serving
from tests.backends.native.server.tiny import EOS, VOCABULARY, write_tokenizer
from tests.rollout.reward.scripted_server import serving as loopback
from tests.train.small_trainer import step, worker
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles.backends.fsdp.local_model import LocalModel
from miles.backends.fsdp.reward_model import RewardModel
from miles.cluster.executor import InlineExecutor
from miles.core.types import Batch, Prompt, Sample, Status, Trajectory
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.tokenizer import load_tokenizer
from miles.rollout.reward.context import HTTPEndpoint, JudgeEndpoint, RewardModelEndpoint
from miles.rollout.reward.judge import LLMJudge
from miles.rollout.reward.remote import ModelReward
from miles.rollout.reward.types import GradingError
from miles.train.config import TrainConfig
from miles.train.reward_model_trainer import RewardModelTrainer

VERDICT = '{"scores": [9, 2]}'
PROMPT = Prompt(id=7, messages=({"role": "user", "content": "Where is the fox?"},), label="here")


def tried(*texts):
    return [
        Trajectory(branches=(), status=Status.COMPLETED, index=i, metadata={"text": text})
        for i, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A small model that has room for a judge's duty."""
    folder = Path(tmp_path_factory.mktemp("base"))
    write_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def row(tokens, start, **more):
    mask = np.arange(len(tokens)) >= start
    nothing = np.zeros(len(tokens), np.float32)
    return Sample(
        prompt_id=0,
        trajectory=0,
        tokens=np.array(tokens, np.int32),
        mask=mask,
        logprobs=nothing,
        advantages=np.where(mask, np.float32(more.pop("worth", 1.0)), nothing),
        versions=np.full(len(tokens), -1, np.int32),
        **more,
    )


def asked_of_the_judge(trajectories):
    """The messages it would be sent."""

    async def listen():
        answer = {"choices": [{"message": {"content": VERDICT}}]}
        async with loopback(lambda asked: answer) as served:
            judge = LLMJudge(JudgeEndpoint(server=HTTPEndpoint(url=served.url), model="tiny"), seed=0)
            return await judge(PROMPT, trajectories), served.asked[0].body["messages"]

    return asyncio.run(listen())


@pytest.fixture(scope="module")
def judge(base, tmp_path_factory) -> Path:
    """The model after it was taught its verdict."""
    _, messages = asked_of_the_judge(tried("there", "right here"))
    tokenizer = load_tokenizer(base)
    question = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    answer = [*tokenizer.encode(VERDICT), EOS]
    model = LocalModel(hf.load(base, device="cpu"), like=base, config=read_config(base))
    trainer = worker(model, algo={"loss_type": "sft_loss"}, updates=40, train={"lr": 5e-3, "adam_eps": 1e-8})
    demonstration = row([*question, *answer], len(question))
    losses = [step(trainer, [demonstration], n).metrics["loss"] for n in range(40)]
    assert losses[-1] < 0.1 < losses[0]
    folder = tmp_path_factory.mktemp("judge")
    model.save(folder)
    return folder


def test_a_judge_behind_our_server_compares_trajectories(judge):
    trajectories = tried("there", "right here")
    expected, _ = asked_of_the_judge(trajectories)

    async def compare():
        async with serving(judge) as live:
            settings = JudgeEndpoint(server=HTTPEndpoint(url=f"{live.url}/v1"), model="tiny", max_tokens=32)
            return await LLMJudge(settings, seed=0)(PROMPT, trajectories)

    found = asyncio.run(compare())
    assert [reward.value for reward in found] == [reward.value for reward in expected]
    assert sorted(reward.value for reward in found) == [0.0, 1.0]
    assert sorted(reward.parts["score"] for reward in found) == [0.2, 0.9]


def test_a_judge_that_babbles_leaves_its_trajectories_unscored(base):
    async def compare():
        async with serving(base) as live:
            settings = JudgeEndpoint(server=HTTPEndpoint(url=f"{live.url}/v1", retries=0), model="tiny", max_tokens=8)
            return await LLMJudge(settings, seed=0)(PROMPT, tried("there", "right here"))

    with pytest.raises(GradingError, match="the judge's answer holds no scores"):
        asyncio.run(compare())


def test_a_reward_model_of_our_trainer_behind_our_server_rewards_what_was_preferred(base, tmp_path):
    """From pairs to a checkpoint, to a server, to a reward."""
    tokenizer = load_tokenizer(base)
    good, bad = ["the fox is here", "here it is"], ["no idea", "go away"]

    def rendered(text):
        return tokenizer.apply_chat_template(
            [*PROMPT.messages, {"role": "assistant", "content": text}], add_generation_prompt=False
        )

    model = RewardModel(hf.load(base, device="cpu"), config=read_config(base), like=base)
    trainer = RewardModelTrainer(model, train=TrainConfig(lr=1e-2), steps=1, updates=20, run=InlineExecutor())
    pairs = [
        row(rendered(text), 1, worth=worth, samples_per_trajectory=2)
        for chosen, rejected in zip(good, bad, strict=True)
        for text, worth in ((chosen, 1.0), (rejected, -1.0))
    ]
    for number in range(20):
        asyncio.run(trainer.step(Batch(step=number, samples=tuple(pairs), num_groups=2)))
    model.save(tmp_path)

    async def rewarded():
        async with serving_rewards(tmp_path) as url:
            reward = ModelReward(
                RewardModelEndpoint(
                    server=HTTPEndpoint(url=url, batch=4), render_tokens=lambda m: tokenizer.apply_chat_template(m)
                )
            )
            return [(await reward(PROMPT, one)).value for one in tried(*good, *bad)]

    found = asyncio.run(rewarded())
    assert min(found[:2]) > max(found[2:]) + 1
