"""--engine-max-running left open: all trajectories in flight on a GPU, up to 512; 256 elsewhere."""

import json
from pathlib import Path

import pytest
from tests.launch.small_config import furnish

from miles.launch.plan.running_requests import count_running_requests
from miles.launch.read_config import read
from miles.launch.rules.paths import read_spec_or_none
from miles.models.accounting.known_models import find_known_config


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    (tmp_path / "recurrent").mkdir()
    (tmp_path / "recurrent" / "config.json").write_text(json.dumps(find_known_config("Qwen3-Next-80B-A3B")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("--device cuda --rollout-batch-size 8 --n-samples-per-prompt 4", 256),
        ("--device cuda --rollout-batch-size 48 --n-samples-per-prompt 8", 384),
        ("--device cuda --rollout-batch-size 128 --n-samples-per-prompt 8", 512),
        ("--device cuda --rollout-batch-size 24 --n-samples-per-prompt 8 --max-weight-staleness 1", 384),
        ("--device cuda --rollout-batch-size 32 --n-samples-per-prompt 8 --over-sampling-batch-size 40", 320),
        ("--device cuda --rollout-batch-size 128 --n-samples-per-prompt 8 --engine-max-running 64", 64),
        ("--device cuda --rollout-batch-size 128 --n-samples-per-prompt 8 --rollout-backend served", 256),
        ("--device cuda --rollout-batch-size 128 --n-samples-per-prompt 8 --hf-checkpoint recurrent", 256),
        ("--device cpu --rollout-batch-size 128 --n-samples-per-prompt 8", 256),
    ],
)
def test_requests_run_at_once_as_there_are_trajectories_in_flight(line: str, count: int):
    config, plan, _ = read("plan", ["good.toml", *line.split()])
    spec = read_spec_or_none(config.models.hf_checkpoint, config.models.model_impl)
    assert spec is not None
    assert count_running_requests(config, plan.device, spec) == count
