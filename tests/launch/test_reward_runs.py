"""Whole runs with built-in rewards: mixtures, worker processes, and rows that ask for their own."""

import json
from pathlib import Path

import pytest
from tests.launch.small_run import write_inputs

from miles.launch.main import main


def train(inputs: Path, run: Path, *more: str) -> int:
    line = [
        *("train", "--hf-checkpoint", str(inputs), "--prompt-data", str(inputs / "train.jsonl"), "--save", str(run)),
        *("--label-key", "label", "--apply-chat-template", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"),
        *("--rollout-max-response-len", "4", "--num-rollout", "1", "--num-threads", "1", "--device", "cpu"),
        *("--view", "plain", *more),
    ]
    return main(line)


def measured(run: Path) -> dict:
    (row,) = (run / "metrics.jsonl").read_text().splitlines()
    return json.loads(row)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_a_mixture_reports_its_parts_by_name(inputs: Path, tmp_path: Path):
    assert train(inputs, tmp_path / "run", "--rm-type", "deterministic_random:0.75+regex:0.25") == 0
    found = measured(tmp_path / "run")
    parts = 0.75 * found["reward/deterministic_random"] + 0.25 * found["reward/regex"]
    assert found["reward"] == pytest.approx(parts)
    assert found["unscored_ratio"] == 0.0


def test_a_server_that_is_gone_ends_the_run_with_the_reason(inputs: Path, tmp_path: Path, capsys):
    gone = ("--rm-type", "remote_rm", "--rm-url", "http://127.0.0.1:9/", "--rm-retries", "0")
    assert train(inputs, tmp_path / "run", *gone) == 1
    said = capsys.readouterr()
    assert said.out.count("The reward failed for a trajectory of prompt ") == 1
    assert "The reward failed for 128 trajectories in a row" in said.err
    assert not (tmp_path / "run" / "checkpoints").exists() or not any((tmp_path / "run" / "checkpoints").iterdir())


def test_failures_can_be_trained_on_as_zeros(inputs: Path, tmp_path: Path, capsys):
    gone = ("--rm-type", "remote_rm", "--rm-url", "http://127.0.0.1:9/", "--rm-retries", "0")
    assert train(inputs, tmp_path / "run", *gone, "--failed-trajectories", "train") == 0
    found = measured(tmp_path / "run")
    assert (found["unscored_ratio"], found["reward"]) == (1.0, 0.0)
    assert "unscored 100%" in capsys.readouterr().out


def test_some_failed_rewards_are_counted_and_not_trained_on(inputs: Path, tmp_path: Path, capsys):
    (tmp_path / "mine.py").write_text(
        "from miles.core.types import Reward\n"
        "async def score(prompt, trajectory):\n"
        "    if trajectory.index == 1:\n        raise SystemExit(0)\n"
        "    return Reward(value=1.0)\n"
    )
    assert train(inputs, tmp_path / "run", "--custom-rm-path", f"{tmp_path / 'mine.py'}:score") == 0
    found = measured(tmp_path / "run")
    assert (found["unscored_ratio"], found["reward"], found["zero_std_ratio"]) == (0.5, 1.0, 1.0)
    said = capsys.readouterr().out
    assert "The reward failed for a trajectory of prompt" in said and "(SystemExit: 0)" in said
    assert "unscored 50%" in said
