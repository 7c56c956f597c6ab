"""Megatron's distributed checkpoints of models with adapters of any module and form."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.backends.megatron import cases
from tests.backends.megatron.adapter_dist_cases import (
    FAMILIES,
    IMAGE_KINDS,
    batches_of,
    load_adapters_and_train,
    load_adapters_elsewhere,
    train_adapters_and_save,
    train_options,
)
from tests.backends.megatron.family_cases import write_family
from tests.backends.megatron.test_model import layout
from tests.backends.megatron.test_vision import write_model
from tests.backends.megatron.torch_dist_cases import build_trainer, load_and_export
from tests.pool import ranks

from miles.backends.fsdp.local_model import LocalModel
from miles.core.types import Batch
from miles.launch.main import main
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.train.dp_group import SINGLE_RANK

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

TENSOR, PIPELINE = {"tensor": 2, "sequence": True}, {"pipeline": 2}
EXPERT = {"shard": 2, "expert": 2}
PARTS, HEAD = "all-linear,experts", "all-linear,lm_head"
CASES: dict[str, tuple[str, str | None, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "unmerged": ("qwen3", None, {"unmerged": True}, TENSOR, PIPELINE),
    "dropout": ("qwen3", None, {"dropout": 0.3}, TENSOR, TENSOR),
    "DoRA": ("llama", None, {"use_dora": True}, TENSOR, PIPELINE),
    "MLA and experts": ("deepseek_v3", PARTS, {}, EXPERT, {"tensor": 2, "pipeline": 2, "sequence": True}),
    "MLA and experts, unmerged": ("deepseek_v3", PARTS, {"unmerged": True}, TENSOR, EXPERT),
    "shared experts": ("qwen2_moe", None, {}, TENSOR, PIPELINE),
    "experts that share factors": ("qwen3_moe", "experts", {"shared_outer": True}, EXPERT, TENSOR),
    "DoRA of experts": ("qwen3_moe", PARTS, {"use_dora": True}, TENSOR, EXPERT),
    "output layer": ("qwen3 untied", HEAD, {}, PIPELINE, TENSOR),
    "output layer alone": ("qwen3 untied", "lm_head", {"unmerged": True}, TENSOR, PIPELINE),
    "output layer, unmerged": ("qwen3 untied", HEAD, {"unmerged": True}, {"tensor": 2, "pipeline": 2}, TENSOR),
    "tower": ("qwen2_5_vl", "all-linear,vision", {}, TENSOR, {"shard": 2}),
    "tower, unmerged": ("qwen2_5_vl", "vision.attn,vision.mlp", {"unmerged": True}, {"shard": 2}, TENSOR),
    "biases of experts": ("gpt-oss", None, {"unmerged": True}, EXPERT, TENSOR),
    "residual streams": ("gemma3n", None, {"unmerged": True}, TENSOR, {"shard": 2}),
    "recurrent mixers": ("qwen3_next", PARTS, {"unmerged": True}, EXPERT, PIPELINE),
}


@pytest.mark.parametrize("name", CASES)
def test_adapters_of_any_module_and_form_resume_and_convert(tmp_path: Path, name: str):
    kind, modules, form, made, read = CASES[name]
    folder, where = write_kind(tmp_path / "model", kind), layout(made)
    lora, there = cases.read_lora(folder, modules, **form), layout(read)
    out, saved = tmp_path / "checkpoint", tmp_path / "hf"
    out.mkdir()
    saved.mkdir()
    wanted = ranks(where.world, train_adapters_and_save, folder, where, lora, kind, out, saved)[0]
    files = {path.name for path in out.iterdir()}
    assert {".metadata", "common.pt", "adapter"} <= files and not any(name.startswith("model") for name in files)
    # In the same layout and in another one.
    found = ranks(where.world, load_adapters_and_train, folder, where, lora, kind, out)[0]
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    if not lora.dropout:  # masks depend on the rank of the tokens
        found = ranks(there.world, load_adapters_and_train, folder, there, lora, kind, out)[0]
        assert not cases.apart(found, wanted, 1e-4)
    # The weights are those of a Hugging Face checkpoint of the same run, and those of the FSDP trainer.
    assert main(["convert", str(out), str(tmp_path / "converted"), "--format", "float32"]) == 0
    own, converted = (load_all(tmp_path / each) for each in ("hf", "converted"))
    assert own.keys() == converted.keys() and all(torch.equal(own[name], converted[name]) for name in own)
    if not lora.dropout:
        (tmp_path / "alone").mkdir()
        save_alone(folder, lora, kind, tmp_path / "alone")
        for one, two in ((load_all(tmp_path / "alone"), own), (adapters(tmp_path / "alone"), adapters(out))):
            assert not cases.apart(two, one, 1e-4)
    # A model of Megatron's modules, without adapters, finds its names.
    other = write_kind(tmp_path / "other", kind, seed=1)
    ranks(there.world, load_and_export, other, there, out, tmp_path / "exported")
    exported = load_all(tmp_path / "exported")
    assert exported.keys() == own.keys() and all(torch.equal(exported[name], own[name]) for name in own)


IN_BFLOAT16 = {
    "merged": ("deepseek_v3", {}, EXPERT),
    "unmerged": ("qwen3_next", {"unmerged": True}, TENSOR),
    "DoRA": ("kimi_linear", {"use_dora": True}, TENSOR),
}


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_adapters_in_bfloat16_resume_and_convert_to_the_bit(tmp_path: Path, name: str):
    kind, form, made = IN_BFLOAT16[name]
    folder, where = write_kind(tmp_path / "model", kind), layout(made)
    lora, dtype = cases.read_lora(folder, PARTS, **form), torch.bfloat16
    out, saved = tmp_path / "checkpoint", tmp_path / "hf"
    out.mkdir()
    saved.mkdir()
    how = (folder, where, lora, kind, out)
    wanted = ranks(where.world, train_adapters_and_save, *how, saved, False, dtype)[0]
    found = ranks(where.world, load_adapters_and_train, *how, dtype)[0]
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert main(["convert", str(out), str(tmp_path / "converted"), "--format", "bfloat16"]) == 0
    own, converted = load_all(saved), load_all(tmp_path / "converted")
    assert own.keys() == converted.keys() and all(torch.equal(own[name], converted[name]) for name in own)


def write_kind(folder: Path, kind: str, seed: int = 0) -> Path:
    if kind in IMAGE_KINDS:
        write_model(folder, kind, seed)
    elif kind in FAMILIES:
        write_family(folder, kind)
    else:
        cases.written(folder, kind, seed)
    return folder


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def save_alone(folder: Path, lora: Any, kind: str, out: Path) -> None:
    """The checkpoint of the first step in one process of the FSDP2 trainer."""
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    model = cases.adapted(LocalModel(decoder, config=read_config(folder), frozen=True), folder, lora)
    trainer = build_trainer(model, SINGLE_RANK, ckpt_format="hf", **train_options(kind, layout({})))
    asyncio.run(trainer.step(Batch(step=0, samples=batches_of(kind)[0], num_groups=1)))
    asyncio.run(trainer.save(out))


@pytest.mark.parametrize("form", [{"unmerged": True}, {"use_dora": True}], ids=["unmerged", "DoRA"])
def test_another_base_is_refused_on_every_rank(tmp_path: Path, form: dict[str, Any]):
    folder, other = (cases.written(tmp_path / name, "qwen3", seed) for seed, name in enumerate(("model", "other")))
    lora, where = cases.read_lora(folder, None, **form), layout(TENSOR)
    (out := tmp_path / "checkpoint").mkdir()
    ranks(2, train_adapters_and_save, folder, where, lora, "qwen3", out)
    for said in ranks(2, load_adapters_elsewhere, other, where, lora, out):
        assert f"{out} was trained over another base than {other}" in said
    fewer = cases.read_lora(folder, "attn", **form)
    for said in ranks(2, load_adapters_elsewhere, folder, where, fewer, out):
        assert "holds other adapters than --lora-rank and --target-modules select" in said


def test_unmerged_adapters_are_written_in_the_background(tmp_path: Path):
    folder, where = cases.written(tmp_path / "model", "qwen3"), layout(PIPELINE)
    lora = cases.read_lora(folder, None, unmerged=True)
    (out := tmp_path / "checkpoint").mkdir()
    wanted = ranks(2, train_adapters_and_save, folder, where, lora, "qwen3", out, None, True)[0]
    found = ranks(2, load_adapters_and_train, folder, where, lora, "qwen3", out)[0]
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
