"""Packed weights are read and written in place: the bytes of a checkpoint are those that are multiplied with."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tests.models.checkpoint.quantized_checkpoints import pack_awq, pack_gptq, write_compressed, write_packed
from tests.models.oracle import hf_logits, hf_model, our_logits, relative, tokens_of, twin
from tests.models.small_families.small import SMALL
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from miles.core.errors import CheckpointError
from miles.models.checkpoint import hf
from miles.models.checkpoint.packed import load_packed
from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.param_slices import weight_segments
from miles.models.checkpoint.safetensors_io import stored_tensors
from miles.models.checkpoint.save_plan import plan_decoder_save
from miles.models.decoder import Decoder
from miles.models.packing import pack_params
from miles.models.quantization import plan_quantization
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.precision.quantize import dequantize, quantize

# Of the tests' schemes, those that are one of our formats: their groups are ours in the small models below.
SAME = {
    "fp8 per tensor": "fp8_tensor",
    "fp8 per channel": "fp8_channel",
    "int8 per channel": "int8",
    "int8 in groups": "int8_g32",
    "int4 in groups": "int4_g32",
    "int4 asymmetric in groups": "int4_g32_asym",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
}


def small(kind="llama", **changes):
    return hf_model(kind, **({"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1} | changes))


def wide(kind="llama"):
    """A model whose rows hold groups of 128."""
    return small(kind, hidden_size=128, intermediate_size=256)


def plan(spec, name):
    parts = ("attention.qkv", "attention.output", "mlp.", "moe.gate_up", "moe.down")
    return {param: FORMATS[name] for param in build_param_map(spec) if any(part in param for part in parts)}


def quantized(decoder, formats):
    pieces = build_param_map(decoder.spec)
    live = dict(decoder.named_parameters())
    return {name: quantize(live[name].detach(), f, weight_segments(pieces[name])) for name, f in formats.items()}


def equal(ours, theirs, name):
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
    if name.endswith("_global_scale"):  # stored as a reciprocal, which not every float32 number has
        assert torch.allclose(ours, theirs, rtol=2e-7, atol=0), name
    else:
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name


# -- reading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAME)
def test_the_bytes_of_compressed_tensors_are_read_as_they_are(kind, tmp_path):
    model = small()
    write_compressed(model, tmp_path, kind, dtype=torch.bfloat16 if kind.startswith("int") else torch.float32)
    spec, stored = twin(model).spec, load_file(tmp_path / "model.safetensors")
    formats = plan(spec, SAME[kind])
    read = dict(load_packed(tmp_path, spec, formats))
    for name in formats:
        pieces = [piece.hf_name for piece in build_param_map(spec)[name]]
        whole = [stored[piece] if piece in stored else stored[f"{piece}_packed"] for piece in pieces]
        data = torch.cat([tensor.view(torch.uint8) for tensor in whole])
        if kind == "int8 in groups":
            data = data ^ 0x80
        assert torch.equal(read[name].view(torch.uint8), data), name
        scales = [stored[f"{piece}_scale"] for piece in pieces]
        rows = [len(tensor) for tensor in whole] if kind == "fp8 per tensor" and len(pieces) > 1 else [1] * len(pieces)
        scales = [scale.reshape(len(scale), -1).repeat(n, 1) for scale, n in zip(scales, rows, strict=True)]
        assert torch.equal(read[f"{name}_scale"].float(), torch.cat(scales).float()), name


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "int4_g32_asym", "mxfp8"])
def test_another_format_is_dequantized_and_quantized_again(name, tmp_path):
    model = small()
    wanted = write_compressed(model, tmp_path, "fp8 per channel")
    decoder = hf.load(wanted, device="cpu", dtype=torch.float32)
    formats = plan(decoder.spec, name)
    read = dict(load_packed(tmp_path, decoder.spec, formats))
    for param, packed in quantized(decoder, formats).items():
        for part, tensor in packed.tensors(param).items():
            equal(read[part], tensor, part)


def test_awq_and_gptq_keep_their_integers(tmp_path):
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    model = small()
    spec = twin(model).spec
    for pack, config, name in (
        (lambda w, g: pack_awq(w, 32, g), awq, "int4_g32_asym"),
        (lambda w, g: pack_gptq(w, 32, 4, g, symmetric=True), gptq, "int4_g32"),
    ):
        folder = tmp_path / name
        values = hf.load(write_packed(model, folder, pack, config), device="cpu", dtype=torch.float32)
        formats = plan(spec, name)
        read = dict(load_packed(folder, spec, formats))
        for param, format in formats.items():
            packed = type(quantized(values, {param: format})[param]).from_tensors(format, param, read, 1)
            exact = values.get_parameter(param)
            assert relative(dequantize(packed, torch.float32), exact) < 2**-8, param  # scales are rounded to bfloat16


def test_scales_can_be_sharded_over_ranks(tmp_path):
    decoder = twin(wide())
    formats, pieces = plan(decoder.spec, "fp8"), build_param_map(decoder.spec)
    hf.export(decoder, tmp_path, formats=formats)
    read = dict(load_packed(tmp_path, decoder.spec, formats, tensor_parallel_size=2))
    for name, format in formats.items():
        weight = quantize(decoder.get_parameter(name).detach(), format, weight_segments(pieces[name]), 2)
        for part, tensor in weight.tensors(name).items():
            equal(read[part], tensor, part)


# -- writing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read_as_the_same_bytes(name, tmp_path):
    decoder = twin(wide())
    formats = plan(decoder.spec, name)
    hf.export(decoder, tmp_path, formats=formats)
    packed, read = quantized(decoder, formats), dict(load_packed(tmp_path, decoder.spec, formats))
    loaded = hf.load(tmp_path, device="cpu", dtype=torch.float32)
    for param, weight in packed.items():
        for part, tensor in weight.tensors(param).items():
            equal(read[part], tensor, part)
        exact = dequantize(weight, torch.float32)
        assert torch.allclose(loaded.get_parameter(param), exact, rtol=3e-7 if name == "nvfp4" else 0, atol=0), param
    described = {
        h.name: (h.dtype, h.shape) for u in plan_decoder_save(decoder, formats=formats).units for h in u.headers()
    }
    found = {name: (t.dtype, t.shape) for name, t in stored_tensors(tmp_path).items()}
    assert described == found


@pytest.mark.parametrize("name", ["fp8", "fp8_tensor", "nvfp4", "int4_g32", "int4_g32_asym"])
def test_experts_are_written_one_by_one(name, tmp_path):
    decoder = twin(small("qwen3 moe", moe_intermediate_size=32))
    formats = plan(decoder.spec, name)
    hf.export(decoder, tmp_path, formats=formats)
    read = dict(load_packed(tmp_path, decoder.spec, formats))
    for param, weight in quantized(decoder, formats).items():
        for part, tensor in weight.tensors(param).items():
            equal(read[part], tensor, part)


# transformers needs accelerate for fine-grained FP8 (see the test of its tensors), and merges experts of few formats.
READABLE = [("llama", name) for name in FORMATS if name not in ("fp8", "fp8_pow2")]


@pytest.mark.parametrize(("kind", "name"), [*READABLE, ("qwen3 moe", "fp8_channel"), ("qwen3 moe", "int4_g32")])
def test_transformers_reads_what_is_written(kind, name, tmp_path):
    model = wide(kind) if kind == "llama" else small(kind, moe_intermediate_size=32)
    decoder = twin(model)
    hf.export(decoder, tmp_path, formats=plan(decoder.spec, name))
    config = json.loads((tmp_path / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None  # it would quantize them too
    (tmp_path / "config.json").write_text(json.dumps(config))
    # compressed-tensors computes values of few bits in bfloat16, and transformers those of experts.
    narrow = FORMATS[name].scale in ("e8m0", "e4m3")
    dtype = torch.bfloat16 if narrow else torch.float32
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").eval()
    ours, tokens = hf.load(tmp_path, device="cpu", dtype=torch.float32), tokens_of([7, 5])
    with torch.no_grad():
        hf_logits(theirs, tokens)  # it dequantizes in its first forward
        difference = relative(our_logits(ours, tokens), hf_logits(nn.Module.float(theirs), tokens))
    assert difference < (3e-2 if narrow or kind == "qwen3 moe" else 1e-5)


@pytest.mark.parametrize("name", ["fp8", "fp8_pow2"])
def test_fine_grained_fp8_is_what_transformers_dequantizes(name, tmp_path):
    decoder = twin(wide())
    hf.export(decoder, tmp_path, formats=plan(decoder.spec, name))
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    assert config["modules_to_not_convert"] == ["lm_head"]
    stored = load_file(tmp_path / "model.safetensors")
    ours = dict(hf.iter_hf_tensors(hf.load(tmp_path, device="cpu", dtype=torch.float32)))
    scaled = [name for name in stored if f"{name}_scale_inv" in stored]
    assert len(scaled) == 7
    for weight in scaled:
        assert stored[weight].dtype == torch.float8_e4m3fn and stored[f"{weight}_scale_inv"].dtype == torch.float32
        if min(stored[weight].shape) >= 128:
            theirs = Fp8Dequantize(None)._dequantize_one(
                stored[weight], stored[f"{weight}_scale_inv"], output_dtype=torch.float32
            )
            assert torch.equal(theirs, ours[weight])


def gpt_oss():
    torch.manual_seed(0)
    sizes = SMALL | {"hidden_size": 64, "intermediate_size": 32, "head_dim": 8, "num_local_experts": 3}
    return GptOssForCausalLM(GptOssConfig(**sizes, num_experts_per_tok=2))


def test_gpt_oss_experts_are_written_as_published(tmp_path):
    model = gpt_oss()
    model.save_pretrained(tmp_path / "like")
    decoder = twin(model)
    experts = [name for name in build_param_map(decoder.spec) if name.endswith((".moe.gate_up", ".moe.down"))]
    formats = dict.fromkeys(experts, FORMATS["mxfp4"])
    hf.export(decoder, tmp_path, formats=formats, like=tmp_path / "like")
    stored, read = load_file(tmp_path / "model.safetensors"), dict(load_packed(tmp_path, decoder.spec, formats))
    for param, weight in quantized(decoder, formats).items():
        for part, tensor in weight.tensors(param).items():
            equal(read[part], tensor, part)
        (piece,) = build_param_map(decoder.spec)[param]
        theirs = convert_moe_packed_tensors(
            stored[f"{piece.hf_name}_blocks"], stored[f"{piece.hf_name}_scales"], dtype=torch.float32
        )
        assert torch.equal(theirs.transpose(-1, -2), dequantize(weight, torch.float32))
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"


@pytest.mark.parametrize("kind", ["llama", "qwen3 moe"])
def test_a_packed_decoder_is_written_as_a_wide_one_is(kind, tmp_path):
    model = wide() if kind == "llama" else small(kind, moe_intermediate_size=32)
    decoder = twin(model)
    spec = replace(decoder.spec, quantization=QuantizationSpec(format=FORMATS["fp8"], packed=True))
    packed = Decoder(spec, device="cpu", dtype=torch.float32)
    packed.load_state_dict(pack_params(spec, decoder.state_dict(), torch.float32))
    formats = {name: quantized.format for name, quantized in plan_quantization(spec).items()}
    for name, each in (("packed", packed), ("wide", decoder)):
        hf.export(each, tmp_path / name, formats=formats)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("packed", "wide"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n].view(torch.uint8), theirs[n].view(torch.uint8)) for n in theirs)


def test_formats_may_differ_between_layers(tmp_path):
    decoder = twin(wide())
    formats = plan(decoder.spec, "fp8")
    formats |= {name: FORMATS["int4"] for name in formats if ".mlp." in name}
    hf.export(decoder, tmp_path, formats=formats)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision" and config["ignore"] == ["lm_head"]
    read = dict(load_packed(tmp_path, decoder.spec, formats))
    for param, weight in quantized(decoder, formats).items():
        for part, tensor in weight.tensors(param).items():
            equal(read[part], tensor, part)


def test_a_shape_that_does_not_allow_a_format_is_refused_by_name(tmp_path):
    decoder = twin(small())
    with pytest.raises(
        CheckpointError, match=r"q_proj\.weight has 64 columns, which is not a multiple of the 128 that int4"
    ):
        plan_decoder_save(decoder, formats=plan(decoder.spec, "int4"))
    gpt_oss().save_pretrained(tmp_path)
    decoder = twin(gpt_oss())
    with pytest.raises(CheckpointError, match=r"q_proj\.weight cannot be written in mxfp4: .* only the experts"):
        plan_decoder_save(decoder, like=tmp_path, formats=plan(decoder.spec, "mxfp4"))


def test_a_stored_scale_that_is_no_power_of_two_is_quantized_again(tmp_path):
    decoder = twin(wide())
    hf.export(decoder, tmp_path, formats=plan(decoder.spec, "fp8"))
    formats = plan(decoder.spec, "fp8_pow2")
    read = dict(load_packed(tmp_path, decoder.spec, formats))
    assert all((torch.frexp(read[f"{name}_scale"]).mantissa == 0.5).all() for name in formats)
