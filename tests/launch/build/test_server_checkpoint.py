"""The checkpoint of SGLang servers: a quantized copy is written once, and a checkpoint that is one is used in place."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.server_api.tiny import BLOCKS, make

from miles.config.cli import parse
from miles.core.errors import UsageError
from miles.launch.build import server_checkpoint
from miles.launch.build.models import PolicyCheckpoint, read_policy
from miles.launch.build.server_checkpoint import prepare_server_checkpoint
from miles.launch.config import Config
from miles.models.checkpoint.quant_config import read_quant_config
from miles.models.checkpoint.safetensors_io import read_config, stored_tensors

SGLANG = "--device cpu --rollout-backend sglang --rollout-precision fp8 --rollout-dtype bfloat16"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "tiny", 0, **BLOCKS)


def read(model: Path, line: str) -> tuple[Config, PolicyCheckpoint]:
    config = parse(Config, ["--hf-checkpoint", str(model), *line.split()]).config
    assert config is not None
    return config, read_policy(config)


def prepare(model: Path, run: Path, line: str = SGLANG) -> tuple[Path, list[str]]:
    notes: list[str] = []
    config, policy = read(model, line)
    return prepare_server_checkpoint(config, cast(Any, SimpleNamespace(run_dir=run)), policy, notes.append), notes


def test_a_quantized_copy_is_written_once_for_each_choice_of_layers(model, tmp_path):
    first, notes = prepare(model, tmp_path)
    assert first.parent == tmp_path / "rollout_checkpoints" and "in fp8 for SGLang" in notes[0]
    assert read_quant_config(read_config(first)) is not None
    assert stored_tensors(first)["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (3, 2)
    written = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert prepare(model, tmp_path) == (first, [])
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == written
    second, _ = prepare(model, tmp_path, f"{SGLANG} --first-last-layers-bf16")
    assert second != first and "model.layers.0.mlp.up_proj.weight_scale_inv" not in stored_tensors(second)
    assert "model.layers.1.mlp.up_proj.weight_scale_inv" in stored_tensors(second)


def test_a_checkpoint_in_the_engine_s_format_is_used_in_place(model, tmp_path):
    quantized, _ = prepare(model, tmp_path / "first")
    assert prepare(quantized, tmp_path / "second") == (quantized, [])
    assert not (tmp_path / "second").exists()
    other, notes = prepare(quantized, tmp_path / "second", f"{SGLANG} --first-last-layers-bf16")
    assert other != quantized and notes


@pytest.mark.parametrize("line", ["--rollout-backend sglang", "--rollout-backend served --rollout-precision fp8"])
def test_other_servers_load_the_checkpoint_of_the_run(model, tmp_path, line):
    assert prepare(model, tmp_path, f"--device cpu {line}") == (model, [])
    assert not list(tmp_path.iterdir())


def test_an_engine_in_float32_is_refused(model, tmp_path):
    with pytest.raises(UsageError, match="float32; add --rollout-dtype bfloat16"):
        prepare(model, tmp_path, "--device cpu --rollout-backend sglang --rollout-precision fp8")


@pytest.mark.parametrize(
    ("kind", "capability", "complaint"),
    [
        ("cuda", (8, 0), "SGLang repacks FP8 weights on GPUs without FP8 tensor cores"),
        ("rocm", (9, 4), "SGLang converts FP8 weights to another encoding on ROCm"),
        ("cuda", (9, 0), None),
    ],
)
def test_gpus_on_which_sglang_changes_the_weights_are_refused(
    model, tmp_path, monkeypatch, kind, capability, complaint
):
    config, policy = read(model, SGLANG)
    policy = replace(policy, platform=replace(policy.platform, kind=kind))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    plan = cast(Any, SimpleNamespace(run_dir=tmp_path))
    if complaint is None:
        assert prepare_server_checkpoint(config, plan, policy) != policy.folder
        return
    with pytest.raises(UsageError, match=f"{complaint}.*; use --rollout-backend served"):
        prepare_server_checkpoint(config, plan, policy)


@pytest.mark.parametrize(("capability", "triton"), [((9, 0), False), ((10, 0), True), ((12, 0), True)])
def test_triton_kernels_are_asked_for_where_the_default_ones_requantize(model, monkeypatch, capability, triton):
    _, policy = read(model, SGLANG)
    policy = replace(policy, platform=replace(policy.platform, kind="cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert server_checkpoint.needs_triton_fp8(policy) is triton
    assert not server_checkpoint.needs_triton_fp8(replace(policy, rollout_quantization=None))
