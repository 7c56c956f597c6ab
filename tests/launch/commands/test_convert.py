"""Behaviour of ``miles convert``: from any readable checkpoint to any writable precision, tensor by tensor."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file
from tests.models.checkpoint.quantized_checkpoints import pack_gptq, write_compressed, write_packed
from tests.models.oracle import hf_model
from tests.models.small_families.small import SMALL
from transformers import GptOssConfig, GptOssForCausalLM

from miles.launch.main import main
from miles.models.checkpoint import convert, hf
from miles.models.checkpoint.packed import load_packed
from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.param_slices import weight_segments
from miles.models.checkpoint.safetensors_io import stored_tensors
from miles.precision.formats import FORMATS
from miles.precision.quantize import quantize


def small(kind="llama", **changes):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return hf_model(kind, **(sizes | changes)).to(torch.bfloat16)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "in"
    small().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run(*words):
    return main(["convert", *map(str, words)])


def complaint(capsys, *words):
    assert run(*words) in (1, 2), words
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def read(folder):
    return hf.load(folder, device="cpu", dtype=torch.float32).state_dict()


@pytest.mark.parametrize("name", ["fp8", "fp8_channel", "int4_g32_asym", "nvfp4", "mxfp8"])
def test_weights_are_written_as_they_would_be_served(name, source, tmp_path, capsys):
    assert run(source, tmp_path / "out", "--format", name) == 0
    assert "14 quantized weights" in capsys.readouterr().out
    decoder = hf.load(source, device="cpu", dtype=torch.float32)
    pieces = build_param_map(decoder.spec)
    formats = {n: FORMATS[name] for n in pieces if ".attention." in n or ".mlp." in n}
    packed = dict(load_packed(tmp_path / "out", decoder.spec, formats))
    for param, format in formats.items():
        weight = quantize(decoder.get_parameter(param).detach(), format, weight_segments(pieces[param]))
        for part, tensor in weight.tensors(param).items():
            if not part.endswith("_global_scale"):
                assert torch.equal(packed[part].view(torch.uint8), tensor.view(torch.uint8)), part
    others = read(tmp_path / "out")
    assert all(torch.equal(others[n], p) for n, p in decoder.state_dict().items() if n not in formats)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_a_receipt_lists_the_digests_of_what_was_read_and_written(source, tmp_path):
    assert run(source, tmp_path / "out", "--format", "int4_g32") == 0
    receipt = json.loads((tmp_path / "out" / "conversion.json").read_text())
    for part, folder in (("read", source), ("written", tmp_path / "out")):
        digests = {
            name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        assert receipt[part] == digests
    assert receipt["formats"] == ["int4_g32"]


@pytest.mark.parametrize("kind", ["fp8 per channel", "int4 asymmetric", "nvfp4", "mxfp4"])
def test_a_quantized_checkpoint_is_written_wide_again(kind, tmp_path):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 2, "num_hidden_layers": 1}
    wanted = write_compressed(hf_model("qwen3 moe", **sizes), tmp_path / "in", kind)
    assert run(tmp_path / "in", tmp_path / "out", "--format", "float32") == 0
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    ours, theirs = read(tmp_path / "out"), read(wanted)
    assert all(torch.allclose(ours[n], theirs[n], rtol=3e-7 if kind == "nvfp4" else 0, atol=0) for n in theirs)


def test_the_same_format_keeps_every_byte(tmp_path):
    write_compressed(hf_model("llama", hidden_size=64, intermediate_size=96), tmp_path / "in", "fp8 per channel")
    assert run(tmp_path / "in", tmp_path / "out", "--format", "fp8_channel") == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "in", tmp_path / "out"))
    weights = [name for name in before if f"{name}_scale" in before]
    assert weights and all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in weights)
    assert all(torch.equal(before[f"{n}_scale"], after[f"{n}_scale"]) for n in weights)


def test_a_published_gptq_checkpoint_becomes_fp8(tmp_path):
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    wanted = write_packed(
        hf_model("llama", hidden_size=64, intermediate_size=96),
        tmp_path / "in",
        lambda w, g: pack_gptq(w, 32, 4, g),
        config,
    )
    assert run(tmp_path / "in", tmp_path / "out", "--format", "fp8") == 0
    ours, theirs = read(tmp_path / "out"), read(wanted)
    assert all((ours[n] - theirs[n]).abs().max() <= theirs[n].abs().max() / 16 for n in theirs)


@pytest.mark.parametrize(
    "kind", ["qwen3 moe", "hybrid qwen3 next", "hybrid nemotron h", "deepseek v3", "llama 4", "step 3.7"]
)
def test_every_kind_of_layer_is_copied_wide(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "_CHUNK_BYTES", 1000)
    hf_model(kind).save_pretrained(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out", "--format", "float32") == 0
    ours, theirs = read(tmp_path / "out"), read(tmp_path / "in")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_experts_are_quantized_each_for_itself_and_routers_are_not(tmp_path):
    small("qwen3 moe", moe_intermediate_size=32).save_pretrained(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out", "--format", "fp8") == 0
    stored = stored_tensors(tmp_path / "out")
    assert stored["model.layers.0.mlp.experts.3.up_proj.weight"].dtype == "F8_E4M3"
    assert stored["model.layers.0.mlp.experts.3.up_proj.weight_scale_inv"].shape == (1, 1)
    assert stored["model.layers.0.mlp.gate.weight"].dtype == "BF16"
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.gate" in config["modules_to_not_convert"]


def test_gpt_oss_becomes_its_own_mxfp4_and_back(tmp_path):
    torch.manual_seed(0)
    sizes = SMALL | {"hidden_size": 64, "intermediate_size": 32, "head_dim": 8, "num_local_experts": 3}
    GptOssForCausalLM(GptOssConfig(**sizes, num_experts_per_tok=2)).save_pretrained(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "mxfp4", "--format", "mxfp4") == 0
    assert "model.layers.0.mlp.experts.down_proj_blocks" in stored_tensors(tmp_path / "mxfp4")
    assert run(tmp_path / "mxfp4", tmp_path / "wide", "--format", "float32") == 0
    ours, theirs = read(tmp_path / "wide"), read(tmp_path / "mxfp4")
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_modules_are_kept_by_name_part_or_pattern(source, tmp_path):
    assert run(source, tmp_path / "out", "--format", "fp8", "--keep", "o_proj", "model.layers.1.mlp.*") == 0
    stored = stored_tensors(tmp_path / "out")
    wide = {name for name, tensor in stored.items() if tensor.dtype == "BF16" and "_proj" in name}
    assert wide == {f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 1)} | {
        f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {name.removesuffix(".weight") for name in wide} <= set(config["modules_to_not_convert"])


def test_large_checkpoints_are_written_in_shards(source, tmp_path):
    conversion = convert.plan_conversion(source, format=FORMATS["fp8"], dtype=torch.bfloat16)
    convert.convert_checkpoint(conversion, tmp_path / "one")
    convert.convert_checkpoint(conversion, tmp_path / "many", max_shard_bytes=20000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    ours, theirs = read(tmp_path / "many"), read(tmp_path / "one")
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


# -- refusals ---------------------------------------------------------------------------------


def test_wrong_words_are_explained_in_a_sentence(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert "IN OUT --format NAME" in complaint(capsys, source, "--format", "fp8")
    assert "--format is missing" in complaint(capsys, source, out)
    assert "--format fp9 is not a precision; use one of float32" in complaint(capsys, source, out, "--format", "fp9")
    assert "exists already" in complaint(capsys, source, source, "--format", "fp8")
    assert "remove --keep" in complaint(capsys, source, out, "--format", "bfloat16", "--keep", "o_proj")
    assert "--keep mamba matches no weight" in complaint(capsys, source, out, "--format", "fp8", "--keep", "mamba")
    assert "is not a folder" in complaint(capsys, tmp_path / "none", out, "--format", "fp8")
    assert not out.exists()


def test_a_shape_that_does_not_allow_the_format_is_named(source, tmp_path, capsys):
    said = complaint(capsys, source, tmp_path / "out", "--format", "int4")
    assert "q_proj.weight has 64 columns, which is not a multiple of the 128 that int4 needs" in said
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_of_a_conversion_that_failed(source, tmp_path, monkeypatch, capsys):
    conversion = convert.plan_conversion(source, format=FORMATS["fp8"], dtype=torch.bfloat16)
    monkeypatch.setattr(convert.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        convert.convert_checkpoint(conversion, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
