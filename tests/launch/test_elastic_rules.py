"""What --elastic cannot do is refused before anything starts, and what it may do is planned."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from tests.launch.house import furnish

from miles.launch.elastic_rules import last_split, split_of, splits_of, with_split
from miles.launch.main import main, read
from miles.schedule.elastic import Split

GOOD = (
    "good.toml --rollout-backend served --actor-num-gpus-per-node 3 --rollout-num-gpus 2 --max-weight-staleness 1 "
    "--elastic"
)


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)


WRONG = [
    ("--max-weight-staleness 0", "they take turns; let them overlap with --max-weight-staleness 1 or more."),
    ("--colocate --max-weight-staleness 0", "with --colocate both have all of them; leave one out."),
    ("--no-rollout-num-gpus", "say with --rollout-num-gpus how many are rollout's at first."),
    ("--rollout-backend native", "one is in the trainer's process; use --rollout-backend served."),
    ("--rollout-external-engine-addrs http://a:1", "--rollout-external-engine-addrs run already; leave one out."),
    ("--update-weight-transport distributed", "over a group that --elastic breaks when ranks change"),
    ("--runtime ray --actor-num-nodes 2", "and --actor-num-nodes 2 has as many on each node"),
    ("--train-backend megatron", "--elastic changes the ranks of --train-backend fsdp, and not of megatron"),
    ("--async-save", "--async-save leaves files to ranks that --elastic may end"),
    ("--elastic-min-engines 4", "The run starts with 2 engines, fewer than --elastic-min-engines 4."),
    ("--elastic-min-ranks 4", "The run starts with 3 ranks, fewer than --elastic-min-ranks 4."),
    ("--elastic-min-ranks 3 --elastic-min-engines 2", "--elastic has nothing to move within its bounds"),
    ("--rollout-num-engines 1", "leave out --rollout-num-engines 1."),
    (
        "--tensor-model-parallel-size 3",
        "--elastic may come to 4 ranks, and then: --tensor-model-parallel-size 3 needs a multiple of 3 ranks",
    ),
    ("--no-elastic --elastic-patience 5", "--elastic-patience means nothing without --elastic"),
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
    assert "elastic    2 to 4 ranks, 1 to 3 engines; a device moves when one plane waits for the other 3" in said


def test_splits_share_the_same_devices_and_a_run_is_continued_with_its_last(tmp_path):
    config, _, _ = read("train", GOOD.split())
    assert splits_of(config) == [Split(4, 1), Split(3, 2), Split(2, 3), Split(1, 4)]
    assert all(split_of(with_split(config, split)) == split for split in splits_of(config))
    assert last_split(config, tmp_path) is config
    log = tmp_path / "logs" / "sessions.jsonl"
    log.parent.mkdir()
    rows = [{"event": "DevicesMoved", "ranks": r, "engines": e, "step": 1, "why": ""} for r, e in ((2, 3), (1, 4))]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert split_of(last_split(config, tmp_path)) == Split(1, 4)
    narrower = replace(config, bounds=replace(config.bounds, elastic_min_ranks=2))
    assert last_split(narrower, tmp_path) is narrower
    still = replace(config, bounds=replace(config.bounds, elastic=False))
    assert last_split(still, tmp_path) is still
