"""Whole runs whose devices move between the planes while they go on."""

import asyncio
import json
from pathlib import Path

import pytest
from benchmarks.chaos_report import summarize_run
from tests.launch.small_run import Command, flags, miles, shared_letters, write_inputs
from tests.launch.test_engines_command import events

from miles.core.types import Prompt, Reward, Trajectory

ELASTIC = (
    *("--rollout-backend", "served", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1"),
    *("--max-weight-staleness", "1", "--elastic", "--elastic-patience", "2", "--skip-eval-before-train"),
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


async def late(prompt: Prompt, trajectory: Trajectory) -> Reward:
    """A grader that takes so long that the trainer waits for every group."""
    await asyncio.sleep(4.0)
    return await shared_letters(prompt, trajectory)


@pytest.mark.slow  # a run of minutes; what is decided is tested by itself
def test_a_rank_becomes_an_engine_where_the_trainer_waits(inputs, tmp_path):
    run = tmp_path / "run"
    line = flags(inputs, run, *ELASTIC, steps=1000)
    line[line.index("--custom-rm-path") + 1] = f"{__name__}:late"
    going = Command("train", *line)
    going.wait_to_hear("engine 1 at")
    going.interrupt()
    done = going.done()
    assert done.returncode == 130, done.stderr
    moved = events(run, "DevicesMoved")
    assert [(each["ranks"], each["engines"]) for each in moved] == [(1, 2)]
    assert moved[0]["step"] <= 6 and "the trainer waited" in moved[0]["reason"]
    assert [each["name"] for each in events(run, "EngineJoined")] == ["engine 1"]
    made = summarize_run(run)["steps"]
    assert made > moved[0]["step"]
    assert [each["version"][1] for each in events(run, "StepFinished")] == list(range(1, made + 1))
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["staleness"] for row in rows if "staleness" in row) <= 1
    assert not (run / ".handover").exists()

    line[line.index("--num-rollout") + 1] = str(made + 2)
    again = miles("train", *line)
    assert again.returncode == 0, again.stderr
    assert "Ranks 1, engines 2, as this run had them last (--elastic)." in again.stdout
    assert summarize_run(run)["steps"] == made + 2 and len(events(run, "DevicesMoved")) == 1


@pytest.mark.slow
def test_an_engine_becomes_a_rank_where_rollout_waits(inputs, tmp_path):
    run = tmp_path / "run"
    sizes = {"--actor-num-gpus-per-node": "1", "--rollout-num-gpus": "2"}
    line = flags(inputs, run, *ELASTIC, steps=14)
    for flag, size in sizes.items():
        line[line.index(flag) + 1] = size
    line[line.index("--n-samples-per-prompt") + 1] = "16"  # more to train on than an engine needs to sample it
    done = miles("train", *line)
    assert done.returncode == 0, done.stderr
    moved = events(run, "DevicesMoved")
    assert (moved[0]["ranks"], moved[0]["engines"]) == (2, 1) and "rollout waited" in moved[0]["reason"]
    assert [each["name"] for each in events(run, "EngineLeft")] == ["engine 0"]
    assert summarize_run(run)["steps"] == 14
