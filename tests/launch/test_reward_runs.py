"""Whole runs with built-in rewards: mixtures, worker processes, and rows that ask for their own."""

import json
from pathlib import Path

import pytest
from tests.launch.small_run import write_world

from miles.launch.main import main


def train(world: Path, run: Path, *more: str) -> int:
    line = [
        *("train", "--hf-checkpoint", str(world), "--prompt-data", str(world / "train.jsonl"), "--save", str(run)),
        *("--label-key", "label", "--apply-chat-template", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"),
        *("--rollout-max-response-len", "4", "--num-rollout", "1", "--num-threads", "1", "--device", "cpu"),
        *("--view", "plain", *more),
    ]
    return main(line)


def measured(run: Path) -> dict:
    (row,) = (run / "metrics.jsonl").read_text().splitlines()
    return json.loads(row)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def test_a_mixture_reports_its_parts_by_name(world: Path, tmp_path: Path):
    assert train(world, tmp_path / "run", "--rm-type", "deterministic_random:0.75+regex:0.25") == 0
    found = measured(tmp_path / "run")
    parts = 0.75 * found["reward/deterministic_random"] + 0.25 * found["reward/regex"]
    assert found["reward"] == pytest.approx(parts)
    assert found["unscored_share"] == 0.0


def test_a_server_that_is_gone_stops_the_run_only_after_many(world: Path, tmp_path: Path, capsys):
    gone = ("--rm-type", "remote_rm", "--rm-url", "http://127.0.0.1:9/", "--rm-retries", "0")
    assert train(world, tmp_path / "run", *gone) == 0
    found = measured(tmp_path / "run")
    assert (found["unscored_share"], found["reward"]) == (1.0, 0.0)
    assert train(world, tmp_path / "other", *gone, "--max-unscored-attempts", "3") == 1
    assert "The reward failed for 3 attempts in a row" in capsys.readouterr().err
