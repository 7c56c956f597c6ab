"""What the doctor sees, and the verdict."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from tests.launch.house import MOE, QWEN3

from miles.launch import doctor as room
from miles.launch.doctor import OPTIONAL, PYTHON, REQUIRED, Rates, doctor
from miles.launch.main import main
from miles.models import hub
from miles.models.families import spec_of

ROOT = Path(__file__).parents[2]


def write_checkpoint(folder: Path, config: dict[str, object]) -> None:
    decoder = hub.random(spec_of(config), seed=0, device="cpu", dtype=torch.float32)
    hub.export(decoder, folder, config=config)


def test_what_is_required_is_what_the_package_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = dict(line.split(">=") for line in project["dependencies"])
    assert declared == REQUIRED
    assert project["requires-python"] == f">={PYTHON[0]}.{PYTHON[1]}"


def test_a_machine_that_can_run_the_demo_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("python", *REQUIRED, *OPTIONAL, "device", "cores", "disk", "matmul"):
        assert f" {name} " in out
    assert out.endswith("verdict: this machine can run the demo. Try: miles demo\n")


def test_what_is_missing_or_old_is_told_with_the_mend(monkeypatch: pytest.MonkeyPatch, capsys):
    found = {"torch": None, "numpy": "1.26.4"}
    monkeypatch.setattr(room, "_version", lambda name: found.get(name, "99.0"))
    assert doctor(None) == 1
    out = capsys.readouterr().out
    assert "! torch         absent" in out
    assert "  - torch is not installed: pip install 'torch>=2.11'." in out
    assert "  - numpy 1.26.4 is older than 2.0: pip install 'numpy>=2.0'." in out
    assert "device" not in out


@pytest.mark.parametrize(
    ("version", "least", "enough"), [("2.11.0+cu130", "2.11", True), ("2.9.1", "2.11", False), ("18", "18", True)]
)
def test_versions_are_compared_as_numbers(version: str, least: str, enough: bool):
    assert (room._numbers(version) >= room._numbers(least)) == enough


def test_the_faster_precision_is_recommended():
    assert Rates(float32=40, bfloat16=0.2).dtype == "float32"
    assert Rates(float32=60, bfloat16=700).dtype == "bfloat16"


@pytest.mark.parametrize("config", [QWEN3, MOE], ids=["dense", "experts"])
def test_a_whole_checkpoint_is_measured(config: dict[str, object], tmp_path: Path, capsys):
    write_checkpoint(tmp_path / "m", config)
    assert main(["doctor", str(tmp_path / "m")]) == 0
    out = capsys.readouterr().out
    assert f"{config['model_type']}, 0." in out and "F32" in out
    assert out.endswith(f"verdict: this machine can run the demo, and train {tmp_path / 'm'}.\n")


def test_a_checkpoint_that_is_not_what_its_config_says_is_told(tmp_path: Path, capsys):
    write_checkpoint(tmp_path / "m", QWEN3)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert doctor(tmp_path / "m") == 1
    assert re.search(r"model\.layers\.2\.\S+ is missing from \S+: config.json asks for it", capsys.readouterr().out)
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"vocab_size": 1001}))
    assert doctor(tmp_path / "m") == 1
    out = capsys.readouterr().out
    assert "model.embed_tokens.weight in " in out and "has shape (1000, 96), but config.json says (1001, 96)." in out


def test_a_model_that_is_too_large_is_told(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    write_checkpoint(tmp_path / "m", QWEN3)
    monkeypatch.setattr("miles.cluster.platform.Platform.free_bytes", lambda self: 1 << 16)
    assert doctor(tmp_path / "m") == 1
    out = capsys.readouterr().out
    assert "The demo needs 1.0 GiB of memory, and 64.0 KiB is free." in out
    assert "which do NOT fit" in out and "takes 4." in out


def test_an_architecture_nobody_knows_is_told(tmp_path: Path, capsys):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"architectures": ["OddForCausalLM"]}')
    assert doctor(tmp_path / "m") == 1
    out = capsys.readouterr().out
    assert "OddForCausalLM, which no family here reads" in out
    assert "does not know it either" in out and "docs/add_a_model.md" in out


def test_an_unknown_architecture_is_told_what_it_takes_and_which_ways_there_are(tmp_path: Path, capsys):
    from transformers import GraniteConfig

    config = GraniteConfig(residual_multiplier=0.2, logits_scaling=8.0, num_local_experts=0)
    config.architectures = ["GraniteForCausalLM"]
    config.save_pretrained(tmp_path / "m")
    assert doctor(tmp_path / "m") == 1
    out = capsys.readouterr().out
    assert "a scaled residual stream (residual_multiplier), scaled logits (logits_scaling)" in out
    assert "--model-impl transformers" in out


def test_a_quantised_checkpoint_is_not_taken_for_a_broken_one(tmp_path: Path, capsys):
    write_checkpoint(tmp_path / "m", QWEN3)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    assert doctor(tmp_path / "m") == 1
    assert "quant_method of config.json is 'awq', but only 'fp8' and 'mxfp4' are read" in capsys.readouterr().out
