"""Kill a run while an asynchronous save is under way: it resumes from the checkpoint before, and ends as any other."""

import json
import signal

import pytest
from tests.launch.small_run import STEPS, everything, flags, miles, write_inputs

KILLS = {
    "while tensors are copied to the host": "miles.train.checkpoint.staging:StagingWriter.write_tensor:100",
    "while files are written": "miles.train.checkpoint.writer:ShardWriter._write:4",
    "before it is put in place": "miles.schedule.checkpoints:CheckpointDirectory._rename_into_place:2",
    "after it is in place, before it is reported": "miles.schedule.checkpoints:CheckpointDirectory._prune:2",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def calm(inputs, tmp_path_factory):
    """A run that was never stopped, and whose checkpoints were waited for."""
    run = tmp_path_factory.mktemp("calm") / "run"
    done = miles("train", *flags(inputs, run))
    assert done.returncode == 0, done.stderr
    return learnt(run)


def learnt(run):
    """Everything but where the logs stood, and the lines of saves, which only saves in turn have."""
    kept = everything(run)
    kept["events.jsonl"] = b"".join(
        line for line in kept["events.jsonl"].splitlines(keepends=True) if json.loads(line)["event"] != "Saved"
    )
    cursor = json.loads(kept.pop("cursor.json"))
    return kept | {"cursor": {name: value for name, value in cursor.items() if name != "log_offsets"}}


def test_a_run_saved_behind_its_back_learns_the_same_and_says_when_it_saved(inputs, calm, tmp_path):
    run = tmp_path / "run"
    done = miles("train", *flags(inputs, run, "--async-save"))
    assert done.returncode == 0, done.stderr
    assert learnt(run) == calm
    sessions = [json.loads(line) for line in (run / "logs" / "sessions.jsonl").read_text().splitlines()]
    assert [s["step"] for s in sessions if s["event"] == "Saved"] == list(range(2, STEPS + 1, 2))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [f"step-{n:06d}" for n in range(2, STEPS + 1, 2)]


@pytest.mark.parametrize("when", KILLS)
def test_a_run_killed_while_it_saves_behind_its_back_continues_to_the_bit(inputs, calm, tmp_path, when):
    run = tmp_path / "run"
    killed = miles("train", *flags(inputs, run, "--async-save"), kill_at=KILLS[when])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = miles("train", *flags(inputs, run, "--async-save"))
    assert again.returncode == 0, again.stderr
    assert learnt(run) == calm
    assert not list((run / "checkpoints").glob(".writing-*")), "torn drafts are swept by the next save"
