"""What --elastic cannot do is refused before anything starts, and what it may do is planned."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from tests.launch.small_config import furnish

from miles.launch.main import main
from miles.launch.plan.topology import get_split, list_splits, restore_split, with_split
from miles.launch.read_config import read
from miles.schedule.elastic import DeviceSplit

GOOD = (
    "good.toml --rollout-backend served --actor-num-gpus-per-node 3 --rollout-num-gpus 2 --max-weight-staleness 1 "
    "--elastic"
)


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)


WRONG = [
    ("--max-weight-staleness 0", "they run in turns; use --max-weight-staleness 1 or more."),
    ("--colocate --max-weight-staleness 0", "--colocate shares all of them; remove one of them."),
    ("--no-rollout-num-gpus", "--elastic needs --rollout-num-gpus: give the number of GPUs"),
    ("--rollout-backend native", "--elastic needs engines in processes of their own; use --rollout-backend served."),
    (
        "--rollout-external-engine-addrs http://a:1",
        "--rollout-external-engine-addrs names running ones; remove one of them.",
    ),
    ("--update-weight-transport distributed", "a process group that --elastic breaks when ranks change"),
    ("--runtime ray --actor-num-nodes 2", "but --actor-num-nodes 2 needs equally many on each node"),
    ("--train-backend megatron", "--elastic needs --train-backend fsdp, not megatron"),
    ("--async-save", "--async-save writes from ranks that --elastic may stop"),
    ("--elastic-min-engines 4", "--elastic-min-engines 4 exceeds the 2 engines at start; lower it."),
    ("--elastic-min-ranks 4", "--elastic-min-ranks 4 exceeds the 3 ranks at start; lower it."),
    ("--elastic-min-ranks 3 --elastic-min-engines 2", "--elastic cannot move any GPU within its bounds"),
    ("--rollout-num-engines 1", "remove --rollout-num-engines 1."),
    (
        "--tensor-model-parallel-size 3",
        "--elastic may change to 4 ranks, and then: --tensor-model-parallel-size 3 needs a multiple of 3 ranks",
    ),
    ("--no-elastic --elastic-patience 5", "--elastic-patience needs --elastic"),
    ("--elastic-patience 0", "--elastic-patience must be at least 1, not 0."),
]


@pytest.mark.parametrize(("line", "says"), WRONG, ids=[line for line, _ in WRONG])
def test_what_elastic_cannot_do_is_refused_in_a_sentence(line, says, capsys):
    words = [word for word in GOOD.split() if word != "--elastic" or "--no-elastic" not in line]
    given = shlex.split(line)
    for flag in (word for word in given if word.startswith("--") and word in words):
        at = words.index(flag)
        del words[at : at + 2]
    if "--no-rollout-num-gpus" in given:
        at = words.index("--rollout-num-gpus")
        del words[at : at + 2]
        given = []
    if "--rollout-external-engine-addrs" in given:
        at = words.index("--rollout-backend")
        del words[at : at + 2]
    assert main(["train", *words, *[word for word in given if word != "--no-elastic"]]) == 2
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said


def test_a_plan_says_how_far_devices_may_move(capsys):
    assert main(["plan", *GOOD.split(), "--elastic-min-ranks", "2"]) == 0
    said = capsys.readouterr().out
    assert "elastic    2 to 4 ranks, 1 to 3 engines; a GPU moves when one side waits for the other 3" in said


def test_splits_share_the_same_devices_and_a_run_is_continued_with_its_last(tmp_path):
    config, _, _ = read("train", GOOD.split())
    assert list_splits(config) == [DeviceSplit(4, 1), DeviceSplit(3, 2), DeviceSplit(2, 3), DeviceSplit(1, 4)]
    assert all(get_split(with_split(config, split)) == split for split in list_splits(config))
    assert restore_split(config, tmp_path) is config
    log = tmp_path / "logs" / "sessions.jsonl"
    log.parent.mkdir()
    rows = [{"event": "DevicesMoved", "ranks": r, "engines": e, "step": 1, "reason": ""} for r, e in ((2, 3), (1, 4))]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert get_split(restore_split(config, tmp_path)) == DeviceSplit(1, 4)
    narrower = replace(config, elastic=replace(config.elastic, elastic_min_ranks=2))
    assert restore_split(narrower, tmp_path) is narrower
    still = replace(config, elastic=replace(config.elastic, elastic=False))
    assert restore_split(still, tmp_path) is still
