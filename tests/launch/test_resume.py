"""Kill a run anywhere, give the same command again: nothing tells it from a run that was never stopped."""

import json
import signal

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.launch.small_run import STEPS, Command, everything, flags, miles, write_inputs

from miles.observe.rollouts import WALL_CLOCK_COLUMNS, read_token_stats

KILLS = {
    "before anything was saved": "miles.backends.native.engine.engine:NativeEngine.step:5",
    "while sampling": "miles.backends.native.engine.engine:NativeEngine.step:28",
    "between two optimizer steps": "miles.train.optim.optimizer:Optimizer.step:6",
    "after the update, before it is published": "miles.sync.publish:Publication._transaction:5",
    "while the weights of a checkpoint are written": "miles.models.checkpoint.safetensors_io:write_atomically:6",
    "before a written checkpoint is sealed": "miles.schedule.checkpoints:CheckpointDirectory._seal:2",
    "before a sealed checkpoint is put in place": "miles.schedule.checkpoints:CheckpointDirectory._rename_into_place:2",
    "after it is in place, before it is reported": "miles.schedule.checkpoints:CheckpointDirectory._prune:2",
    "while the event log is written": "miles.observe.log:EventLog.write:40",
    "while a rollout is dumped": "miles.observe.rollouts:write_step:3",
    "in the last evaluation": "miles.rollout.evaluate:compute_scores:3",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def calm(inputs, tmp_path_factory):
    """The run that was never stopped."""
    run = tmp_path_factory.mktemp("calm") / "run"
    done = miles("train", *flags(inputs, run))
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.parametrize("when", KILLS)
def test_a_killed_run_continues_to_the_bit(inputs, calm, tmp_path, when):
    run = tmp_path / "run"
    killed = miles("train", *flags(inputs, run), kill_at=KILLS[when])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = miles("train", *flags(inputs, run))
    assert again.returncode == 0, again.stderr
    assert everything(run).keys() == everything(calm).keys()
    for name, content in everything(calm).items():
        assert everything(run)[name] == content, f"{name} differs"
    for step in range(1, STEPS + 1):
        tables = [pq.read_table(each / f"rollouts/step-{step:06d}.parquet") for each in (run, calm)]
        assert tables[0].drop_columns(WALL_CLOCK_COLUMNS).equals(tables[1].drop_columns(WALL_CLOCK_COLUMNS))
        trainer = [read_token_stats(each / f"rollouts/trainer/step-{step:06d}.parquet") for each in (run, calm)]
        assert trainer[0].keys() == trainer[1].keys() != set()
        for row, values in trainer[0].items():
            np.testing.assert_array_equal(np.stack(values), np.stack(trainer[1][row]))  # NaN equals NaN


def test_a_run_killed_again_and_again_continues_to_the_bit(inputs, calm, tmp_path):
    run = tmp_path / "run"
    for point in (
        "train.optim.optimizer:Optimizer.step:7",
        "observe.log:EventLog.write:25",
        "schedule.checkpoints:CheckpointDirectory._seal:1",
    ):
        assert miles("train", *flags(inputs, run), kill_at=f"miles.{point}").returncode == -signal.SIGKILL
    assert miles("train", *flags(inputs, run)).returncode == 0
    assert everything(run) == everything(calm)


def test_the_calm_run_did_what_the_flags_said(calm):
    events = [json.loads(line) for line in (calm / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds.count("StepFinished") == STEPS and kinds.count("Evaluated") == 3  # before, after 3, after 6
    assert any(not e["kept"] for e in events if e["event"] == "GroupFinished"), "no group was dropped: a weak test"
    metrics = [json.loads(line) for line in (calm / "metrics.jsonl").read_text().splitlines()]
    assert all(m["parity_max_abs"] < 1e-4 for m in metrics if m["kind"] == "train")
    assert all(m["staleness"] == 0 for m in metrics if m["kind"] == "train")


def test_the_same_command_on_a_finished_run_changes_nothing(inputs, calm):
    before = everything(calm)
    again = miles("train", *flags(inputs, calm))
    assert again.returncode == 0, again.stderr
    assert everything(calm) == before


def test_another_command_is_refused_with_what_changed(inputs, calm):
    done = miles("train", *flags(inputs, calm, lr="3e-2"))
    assert done.returncode == 1
    assert "lr was 0.01 and is now 0.03" in done.stderr and "--hf-checkpoint" in done.stderr
    assert "Traceback" not in done.stderr


def test_changed_prompts_are_refused(inputs, calm, tmp_path):
    other = write_inputs(tmp_path / "other")
    rows = (other / "train.jsonl").read_text().splitlines()
    (other / "train.jsonl").write_text("\n".join(reversed(rows)) + "\n")
    run = tmp_path / "run"
    killed = miles("train", *flags(other, run), kill_at="miles.train.optim.optimizer:Optimizer.step:7")
    assert killed.returncode == -signal.SIGKILL
    (other / "train.jsonl").write_text("\n".join(rows) + "\n")
    done = miles("train", *flags(other, run))
    assert done.returncode == 1 and "does not have the prompts" in done.stderr


def test_a_longer_run_goes_on_from_a_finished_one(inputs, tmp_path):
    run = tmp_path / "run"
    assert miles("train", *flags(inputs, run, "--lr-decay-iters", "12", steps=2)).returncode == 0
    done = miles("train", *flags(inputs, run, "--lr-decay-iters", "12", steps=4))
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if '"train"' in line]
    assert steps == [1, 2, 3, 4]


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(inputs, calm, tmp_path):
    run = tmp_path / "run"
    command = Command("train", *flags(inputs, run))
    command.wait_to_hear("step 1/")
    command.interrupt()
    done = command.done()
    assert done.returncode == 130, done.stderr
    assert "Stopping" in done.stdout
    printed = next(line for line in done.stdout.splitlines() if "The same command resumes" in line)
    again = miles(*printed.partition(": miles ")[2].split())
    assert again.returncode == 0, again.stderr
    assert everything(run) == everything(calm)


def test_two_processes_cannot_run_one_directory(inputs, tmp_path):
    run = tmp_path / "run"
    first = Command("train", *flags(inputs, run))
    first.wait_to_hear("step 1/")
    second = miles("train", *flags(inputs, run))
    assert second.returncode == 1 and f"process {first.pid} is running" in second.stderr
    assert first.done().returncode == 0
