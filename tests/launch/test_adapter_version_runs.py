"""Whole runs whose engines hold each version of unmerged adapters by its own name (--lora-versions)."""

import json
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.launch.small_run import everything, flags, miles, write_inputs

LORA = ("--lora-rank", "4", "--lora-alpha", "8", "--no-lora-merge", "--parity", "exact")
NAMED = ("--lora-versions", "2")
EXPERTS = ("--target-modules", "attn,experts")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("moe"), moe=True)


def train(inputs: Path, run: Path, *more: str, steps: int = 2) -> list[dict]:
    done = miles("train", *flags(inputs, run, *LORA, *more, steps=steps))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


def read_adapter(run: Path) -> dict:
    return load_file(max((run / "checkpoints").iterdir()) / "adapter" / "adapter_model.safetensors")


def count_sent(run: Path) -> list[float]:
    rows = [json.loads(line) for file in run.glob("*.jsonl") for line in file.read_text().splitlines()]
    return [row["seconds"]["publish/bytes"] for row in rows if row.get("kind") == "train" and "seconds" in row]


@pytest.mark.parametrize(
    ("name", "more"),
    [("dense", ()), ("moe", EXPERTS), ("moe", (*EXPERTS, "--experts-shared-outer-loras"))],
    ids=["dense", "experts", "shared"],
)
def test_named_versions_come_to_the_bits_of_one_adapter_that_updates_replace(request, tmp_path, name, more):
    inputs = request.getfixturevalue(name)
    rows = train(inputs, tmp_path / "named", *more, *NAMED)
    assert [row["parity_max_abs"] for row in rows] == [0.0] * 2
    train(inputs, tmp_path / "replaced", *more)
    mine, theirs = read_adapter(tmp_path / "named"), read_adapter(tmp_path / "replaced")
    assert mine.keys() == theirs.keys() and all(bool((mine[each] == theirs[each]).all()) for each in mine)


@pytest.mark.parametrize(("name", "more"), [("dense", ()), ("moe", EXPERTS)], ids=["dense", "experts"])
def test_servers_of_ours_are_sent_each_version_as_an_adapter_of_its_own(request, tmp_path, name, more):
    inputs, run = request.getfixturevalue(name), tmp_path / "served"
    rows = train(inputs, run, *more, *NAMED, "--rollout-backend", "served", steps=3)
    assert [row["parity_max_abs"] for row in rows] == [0.0] * 3
    size = sum(tensor.nbytes for tensor in read_adapter(run).values())
    assert count_sent(run) == [size] * 3  # float32, and no weight
    log = (run / "logs" / "engines.log").read_text()
    assert "loads each version as a new adapter and compares the checksum of each tensor" in log


def test_an_asynchronous_run_has_one_version_in_every_response(dense, tmp_path):
    run = tmp_path / "run"
    rows = train(dense, run, *NAMED, "--max-weight-staleness", "1", steps=4)
    compared = [row["parity_max_abs"] for row in rows if "parity_max_abs" in row]
    assert compared and not any(compared)


def test_a_killed_run_continues_to_the_bit(dense, tmp_path):
    train(dense, tmp_path / "calm", *NAMED, steps=4)
    line = flags(dense, tmp_path / "run", *LORA, *NAMED, steps=4)
    assert miles("train", *line, kill_at="miles.train.optim.optimizer:Optimizer.step:6").returncode == -signal.SIGKILL
    again = miles("train", *line)
    assert again.returncode == 0, again.stderr
    assert everything(tmp_path / "run") == everything(tmp_path / "calm")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--lora-versions", "1"), "--lora-versions 1 leaves no version for requests in flight"),
        ((*NAMED, "--lora-merge"), "--lora-versions 2 needs adapters that are applied beside the weights"),
        ((*NAMED, "--rollout-backend", "sglang", "--parity", "auto"), "SGLang holds each version by name anyway"),
        ((*NAMED, "--draft-train", "eagle3"), "publishes adapters alone, but --draft-train changes weights too"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_a_sentence(dense, tmp_path, more, sentence):
    done = miles("train", *flags(dense, tmp_path / "run", *LORA, *more))
    assert done.returncode == 2 and sentence in done.stderr
