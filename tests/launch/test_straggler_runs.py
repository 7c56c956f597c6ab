"""A run with one slow rank: it is named as the straggler, and nothing else changes."""

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.launch.small_run import flags, write_inputs
from torch import distributed as dist

from miles.algo.loss_aggregation import LossAggregator
from miles.algo.policy_loss import LossInputs, LossOutput
from miles.cluster import spmd
from miles.cluster.straggler import CONSECUTIVE_CHECKS
from miles.launch.main import main

LOSS = ("--loss-type", "custom_loss", "--custom-loss-function-path", f"{__name__}:laboured")


@pytest.fixture(scope="module", autouse=True)
def swift() -> Iterator[None]:
    multiprocessing.set_forkserver_preload(["miles.launch.distributed.models_fsdp", "tests.launch.small_run"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spmd, "START_METHOD", "forkserver")
        yield


def laboured(evidence: LossInputs, layout: LossAggregator) -> LossOutput:
    """A loss that costs the last rank far more than the other, and comes to the same."""
    if dist.get_rank() == 1:
        much = torch.ones(700, 700)
        for _ in range(40):
            much = much @ much / 700
    loss = layout.reduce(-evidence.advantage_R * evidence.logp_R)
    return LossOutput(loss=loss, metrics={"loss": loss.detach()})


def line(inputs: Path, run: Path, *more: str) -> list[str]:
    """A short run of two ranks; a loss of one's own has no divergence beside it."""
    words = flags(inputs, run, "--actor-num-gpus-per-node", "2", *LOSS, *more, steps=CONSECUTIVE_CHECKS + 1)
    at = words.index("--use-kl-loss")
    del words[at : at + 3]
    return words


@pytest.mark.slow
def test_a_rank_that_stays_behind_is_named_once_with_its_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    inputs, run = write_inputs(tmp_path / "inputs"), tmp_path / "run"
    assert main(["train", *line(inputs, run)]) == 0
    said = [each for each in capsys.readouterr().out.splitlines() if "times the median of the others" in each]
    assert len(said) == 1 and "rank 1 on " in said[0] and "since step 1." in said[0]
    rows = [json.loads(each)["seconds"] for each in (run / "timings.jsonl").read_text().splitlines()]
    ratios = [row["train/straggler_ratio"] for row in rows if "train/straggler_ratio" in row]
    assert len(ratios) == CONSECUTIVE_CHECKS + 1 and min(ratios) > 1.5
    assert main(["train", *line(inputs, tmp_path / "quiet", "--slow-rank-factor", "0")]) == 0
    assert "the median of the others" not in capsys.readouterr().out
