"""--share-prefix left open: decided for each batch on a GPU, off where it cannot be or is not estimated."""

import json
from pathlib import Path

import pytest
from tests.launch.small_config import furnish

from miles.launch.plan.prefix_sharing import choose_prefix_sharing
from miles.launch.plan.render import as_json, as_text
from miles.launch.read_config import read
from miles.launch.rules.paths import read_spec_or_none
from miles.models.accounting.known_models import find_known_config


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    for name, model in (("recurrent", "Qwen3-Next-80B-A3B"), ("dense", "Qwen3-0.6B"), ("images", "gemma-4-26B-A4B")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(find_known_config(model)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


LENGTHS = "--rollout-max-prompt-len 256 --rollout-max-response-len 256 --n-samples-per-prompt 8"


@pytest.mark.parametrize(
    ("line", "mode", "reason"),
    [
        ("", "off", "the estimate is for GPUs"),
        ("--share-prefix", "on", ""),
        ("--device cuda --no-share-prefix", "off", ""),
        ("--device cuda", "auto", "decided for each batch"),
        ("--device cuda --parity exact", "auto", "decided for each batch"),
        (f"--device cuda --hf-checkpoint dense {LENGTHS}", "auto", "yes for 8 responses of 256 tokens"),
        ("--device cuda --hf-checkpoint recurrent", "off", "the model cannot: its recurrent layers"),
        ("--device cuda --hf-checkpoint images", "auto", "decided for each batch"),
        ("--device cuda --hf-checkpoint images --use-rollout-routing-replay", "off", "may differ within an image"),
        ("--device cuda --micro-batch-size 2", "off", "--micro-batch-size counts samples"),
        ("--device cuda --train-backend megatron", "off", "does not share"),
    ],
)
def test_prefixes_are_shared_as_the_plan_says(line: str, mode: str, reason: str):
    config, plan, origins = read("plan", ["good.toml", *line.split()])
    spec = read_spec_or_none(config.models.hf_checkpoint, config.models.model_impl)
    assert spec is not None
    choice = choose_prefix_sharing(config, plan, spec)
    assert (choice.mode, choice.cost is not None) == (mode, mode == "auto") and reason in choice.reason
    text = as_text(config, plan, origins)
    assert ("prefixes " in text) == bool(mode != "off" or reason) and reason in text
    assert json.loads(as_json(config, plan, origins))["prefix_sharing"] == {"mode": mode, "reason": choice.reason}
