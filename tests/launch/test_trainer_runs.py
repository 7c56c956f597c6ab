"""Runs whose trainer is a team of ranks, through the front door: they learn the same, and end together."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.launch.small_run import flags, shared_letters, write_inputs
from torch import distributed as dist

from miles.algo.loss_aggregation import LossAggregator
from miles.algo.policy_loss import LossInputs, LossOutput
from miles.cluster import spmd
from miles.core.types import Prompt, Reward, Trajectory
from miles.launch.main import main

PAIR = ("--actor-num-gpus-per-node", "2")
TENSOR = (*PAIR, "--tensor-model-parallel-size", "2")
# A schedule that does not depend on the length of a run, which is what a continued one changes.
STEADY = ("--lr-decay-iters", "6")
calls = 0


@pytest.fixture(scope="module", autouse=True)
def swift() -> Iterator[None]:
    """Ranks are forked from a process that has what they import."""
    multiprocessing.set_forkserver_preload(["miles.launch.distributed.models_fsdp", "tests.launch.small_run"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spmd, "START_METHOD", "forkserver")
        yield
    assert not [one for one in multiprocessing.active_children() if one.name.startswith("the trainer")]
    assert not dist.is_initialized()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs") / "inputs").parent


def trained(places: Path, name: str, *more: str, steps: int = 3) -> Path:
    run = places / name
    assert main(["train", *flags(places / "inputs", run, *STEADY, *more, steps=steps)]) == 0
    return run


@pytest.fixture(scope="module")
def alone(places: Path) -> Path:
    return trained(places, "alone")


@pytest.fixture(scope="module")
def pair(places: Path) -> Path:
    return trained(places, "pair", *PAIR)


def metrics(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if isinstance(v, float | int)} for row in rows if row["kind"] == "train"]


def assert_alike(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        # How many micro-batches there are depends on how many share them; parity is all rounding.
        for name in (n for n in mine if n != "micro_batches" and not n.startswith("parity")):
            assert mine[name] == pytest.approx(other[name], abs=1e-4, rel=1e-4), name


def weights(run: Path, step: int) -> dict[str, bytes]:
    """All that a checkpoint holds of the trainer."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in ("cursor.json", "manifest.json"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_two_ranks_that_share_batch_and_parameters_learn_as_one_alone(alone: Path, pair: Path):
    assert_alike(metrics(pair), metrics(alone))


def test_two_ranks_that_share_every_layer_learn_as_one_alone(alone: Path, places: Path):
    assert_alike(metrics(trained(places, "tensor", *TENSOR)), metrics(alone))


def test_a_run_of_two_ranks_is_continued_exactly_and_also_by_one(alone: Path, pair: Path, places: Path):
    short = trained(places, "short", *PAIR, steps=2)
    other = places / "other"
    shutil.copytree(short, other)
    trained(places, "short", *PAIR)
    assert metrics(short) == metrics(pair)
    assert weights(short, 3) == weights(pair, 3)
    trained(places, "other")
    assert_alike(metrics(other), metrics(alone))


# -- what goes wrong ------------------------------------------------------------------------


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _second_call_of_rank_1() -> bool:
    global calls
    calls += rank() == 1
    return calls == 2


def killed(counts_N: Sequence[int]) -> np.ndarray:
    """A reducer that the last rank does not survive, while the first goes on to meet it."""
    if _second_call_of_rank_1():
        os.kill(os.getpid(), signal.SIGKILL)
    return np.full(len(counts_N), 1 / sum(counts_N))


def raises(counts_N: Sequence[int]) -> np.ndarray:
    """One that fails on the last rank alone."""
    if _second_call_of_rank_1():
        raise ValueError("this rank has no patience left")
    return np.full(len(counts_N), 1 / sum(counts_N))


def odd(evidence: LossInputs, layout: LossAggregator) -> LossOutput:
    """A loss that says something else on every rank."""
    loss = layout.reduce(-evidence.advantage_R * evidence.logp_R)
    return LossOutput(loss=loss, metrics={"loss": loss.detach(), "own": torch.tensor(float(rank()))})


async def interrupting(prompt: Prompt, trajectory: Trajectory) -> Reward:
    """A reward during which someone presses Ctrl-C, once: in the first step, after the held-out words."""
    global calls
    calls += 1
    if calls == 8:
        os.kill(os.getpid(), signal.SIGINT)
    return await shared_letters(prompt, trajectory)


def failed(places: Path, name: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What a run says that fails, within seconds."""
    started = time.monotonic()
    line = flags(places / "inputs", places / name, *STEADY, *more)
    if "custom_loss" in more:  # which has no such part
        at = line.index("--use-kl-loss")
        del line[at : at + 3]
    assert main(["train", *line]) == 1
    assert time.monotonic() - started < 120  # the ranks' own patience is 10 minutes
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("miles: the trainer was stopped, because ")
    return said


@pytest.mark.parametrize("layout", [PAIR, TENSOR], ids=["shard", "tensor"])
def test_a_rank_that_is_killed_in_a_step_ends_the_run_in_a_sentence(
    places: Path, layout: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    hook = ("--custom-pg-loss-reducer-function-path", f"{__name__}:killed", "--trainer-max-restarts", "0")
    said = failed(places, f"killed-{len(layout)}", capsys, *layout, *hook)
    assert re.search("rank 1 of 2 ended with SIGKILL[^;]*; the same command resumes from", said)


def test_a_rank_that_fails_in_a_step_is_quoted(places: Path, capsys: pytest.CaptureFixture[str]):
    hook = ("--custom-pg-loss-reducer-function-path", f"{__name__}:raises")
    said = failed(places, "raises", capsys, *PAIR, *hook)
    assert f"rank 1 of 2 failed: --custom-pg-loss-reducer-function-path {__name__}:raises" in said
    assert "ValueError: this rank has no patience left" in said and "test_trainer_runs.py, line" in said


def test_ranks_that_come_to_different_results_are_stopped(places: Path, capsys: pytest.CaptureFixture[str]):
    hook = ("--loss-type", "custom_loss", "--custom-loss-function-path", f"{__name__}:odd")
    said = failed(places, "odd", capsys, *TENSOR, *hook)
    assert "rank 1 of 2 has another result than rank 0: own is" in said


def test_ctrl_c_saves_and_the_same_command_goes_on(places: Path, pair: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "calls", 0)
    run, hook = places / "stopped", ("--custom-rm-path", f"{__name__}:interrupting")
    line = ["train", *flags(places / "inputs", run, *STEADY, *PAIR, *hook, steps=3)]
    reward = line.index("tests.launch.small_run:shared_letters")
    del line[reward - 1 : reward + 1]
    assert main(line) == 130
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000001"]
    assert main(line) == 0
    assert metrics(run) == metrics(pair)
