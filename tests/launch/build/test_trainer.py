"""A team's trainer by itself: the weights it gives, and what it takes for a difference."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.launch.small_run import flags, write_inputs
from torch import distributed as dist

from miles.cluster.executor import InlineExecutor
from miles.core.errors import CheckpointError
from miles.core.types import StepReport, Version
from miles.launch.build.hooks import load_algo_hooks
from miles.launch.build.models import load_model, read_policy
from miles.launch.distributed.driver import DistributedTrainer, _describe_difference, start_on_devices
from miles.launch.read_config import read

REPORT = StepReport(version=Version(number=3), metrics={"loss": 0.5, "grad_norm": float("nan")}, seconds={"pack": 1.0})


def test_results_agree_in_all_but_time_and_rounding():
    assert _describe_difference(REPORT, replace(REPORT, seconds={"pack": 9.0})) == ""
    assert _describe_difference(REPORT, replace(REPORT, metrics={"loss": 0.5000001, "grad_norm": float("nan")})) == ""
    assert _describe_difference(Version(number=2), Version(number=2)) == ""
    assert _describe_difference(None, None) == ""


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (replace(REPORT, version=Version(number=4)), "its weights are version 4, not 3"),
        (replace(REPORT, metrics={"loss": 0.5}), "only one of them has the metric grad_norm"),
        (replace(REPORT, metrics=REPORT.metrics | {"loss": 0.51}), "loss is 0.51 there and 0.5 here"),
        (replace(REPORT, metrics=REPORT.metrics | {"grad_norm": 1.0}), "grad_norm is 1 there and nan here"),
    ],
)
def test_a_difference_is_told_by_its_name(other: StepReport, says: str):
    assert _describe_difference(REPORT, other) == says


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[DistributedTrainer, dict[str, torch.Tensor], Path]]:
    """A team of one: all that a trainer of ranks does, and no other process."""
    root = tmp_path_factory.mktemp("team")
    config, plan, _ = read("train", flags(write_inputs(root / "inputs"), root / "run"))
    policy = read_policy(config)
    whole = {name: p.detach().clone() for name, p in load_model(policy).named_parameters()}
    trainer = start_on_devices(
        [policy.platform.device], config, plan, policy, InlineExecutor(), steps=2, algo_hooks=load_algo_hooks(config)
    )
    yield trainer, whole, root
    trainer.close()
    assert not dist.is_initialized()


def test_weights_are_whole_and_fresh_each_time(made: tuple[DistributedTrainer, dict[str, torch.Tensor], Path]):
    trainer, whole, _ = made
    found = trainer.weights()
    assert list(found) == list(whole)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_a_checkpoint_that_cannot_be_written_leaves_the_team_as_it_is(
    made: tuple[DistributedTrainer, dict[str, torch.Tensor], Path],
):
    trainer, whole, root = made
    bad, good = root / "bad", root / "good"
    (bad / "optimizer.safetensors").mkdir(parents=True)
    good.mkdir()
    with pytest.raises(CheckpointError, match=r"could not write optimizer\.safetensors"):
        asyncio.run(trainer.save(bad))
    asyncio.run(trainer.save(good))
    asyncio.run(trainer.load(good))
    assert all(torch.equal(found, whole[name]) for name, found in trainer.weights().items())
