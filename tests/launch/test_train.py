"""Whole runs through the front door, in every mode one process has."""

import io
import json
import os

import pyarrow.parquet as pq
import pytest
import torch
from tests.launch.small_run import STEPS, flags, miles, write_inputs
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles.launch.main import main
from miles.models.checkpoint import hf


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def rows(run, kind="train"):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def trained(inputs, run, *more, **changed):
    done = miles("train", *flags(inputs, run, *more, **changed))
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("k", [1, 3])
def test_overlapping_planes_keep_the_staleness_budget_and_stamp_every_token(inputs, tmp_path, k):
    run = tmp_path / "run"
    trained(inputs, run, "--max-weight-staleness", str(k), "--reorder-window", str(k), "--use-tensorboard")
    staleness = [row["staleness"] for row in rows(run)]
    assert len(staleness) == STEPS and max(staleness) <= k
    for step, stale in enumerate(staleness, start=1):
        table = pq.read_table(run / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
        written = [v for row in table for v in row["versions"] if v >= 0]
        assert step - 1 - min(written) == stale
    assert any(name.startswith("events.out") for name in os.listdir(run / "tensorboard"))


def test_a_mixture_of_experts_trains_with_the_engines_routing(tmp_path):
    inputs = write_inputs(tmp_path / "inputs", moe=True)
    run = tmp_path / "run"
    trained(inputs, run, "--use-rollout-routing-replay")
    assert all(row["parity_max_abs"] < 1e-4 for row in rows(run))
    assert any(row["routing_mismatch_ratio"] > 0 for row in rows(run)), "after an update the router would choose anew"
    table = pq.read_table(run / "rollouts" / "step-000001.parquet")
    assert table.num_rows == 16


def test_a_killed_asynchronous_run_continues_and_trains_no_prompt_twice(inputs, tmp_path):
    run = tmp_path / "run"
    more = ("--max-weight-staleness", "2")
    killed = miles("train", *flags(inputs, run, *more), kill_at="miles.train.optim.optimizer:Optimizer.step:9")
    assert killed.returncode < 0
    trained(inputs, run, *more)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    taken = [ticket for event in events if event["event"] == "BatchTaken" for ticket in event["tickets"]]
    assert len(taken) == len(set(taken)) == 4 * STEPS
    dropped = [event["ticket"] for event in events if event["event"] == "GroupFinished" and not event["kept"]]
    assert set(range(max(taken) + 1)) == set(taken) | {t for t in dropped if t <= max(taken)}


def test_the_last_checkpoint_is_a_hugging_face_model_and_talks(inputs, tmp_path):
    run = tmp_path / "run"
    done = miles("train", *flags(inputs, run, steps=2), drawn=True)
    assert done.returncode == 0, done.stderr
    last = run / "checkpoints" / "step-000002"
    theirs = AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32)
    ours = dict(hf.iter_hf_tensors(hf.load(last, device="cpu", dtype=torch.float32)))
    for name, tensor in theirs.state_dict().items():
        if name in ours:
            assert torch.equal(ours[name], tensor)
    assert AutoTokenizer.from_pretrained(last).encode("abc") == [0, 1, 2]
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    start = next(iter(dict(hf.iter_hf_tensors(hf.load(inputs, device="cpu", dtype=torch.float32))).items()))
    assert not torch.equal(start[1], ours[start[0]]), "training changed nothing"

    scored = miles(
        "eval",
        str(run),
        "--eval-prompt-data",
        "heldout",
        str(inputs / "heldout.jsonl"),
        "--rm-type",
        "exact",
        "--label-key",
        "label",
        "--apply-chat-template",
        "--rollout-max-response-len",
        "6",
    )
    assert scored.returncode == 0, scored.stderr
    assert "eval/heldout/reward" in scored.stdout


def test_a_new_run_can_start_from_the_checkpoint_of_another(inputs, tmp_path):
    trained(inputs, tmp_path / "first", steps=2)
    trained(inputs, tmp_path / "second", "--load", str(tmp_path / "first"), lr="2e-2", steps=4)
    assert [row["step"] for row in rows(tmp_path / "second")] == [3, 4]


def test_a_reward_that_raises_is_shown_as_it_is_and_nothing_hangs(inputs, tmp_path):
    done = miles("train", *flags(inputs, tmp_path / "run", reward="broken"))
    assert done.returncode != 0
    assert "this grader is broken" in done.stderr


def test_a_label_the_grader_needs_and_the_data_lacks_is_one_sentence(inputs, tmp_path):
    argv = [a for a in flags(inputs, tmp_path / "run") if a not in ("--label-key", "label")]
    at = argv.index("--custom-rm-path")
    argv[at : at + 2] = ["--rm-type", "exact"]
    done = miles("train", *argv)
    assert done.returncode == 2
    assert "--rm-type exact compares with a reference answer; name its column with --label-key" in done.stderr
    assert "Traceback" not in done.stderr


def test_supervised_training_lowers_its_loss_and_needs_no_engine(inputs, tmp_path):
    run = tmp_path / "run"
    done = miles(
        *("train", "--hf-checkpoint", str(inputs), "--prompt-data", str(inputs / "warmup.jsonl"), "--save", str(run)),
        *("--label-key", "label", "--apply-chat-template", "--loss-type", "sft_loss", "--rollout-batch-size", "16"),
        *("--num-epoch", "3", "--lr", "1e-2", "--device", "cpu", "--view", "plain", "--num-threads", "1"),
    )
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in rows(run)]
    assert len(losses) == 12 and losses[-1] < 0.9 * losses[0]
    assert "loss" in done.stdout and "reward" not in done.stdout
    assert all(row["staleness"] == 0 for row in rows(run))


def test_a_start_that_failed_leaves_the_directory_to_the_corrected_command(inputs, tmp_path):
    run = tmp_path / "run"
    wrong = miles("train", *flags(inputs, run, reward="not_there"))
    assert wrong.returncode == 1 and "has no not_there" in wrong.stderr
    trained(inputs, run, steps=2)


def test_a_run_loaded_at_its_end_is_refused(inputs, tmp_path):
    trained(inputs, tmp_path / "first", steps=2)
    done = miles("train", *flags(inputs, tmp_path / "second", "--load", str(tmp_path / "first"), steps=2))
    assert done.returncode == 1 and "raise --num-rollout" in done.stderr


def test_chat_goes_on_after_what_it_cannot_answer(inputs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'a' * 70}\nabc\n"))
    assert main(["chat", str(inputs), "--device", "cpu", "--rollout-max-response-len", "4"]) == 0
    said = capsys.readouterr()
    assert "fills the model's 64 positions" in said.err and len(said.out.splitlines()) == 1
