"""Runs in which prompts are answered in several turns, through the front door: by an agent, and with tools."""

import json
import os
from typing import Any

import aiohttp
import pytest
from tests.launch.small_run import flags, write_inputs

from miles.core.types import Prompt
from miles.launch.main import main
from miles.rollout.tools.environment import OpenResult, StepResult


async def twice(base_url: str, prompt: list[dict[str, Any]], request_kwargs: dict[str, Any], metadata: dict[str, Any]):
    """Ask, and ask again with the reply in the conversation."""
    messages = list(prompt)
    async with aiohttp.ClientSession() as http:
        for question in ("again", None):
            body = {"model": "policy", "messages": messages, **request_kwargs}
            async with http.post(f"{base_url}/v1/chat/completions", json=body) as response:
                reported = await response.json()
                if response.status != 200:
                    return {"reward": 0.0}
            reply = reported["choices"][0]["message"]
            messages += [{"role": "assistant", "content": reply["content"] or ""}]
            if reported["choices"][0]["finish_reason"] == "length":
                break
            if question is not None:
                messages += [{"role": "user", "content": "abc"}]
    return None


class Letters:
    """A run that says itself what a trajectory earned: a point for every wanted letter."""

    async def open(self, prompt: Prompt) -> OpenResult:
        self._wanted = set(prompt.label or "")
        return OpenResult(messages=prompt.messages, provides_reward=True)

    async def step(self, reply) -> StepResult:
        return StepResult(reward=float(len(self._wanted & set(reply["content"]))), done=True)

    async def close(self) -> None:
        return


async def fail_in_every_session(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any):
    raise ConnectionError("the sandbox is gone")


async def abort(base_url: str, metadata: Any) -> None:
    """Called by the run after an agent of this module failed."""
    with open(os.environ["ABORTED_SESSIONS"], "a") as file:
        file.write(f"{base_url}\n")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory):
    return write_inputs(tmp_path_factory.mktemp("agents") / "inputs")


def test_an_agent_trains_the_policy_it_asks(inputs, tmp_path):
    run = tmp_path / "agent"
    more = ("--custom-agent-function-path", f"{__name__}:twice")
    assert main(["train", *flags(inputs, run, *more, steps=2)]) == 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["parity_max_abs"] for row in steps if row["kind"] == "train") < 1e-4


def test_the_abort_of_an_agents_module_is_called_for_every_failed_session(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("ABORTED_SESSIONS", str(tmp_path / "aborted"))
    more = (
        "--custom-agent-function-path",
        f"{__name__}:fail_in_every_session",
        "--max-reward-failures",
        "8",
        "--lr-warmup-iters",
        "0",
    )
    assert main(["train", *flags(inputs, tmp_path / "run", *more, steps=1)]) == 1
    assert len(set((tmp_path / "aborted").read_text().split())) >= 8


def test_tools_are_offered_in_several_turns(inputs, tmp_path):
    run = tmp_path / "tools"
    more = ("--custom-generate-function-path", "multi_turn", "--generate-max-turns", "2")
    assert main(["train", *flags(inputs, run, *more, steps=2)]) == 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["parity_max_abs"] for row in steps if row["kind"] == "train") < 1e-4


def test_an_environment_that_scores_needs_no_other_reward(inputs, tmp_path):
    run = tmp_path / "scored"
    more = ("--custom-generate-function-path", "multi_turn", "--generate-environment", f"{__name__}:Letters")
    line = flags(inputs, run, *more, steps=2)
    reward = line.index("--custom-rm-path")
    assert main(["train", *line[:reward], *line[reward + 2 :]]) == 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(row["reward"] > 0 for row in steps if row["kind"] == "train")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--custom-agent-function-path a.b:c --custom-generate-function-path multi_turn",
            "--custom-agent-function-path a.b:c and --custom-generate-function-path multi_turn both generate"
            " responses; keep one.",
        ),
        (
            "--generate-tools calculator",
            "--generate-tools needs --custom-generate-function-path multi_turn; add that, or remove --generate-tools.",
        ),
        ("--custom-agent-function-path nowhere.at:all", "nowhere"),
    ],
)
def test_what_does_not_go_together_is_said(inputs, tmp_path, capsys, line, expected):
    assert main(["train", *flags(inputs, tmp_path / "run", *line.split(), steps=1)]) != 0
    assert expected in capsys.readouterr().err
