"""What the doctor sees, and the verdict."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from tests.launch.small_config import MOE, QWEN3

from miles.cluster import platform
from miles.kernels.runtime.selftest import SelfTestResult
from miles.launch.commands import doctor as room
from miles.launch.commands.doctor import OPTIONAL, PYTHON, REQUIRED, Rates, doctor
from miles.launch.main import main
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config

ROOT = Path(__file__).parents[3]


def write_checkpoint(folder: Path, config: dict[str, object]) -> None:
    decoder = hf.init_random(spec_from_config(config), seed=0, device="cpu", dtype=torch.float32)
    hf.export(decoder, folder, config=config)


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
    assert re.search(r"model\.layers\.2\.\S+ is missing from \S+: config.json requires it", capsys.readouterr().out)
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
    assert "does not support it either" in out and "docs/add_a_model.md" in out


def test_an_unknown_architecture_is_told_what_it_takes_and_which_ways_there_are(tmp_path: Path, capsys):
    from transformers import GraniteConfig

    config = GraniteConfig(residual_multiplier=0.2, logits_scaling=8.0, num_local_experts=0)
    config.architectures = ["GraniteForCausalLM"]
    config.save_pretrained(tmp_path / "m")
    assert doctor(tmp_path / "m") == 1
    out = capsys.readouterr().out
    assert "a scaled residual stream (residual_multiplier), scaled logits (logits_scaling)" in out
    assert "--model-impl transformers" in out


def test_a_new_architecture_with_the_mechanisms_of_deepseek_v4_is_told_which_of_them_there_are(tmp_path: Path, capsys):
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(num_hidden_layers=4, hidden_act="gelu")
    config.architectures = ["DeepseekV5ForCausalLM"]
    config.save_pretrained(tmp_path / "m")
    assert doctor(tmp_path / "m") == 1
    has, _, lacks = " ".join(capsys.readouterr().out.split()).partition("lacks")
    parts = ("hyper-connections", "(CSA, HCA)", "an output projection in groups", "sqrtsoftplus scores", "hash routing")
    assert all(part in has and part not in lacks for part in parts)
    assert "the activation gelu" in lacks


def test_a_quantised_checkpoint_is_not_taken_for_a_broken_one(tmp_path: Path, capsys):
    write_checkpoint(tmp_path / "m", QWEN3)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert doctor(tmp_path / "m") == 1
    assert "quant_method of config.json is 'bitsandbytes', but only" in capsys.readouterr().out


# -- device code ----------------------------------------------------------------------------


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an accelerator, as far as the report looks."""
    monkeypatch.chdir(tmp_path)
    made = platform.Platform(kind="cuda", device=torch.device("cpu"), name="A Card", memory_bytes=1 << 35)
    monkeypatch.setattr(platform, "detect_platform", lambda wanted: made)
    monkeypatch.setattr(platform.Platform, "free_bytes", lambda self: 1 << 34)
    monkeypatch.setattr(room, "measure", lambda here: Rates(float32=1, bfloat16=9))
    monkeypatch.setattr("miles.kernels.runtime.triton_compat.HAVE_TRITON", True)


def outcomes_are(monkeypatch: pytest.MonkeyPatch, *outcomes: SelfTestResult) -> None:
    def prove(device: torch.device, dtype: torch.dtype) -> list[SelfTestResult]:
        return [outcome for outcome in outcomes if outcome.dtype == str(dtype).removeprefix("torch.")]

    monkeypatch.setattr("miles.kernels.runtime.selftest.run_selftest", prove)


RIGHT = (
    SelfTestResult(name="norm", dtype="bfloat16", relative_error=3e-3, tolerance=1.2e-2),
    SelfTestResult(name="decode attention", dtype="bfloat16", relative_error=4e-3, tolerance=1.2e-2),
    SelfTestResult(name="experts", dtype="bfloat16", relative_error=5e-3, tolerance=2.4e-2),
    SelfTestResult(name="norm", dtype="float32", relative_error=1e-7, tolerance=1e-5),
    SelfTestResult(name="decode attention", dtype="float32", relative_error=0, tolerance=0),
)


@pytest.mark.usefixtures("card")
def test_on_a_card_kernels_that_agree_are_counted_with_the_worst(monkeypatch: pytest.MonkeyPatch, capsys):
    outcomes_are(monkeypatch, *RIGHT)
    assert main(["doctor", "--kernels"]) == 0
    out = capsys.readouterr().out
    bfloat16 = "bfloat16: 3 of 3 agree with torch on this GPU (worst: decode attention 4.0e-03)"
    assert f"  kernels       {bfloat16}\n  kernels       float32: 2 of 2 agree" in out
    assert out.endswith("verdict: this machine can run the demo. Try: miles demo\n")


@pytest.mark.usefixtures("card")
def test_kernels_that_are_off_or_fail_are_named_with_the_way_around_them(monkeypatch: pytest.MonkeyPatch, capsys):
    off = SelfTestResult(name="decode attention", dtype="bfloat16", relative_error=0.31, tolerance=1.2e-2)
    failed = SelfTestResult(name="experts", dtype="bfloat16", error="OutOfResources: out of resource: shared memory.")
    outcomes_are(monkeypatch, RIGHT[0], off, failed, *RIGHT[3:])
    assert main(["doctor", "--kernels"]) == 1
    out = capsys.readouterr().out
    assert "  kernels       bfloat16: 1 of 3 agree with torch on this GPU (worst: norm 3.0e-03)\n" in out
    wrong = "decode attention in bfloat16: 3.1e-01 off, where 1.2e-02 is rounding"
    full = "experts in bfloat16: OutOfResources: out of resource: shared memory."
    assert f"! kernels       {wrong}\n! kernels       {full}\n" in out
    report = "and please report it with these lines."
    assert out.endswith(
        "verdict: not yet.\n"
        f"  - {wrong}. Until that is mended, sample with --rollout-dtype float32; {report}\n"
        f"  - {full} Until that is mended, sample with --rollout-backend sglang, or --device cpu; {report}\n"
    )


@pytest.mark.usefixtures("card")
def test_where_no_kernel_agrees_none_is_called_the_worst(monkeypatch: pytest.MonkeyPatch, capsys):
    outcomes_are(monkeypatch, SelfTestResult(name="norm", dtype="bfloat16", error="RuntimeError: no"))
    assert main(["doctor", "--kernels"]) == 1
    assert "  kernels       bfloat16: 0 of 1 agree with torch on this GPU\n" in capsys.readouterr().out


@pytest.mark.usefixtures("card")
def test_on_a_card_the_report_says_how_its_kernels_are_tried(monkeypatch: pytest.MonkeyPatch, capsys):
    assert main(["doctor"]) == 0
    reported = "  kernels       not tried; miles doctor --kernels holds each against torch on this GPU\n"
    assert reported in capsys.readouterr().out
    monkeypatch.setattr("miles.kernels.runtime.triton_compat.HAVE_TRITON", False)
    assert main(["doctor"]) == 0
    assert "kernels       none: device code is compiled by Triton, and that is not" in capsys.readouterr().out
    assert main(["doctor", "--kernels"]) == 2
    assert "that is not installed: pip install triton, or leave it out." in capsys.readouterr().err


def test_without_an_accelerator_there_are_no_kernels_to_try(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor", "--kernels"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "miles: --kernels tries device code on an accelerator, and torch sees none here; leave it out.\n"
    assert main(["doctor"]) == 0
    assert "kernels" not in capsys.readouterr().out
