"""Whole runs whose user functions block, ignore their cancellation, or never answer: the run goes on, or ends."""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.launch.small_run import Command, miles, write_inputs

from miles.core.protocols import Engine, FilterResult, SamplingParams
from miles.core.types import Group, Prompt, Reward, Trajectory


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def line(inputs: Path, run: Path, *more: str, steps: int = 1) -> list[str]:
    return [
        *("train", "--hf-checkpoint", str(inputs), "--prompt-data", str(inputs / "train.jsonl"), "--save", str(run)),
        *("--label-key", "label", "--apply-chat-template", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"),
        *("--rollout-max-response-len", "4", "--num-rollout", str(steps), "--num-threads", "1", "--device", "cpu"),
        *("--view", "plain", *more),
    ]


async def blocks(prompt: Prompt, trajectory: Trajectory) -> Reward:
    """A blocking call in the second trajectory of each prompt."""
    if trajectory.index == 1:
        time.sleep(1e6)
    return Reward(value=1.0)


async def swallows(prompt: Prompt, trajectory: Trajectory) -> Reward:
    """Ignores its cancellation in the second trajectory of each prompt."""
    while trajectory.index == 1:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1e6)
    return Reward(value=1.0)


async def generate_and_block(prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory:
    os.write(1, b"blocked\n")
    time.sleep(1e6)
    raise AssertionError


def filter_and_block(group: Group) -> FilterResult:
    os.write(1, b"blocked\n")
    time.sleep(1e6)
    raise AssertionError


@pytest.mark.parametrize("name", ["blocks", "swallows"])
def test_a_reward_that_never_ends_fails_its_trajectories_and_the_run_goes_on(inputs: Path, tmp_path: Path, name: str):
    more = ("--custom-rm-path", f"{__name__}:{name}", "--reward-timeout", "1")
    done = miles(*line(inputs, tmp_path / "run", *more))
    assert done.returncode == 0, done.stderr
    (row,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(row)["unscored_ratio"] == 0.5
    assert "The reward function did not end when it was cancelled" in done.stdout


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--custom-generate-function-path", "generate_and_block"),
        ("--dynamic-sampling-filter-path", "filter_and_block"),
    ],
)
def test_a_function_that_blocks_for_ever_ends_the_run_at_the_stall_timeout(inputs, tmp_path: Path, flag, name):
    limits = ("--stall-timeout", "7", "--reward-timeout", "6")
    more = ("--rm-type", "deterministic_random", flag, f"{__name__}:{name}", *limits)
    done = miles(*line(inputs, tmp_path / "run", *more))
    assert done.returncode == 1
    assert "waited 7 s for the next group and none finished" in done.stderr
    assert "ticket 0" in done.stderr or "tickets 0" in done.stderr


class SilentSource:
    """A data source without a second prompt."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = list(prompts)

    def next(self) -> Prompt:
        if not self._prompts:
            block()
        prompt = self._prompts[0]
        self._prompts.clear()
        return prompt

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None: ...


def block(*args: Any) -> Any:
    os.write(1, b"blocked\n")
    time.sleep(1e6)


def block_and_catch(*args: Any) -> Any:
    """Not even the exception that ends the hook ends it."""
    os.write(1, b"blocked\n")
    while True:
        with contextlib.suppress(Exception):
            time.sleep(1e6)


STALL = ("--stall-timeout", "7", "--reward-timeout", "6")
_MAIN_THREAD_HOOKS = [
    ("--custom-advantage-function-path", "block"),
    ("--rollout-data-postprocess-path", "block"),
    ("--custom-rollout-log-function-path", "block"),
    ("--rollout-all-samples-process-path", "block_and_catch"),
]


def test_a_data_source_that_blocks_the_main_thread_for_ever_ends_the_run(inputs, tmp_path: Path):
    more = ("--rm-type", "deterministic_random", "--data-source-path", f"{__name__}:SilentSource", *STALL)
    done = miles(*line(inputs, tmp_path / "run", *more))
    assert done.returncode == 1
    # Two deadlines pass at the same time, that of the hook and that of the step which waits for it.
    assert re.search(r"[Tt]he data source has (blocked the run for|not returned the next prompt)", done.stderr)


@pytest.mark.parametrize(("flag", "name"), _MAIN_THREAD_HOOKS)
def test_a_hook_of_the_main_thread_that_blocks_for_ever_ends_the_run(inputs, tmp_path: Path, flag, name):
    more = ("--rm-type", "deterministic_random", flag, f"{__name__}:{name}", *STALL)
    done = miles(*line(inputs, tmp_path / "run", *more))
    assert done.returncode == 1
    assert f"{flag} {__name__}:{name} has blocked the run for " in done.stderr
    assert "(--stall-timeout); give what it waits for a time limit" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "name", "says"),
    [
        ("--data-source-path", "SilentSource", "the data source has not returned the next prompt (--data-source-path)"),
        ("--rollout-data-postprocess-path", "block", "--rollout-data-postprocess-path did not return within 7 s"),
    ],
)
def test_a_hook_beside_the_loop_that_blocks_for_ever_ends_the_run(inputs, tmp_path: Path, flag, name, says):
    more = ("--rm-type", "deterministic_random", flag, f"{__name__}:{name}", "--max-weight-staleness", "1", *STALL)
    done = miles(*line(inputs, tmp_path / "run", *more))
    assert done.returncode == 1
    assert says in done.stderr and "Traceback" not in done.stderr


def test_a_tracker_that_blocks_for_ever_is_removed_and_the_run_goes_on(inputs: Path, tmp_path: Path):
    more = ("--rm-type", "deterministic_random", "--custom-tracker-path", f"{__name__}:block", *STALL)
    done = miles(*line(inputs, tmp_path / "run", *more))
    assert done.returncode == 0, done.stderr
    assert f"--custom-tracker-path {__name__}:block has blocked the run for" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["block", "block_and_catch"])
def test_one_signal_ends_a_run_whose_main_thread_is_blocked_by_a_hook(inputs: Path, tmp_path: Path, name: str):
    more = ("--rm-type", "deterministic_random", "--rollout-data-postprocess-path", f"{__name__}:{name}")
    command = Command(*line(inputs, tmp_path / "run", *more))
    command.wait_to_hear("blocked")
    assert command.pid is not None
    os.kill(command.pid, signal.SIGTERM)
    done = command.done()
    assert done.returncode == 128 + signal.SIGTERM
    assert f"{name} has blocked the run for" in done.stderr and "the run was asked to stop" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_ends_a_run_whose_function_blocks(inputs: Path, tmp_path: Path, number: int):
    more = ("--rm-type", "deterministic_random", "--custom-generate-function-path", f"{__name__}:generate_and_block")
    command = Command(*line(inputs, tmp_path / "run", *more))
    command.wait_to_hear("blocked")
    assert command.pid is not None
    os.kill(command.pid, number)
    command.wait_to_hear("Stopping: this step is finished and saved first")
    os.kill(command.pid, number)
    done = command.done()
    assert done.returncode == 128 + number
    assert "Traceback" not in done.stderr


def test_sighup_saves_before_it_ends_the_run(inputs: Path, tmp_path: Path):
    command = Command(*line(inputs, tmp_path / "run", "--rm-type", "deterministic_random", steps=10000))
    command.wait_to_hear("/10000")
    assert command.pid is not None
    os.kill(command.pid, signal.SIGHUP)
    done = command.done()
    assert done.returncode == 128 + signal.SIGHUP, done.stderr
    assert "Stopped early and saved" in done.stdout
    assert any((tmp_path / "run" / "checkpoints").iterdir())
