"""Rewards that workers compute are those of the run's own process, and so are the ways in which they fail."""

import asyncio
import os
import re
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.launch.small_run import write_inputs
from tests.launch.test_reward_runs import measured, train

from miles.core.errors import HookError
from miles.core.types import Author, Prompt, Span, Status, Trajectory, Version
from miles.hooks.worker import HookWorker
from miles.launch.build.rewards import build_pooled_rewards, build_rewards
from miles.launch.plan.render import as_text
from miles.launch.read_config import read
from miles.rollout.reward.types import GradingError

TWO = ("--n-samples-per-prompt", "2")
OWN = ("--custom-rm-path", "tests.launch.custom_rewards:score")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@asynccontextmanager
async def scored(inputs: Path, *more: str):
    """Rewards as the run's own process gives them, as workers do, and what is written down of these."""
    line = ["--hf-checkpoint", str(inputs), "--prompt-data", str(inputs / "train.jsonl"), "--num-rollout", "1", *TWO]
    config, _, _ = read("train", [*line, "--device", "cpu", "--reward-num-workers", "2", *more])
    direct = build_rewards(config)
    reward, group_reward, workers = build_pooled_rewards(config, inputs / "logs", HookWorker())
    assert workers is not None
    try:
        yield direct[0] or direct[1], reward or group_reward
    finally:
        await workers.close()


def prompt(label: str | None, number: int = 3, **metadata) -> Prompt:
    return Prompt(id=number, messages=({"role": "user", "content": "how?"},), label=label, metadata=metadata)


def trajectory(text: str, **metadata) -> Trajectory:
    span = Span(
        author=Author.POLICY,
        tokens=np.arange(len(text), dtype=np.int32),
        logprobs=np.zeros(len(text), np.float32),
        version=Version(number=1),
    )
    return Trajectory(branches=((span,),), status=Status.COMPLETED, metadata={"text": text, **metadata})


def test_a_trajectory_earns_what_it_would_in_the_runs_own_process(inputs):
    async def run():
        async with scored(inputs, *OWN) as (own, asked):
            what = [(prompt(None, i, turn=i), trajectory("a" * i, shown=[("a", 1), None])) for i in range(20)]
            far = await asyncio.gather(*(asked(*each) for each in what))
            assert far == [await own(*each) for each in what]
            assert (await asked(prompt("pid"), trajectory("a"))).value != os.getpid()

    asyncio.run(run())


def test_a_reward_fails_as_it_would_in_the_runs_own_process(inputs, tmp_path):
    async def run():
        async with scored(inputs, *OWN) as (_, asked):
            with pytest.raises(GradingError, match=r"^RuntimeError: this reply has no end$"):
                await asked(prompt("raise"), trajectory("a"))
            with pytest.raises(HookError, match=r"^the table of answers is missing; write it.$"):
                await asked(prompt("stop"), trajectory("a"))
            with pytest.raises(HookError, match="prompt 3"):
                await asked(prompt("number"), trajectory("a"))
            with pytest.raises(HookError, match="prompt 3 cannot be sent to the workers of --reward-num-workers"):
                await asked(prompt(None), trajectory("a", thing=object()))
            lost = await asked(prompt("die once", mark=str(tmp_path / "mark")), trajectory("abc"))
            assert lost.value == 6.0

    asyncio.run(run())
    assert re.search(r"ended with SIGKILL[^;]*; it is restarted\.", (inputs / "logs" / "rewards.log").read_text())


def test_groups_and_built_in_rewards_are_computed_there_too(inputs):
    replies = [trajectory("abc"), trajectory("a"), trajectory("four")]

    async def run():
        compare = ("--custom-rm-path", "tests.launch.custom_rewards:compare", "--group-rm")
        async with scored(inputs, *compare) as (own, asked):
            assert list(await asked(prompt(None), replies)) == await own(prompt(None), replies)
        async with scored(inputs, "--rm-type", "deterministic_random:0.75+contains:0.25", "--label-key", "label") as (
            own,
            asked,
        ):
            assert [await asked(prompt("a"), each) for each in replies] == [await own(prompt("a"), e) for e in replies]

    asyncio.run(run())


@pytest.mark.slow
def test_a_run_with_workers_measures_what_one_without_does(inputs, tmp_path):
    rewards = ("--rm-type", "deterministic_random:0.75+regex:0.25")
    assert train(inputs, tmp_path / "own", *rewards) == 0
    assert train(inputs, tmp_path / "far", *rewards, "--reward-num-workers", "1") == 0
    assert measured(tmp_path / "own") == measured(tmp_path / "far")


def test_workers_without_a_reward_are_refused(inputs, tmp_path, capsys):
    assert train(inputs, tmp_path / "none", "--reward-num-workers", "1") == 2
    assert "--reward-num-workers needs a reward, named by --rm-type or --custom-rm-path" in capsys.readouterr().err


def test_the_plan_tells_who_computes_rewards(inputs):
    line = [
        "--hf-checkpoint",
        str(inputs),
        "--prompt-data",
        str(inputs / "train.jsonl"),
        "--num-rollout",
        "1",
        *TWO,
        *OWN,
    ]
    shown = as_text(*read("train", [*line, "--device", "cpu", "--reward-num-workers", "3"]))
    assert "rewards    in 3 processes on this machine, 8 at once in each" in shown
    ray = ("--runtime", "ray", "--rollout-backend", "served", "--rollout-num-gpus", "2")
    pytest.importorskip("ray")
    shown = as_text(*read("train", [*line, "--device", "cpu", "--reward-num-workers", "3", *ray]))
    assert "rewards: 3 workers of 1 CPU each, spread over the nodes" in shown
    assert "together 6 CPU of the cluster" in shown
