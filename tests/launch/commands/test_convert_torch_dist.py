"""Behaviour of ``miles convert`` to and from Megatron's distributed checkpoints, without Megatron."""

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.oracle import hf_model
from torch.distributed import checkpoint as dcp

from miles.core.errors import ResumeError
from miles.launch.commands.train import resolve_load
from miles.launch.main import main
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.draft.checkpoint import init_eagle, load_eagle, plan_draft_save
from miles.models.draft.spec import build_eagle_spec
from miles.models.families import spec_from_config

KINDS = ["llama", "qwen3", "qwen3 moe", "kimi k2", "glm-4.5", "gpt-oss", "lfm2 moe", "hybrid nemotron 3"]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def run(*words: object) -> int:
    return main(["convert", *map(str, words)])


def complaint(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert run(*words) in (1, 2), words
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("model*.safetensors")) for name, t in load_file(file).items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    hf_model("qwen3", **SIZES).to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def saved(source: Path, tmp_path: Path) -> Path:
    assert run(source, tmp_path / "dist", "--format", "torch_dist") == 0
    return tmp_path / "dist"


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_is_the_same_to_the_bit(kind: str, tmp_path: Path):
    hf_model(kind).to(torch.bfloat16).save_pretrained(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "dist", "--format", "torch_dist") == 0
    assert (tmp_path / "dist" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert run(tmp_path / "dist", tmp_path / "out", "--format", "bfloat16") == 0
    wanted, found = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[n], found[n]) for n in wanted)


def test_torch_reads_what_is_written(source: Path, saved: Path):
    # torch's own reader, which is what Megatron's is made of.
    found = {"decoder.layers.mlp.linear_fc2.weight": torch.empty(2, 64, 96, dtype=torch.bfloat16)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(saved / "release"), no_dist=True)
    own = tensors(source)
    wanted = torch.stack([own[f"model.layers.{i}.mlp.down_proj.weight"] for i in range(2)])
    assert torch.equal(found["decoder.layers.mlp.linear_fc2.weight"], wanted)
    args = torch.load(saved / "release" / "common.pt", weights_only=False)["args"]
    assert (args.num_layers, args.hidden_size, args.num_experts) == (2, 64, None)


def test_a_draft_head_of_a_run_comes_along_in_every_direction(source: Path, tmp_path: Path, capsys):
    policy = spec_from_config(read_config(source))
    head = init_eagle(build_eagle_spec(policy), seed=1, device="cpu", dtype=torch.float32)
    save_plan = plan_draft_save(head, torch.bfloat16)
    (source / "draft").mkdir()
    stored = {
        header.name: tensor.contiguous()
        for unit in save_plan.units
        for header, tensor in zip(unit.headers(), unit.views(head.get_parameter(unit.name).detach()), strict=True)
    }
    save_file({name: t.bfloat16() for name, t in stored.items()}, source / "draft" / "model.safetensors")
    save_plan.write_metadata(source / "draft")
    for name in ("trainer.json", "optimizer.safetensors"):  # of the run
        (source / "draft" / name).write_text("{}")
    assert run(source, tmp_path / "dist", "--format", "torch_dist") == 0
    assert "a draft head" in capsys.readouterr().out
    assert run(tmp_path / "dist", tmp_path / "out", "--format", "bfloat16") == 0
    assert run(source, tmp_path / "fp8", "--format", "fp8") == 0
    wanted = {name: (source / "draft" / name).read_bytes() for name in ("config.json", "model.safetensors")}
    for folder in (tmp_path / "dist" / "release", tmp_path / "out", tmp_path / "fp8"):
        assert {file.name: file.read_bytes() for file in (folder / "draft").iterdir()} == wanted
    again = load_eagle(tmp_path / "out" / "draft", policy, device="cpu", dtype=torch.float32)
    for name, parameter in head.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter.bfloat16().float()), name


def test_a_draft_head_that_cannot_be_copied_leaves_nothing(source: Path, tmp_path: Path, monkeypatch):
    (source / "draft").mkdir()
    (source / "draft" / "config.json").write_text("{}")
    monkeypatch.setattr(shutil, "copyfile", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert run(source, tmp_path / "out", "--format", "float32") != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_padded_rows_of_the_vocabulary_and_the_optimizer_are_left_out(source: Path, tmp_path: Path, capsys):
    # As torch writes it from a sharded program: another chunking, padding, and more than weights.
    assert run(source, tmp_path / "dist", "--format", "torch_dist") == 0
    release = tmp_path / "dist" / "release"
    with (release / ".metadata").open("rb") as file:
        entries = pickle.load(file).state_dict_metadata
    state = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in entries.items() if hasattr(v, "size")}
    dcp.load(state, storage_reader=dcp.FileSystemReader(release), no_dist=True)
    key = "embedding.word_embeddings.weight"
    state[key] = torch.cat((state[key], torch.ones(7, 64, dtype=torch.bfloat16)))
    state["optimizer.state.exp_avg." + key] = torch.zeros(3)
    again = tmp_path / "again" / "iter_0000012"
    dcp.save(
        state, storage_writer=dcp.FileSystemWriter(again, thread_count=2, single_file_per_rank=False), no_dist=True
    )
    for name in ("metadata.json", "common.pt"):
        (again / name).write_bytes((release / name).read_bytes())
    (tmp_path / "again" / "latest_checkpointed_iteration.txt").write_text("12\n")
    said = complaint(capsys, tmp_path / "again", tmp_path / "out", "--format", "bfloat16")
    assert "does not say which model it is" in said and "--origin-hf-dir" in said
    assert run(tmp_path / "again", tmp_path / "out", "--format", "bfloat16", "--origin-hf-dir", source) == 0
    assert "the state of the optimizer, 1 tensors" in capsys.readouterr().out
    wanted, found = tensors(source), tensors(tmp_path / "out")
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[n], found[n]) for n in wanted)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_a_wrong_model_is_named_by_the_tensor_that_differs(saved: Path, tmp_path: Path, capsys):
    for kind, sizes, words in (
        ("llama", SIZES, "has decoder.layers.self_attention.k_layernorm.weight, which a llama model"),
        ("qwen3", SIZES | {"num_hidden_layers": 3}, "not (3, "),
        (
            "qwen3 moe",
            SIZES,
            "has no decoder.layers.mlp.experts.experts.linear_fc1.weight, which a qwen3_moe model needs",
        ),
    ):
        other = tmp_path / f"{kind}{len(words)}"
        hf_model(kind, **sizes).save_pretrained(other)
        capsys.readouterr()
        said = complaint(capsys, saved, tmp_path / "out", "--format", "bfloat16", "--origin-hf-dir", other)
        assert words in said and "--origin-hf-dir" in said, said
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_not_complete_is_refused(saved: Path, tmp_path: Path, capsys):
    release, out = saved / "release", tmp_path / "out"
    data = (release / "__0_0.distcp").read_bytes()
    (release / "__0_0.distcp").write_bytes(data[:-1])
    assert "__0_0.distcp is incomplete" in complaint(capsys, saved, out, "--format", "bfloat16")
    broken = data[:400] + bytes(400) + data[800:]
    (release / "__0_0.distcp").write_bytes(broken)
    assert "is damaged at" in complaint(capsys, saved, out, "--format", "bfloat16")
    (release / "__0_0.distcp").write_bytes(data)
    metadata = (release / ".metadata").read_bytes()
    (release / ".metadata").write_bytes(metadata[: len(metadata) // 2])
    assert ".metadata cannot be read" in complaint(capsys, saved, out, "--format", "bfloat16")
    (release / ".metadata").unlink()
    assert ".metadata is missing, which is written at the end" in complaint(capsys, saved, out, "--format", "bfloat16")
    (saved / "latest_checkpointed_iteration.txt").write_text("40")
    assert "names iter_0000040, which is missing" in complaint(capsys, saved, out, "--format", "bfloat16")
    (saved / "latest_checkpointed_iteration.txt").write_text("newest")
    assert "not an iteration or release" in complaint(capsys, saved, out, "--format", "bfloat16")
    assert not out.exists() and not list(tmp_path.glob(".out*"))


class _Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_metadata_that_names_other_code_is_not_run(saved: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    pickle.dump(_Harmful(), buffer)
    (saved / "release" / ".metadata").write_bytes(buffer.getvalue())
    assert "which no metadata needs" in complaint(capsys, saved, tmp_path / "out", "--format", "bfloat16")
    assert not (tmp_path / "harmed").exists()


def test_what_torch_dist_cannot_be_is_refused(source: Path, saved: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"
    assert "can be written as" in complaint(capsys, saved, out, "--format", "fp8")
    assert "can be written as" in complaint(capsys, saved, out, "--format", "torch_dist")
    assert "--keep does not work with torch_dist" in complaint(
        capsys, source, out, "--format", "torch_dist", "--keep", "o_proj"
    )
    assert "--origin-hf-dir is for a torch_dist checkpoint" in complaint(
        capsys, source, out, "--format", "torch_dist", "--origin-hf-dir", source
    )
    assert "exists already" in complaint(capsys, source, saved, "--format", "torch_dist")
    config = json.loads((source / "config.json").read_text())
    (source / "model.safetensors").unlink()
    assert "model.safetensors" in complaint(capsys, source, out, "--format", "torch_dist")
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def test_a_run_does_not_resume_from_what_no_run_wrote(saved: Path):
    for folder in (saved, saved / "release"):
        with pytest.raises(ResumeError, match=r"no state of a run; start from its weights: miles convert"):
            resolve_load(folder, 3)
