"""Asynchronous rollout runs: over-sampled prompts, partial rollouts, weight updates in flight."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.launch.small_run import ROOT, everything, flags, write_inputs

from miles.launch.main import main


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory):
    return write_inputs(tmp_path_factory.mktemp("schedule") / "inputs")


def read(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def trained(run: Path) -> list[dict[str, Any]]:
    return [row for row in read(run, "metrics.jsonl") if row["kind"] == "train"]


def accounted(run: Path) -> int:
    """Groups that were trained on, when every ticket up to the last was reported once."""
    reported = [event for event in read(run, "events.jsonl") if event["event"] == "GroupFinished"]
    assert sorted(event["ticket"] for event in reported) == list(range(len(reported)))
    return sum(event["kept"] for event in reported)


def test_spare_prompts_are_cut_and_the_policy_stays_on_policy(inputs: Path, tmp_path: Path):
    run = tmp_path / "spare"
    assert main(["train", *flags(inputs, run, "--over-sampling-batch-size", "7", steps=4)]) == 0
    rows = trained(run)
    assert sum(row["groups_aborted"] for row in rows) > 0
    assert max(row["staleness"] for row in rows) == 0.0
    assert max(row["parity_max_abs"] for row in rows) < 1e-4
    assert accounted(run) == 16


def test_trajectories_that_were_cut_go_on_under_new_weights(inputs: Path, tmp_path: Path):
    run = tmp_path / "partial"
    more = ("--over-sampling-batch-size", "7", "--partial-rollout", "--mask-offpolicy-in-partial-rollout")
    more = (*more, "--async-max-concurrent-samples", "9", "--rollout-submission-granularity", "sample")
    assert main(["train", *flags(inputs, run, *more, steps=4)]) == 0
    rows = trained(run)
    assert sum(row["groups_aborted"] for row in rows) > 0
    assert accounted(run) == 16


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_new_weights_find_trajectories_under_way(inputs: Path, tmp_path: Path, mode: str):
    run = tmp_path / mode
    more = ("--max-weight-staleness", "2", "--pause-generation-mode", mode, "--async-max-concurrent-samples", "5")
    more = (*more, "--rollout-submission-granularity", "sample", "--adaptive-concurrency")
    assert main(["train", *flags(inputs, run, *more, steps=4)]) == 0
    rows = trained(run)
    assert len(rows) == 4 and max(row["staleness"] for row in rows) <= 2.0
    assert accounted(run) == 16


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--over-sampling-batch-size 2", "--over-sampling-batch-size 2 is below --rollout-batch-size 4, so"),
        ("--partial-rollout", "--partial-rollout needs --over-sampling-batch-size;"),
        ("--mask-offpolicy-in-partial-rollout", "--mask-offpolicy-in-partial-rollout masks tokens of older weights"),
        ("--pause-generation-mode retract", "--pause-generation-mode needs --max-weight-staleness 1 or more;"),
    ],
)
def test_what_does_not_go_together_is_told(inputs: Path, tmp_path: Path, capsys, line: str, sentence: str):
    assert main(["train", *flags(inputs, tmp_path / "run", *line.split())]) == 2
    assert sentence in capsys.readouterr().err


def test_train_async_py_is_miles_train_one_step_off(inputs: Path, tmp_path: Path):
    command = [sys.executable, ROOT / "train_async.py", *flags(inputs, tmp_path / "run", "--colocate")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 2
    assert "--max-weight-staleness 1" in run.stderr


def test_staleness_zero_in_the_asynchronous_layout_is_the_synchronous_run(inputs: Path, tmp_path: Path):
    """Trainer and engines in processes of their own, started by train_async.py: the same numbers, the same weights."""
    alone, apart = tmp_path / "alone", tmp_path / "apart"
    assert main(["train", *flags(inputs, alone, "--parity", "exact", steps=4)]) == 0
    layout = ("--max-weight-staleness", "0", "--rollout-backend", "served", "--rollout-num-engines", "2")
    command = [sys.executable, "train_async.py", *flags(inputs, apart, *layout, "--parity", "exact", steps=4)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(row["parity_max_abs"] for row in trained(apart)) == 0.0
    expected, found = everything(alone), everything(apart)
    assert expected.keys() == found.keys()
    assert [name for name in expected if expected[name] != found[name]] == []
