"""Checkpoints in FP8 blocks and MXFP4: dequantized when loaded, saved unquantized."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.oracle import hf_model
from tests.models.small_families.small import SMALL
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from miles.core.errors import CheckpointError, UsageError
from miles.models.checkpoint import hf, load, safetensors_io
from miles.models.checkpoint.reader import FileReader

# MXFP4 comes by 32, which is more than the small models have.
GPT_OSS = SMALL | {"hidden_size": 64, "intermediate_size": 32, "head_dim": 8, "num_local_experts": 5}


def gpt_oss():
    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(**GPT_OSS, num_experts_per_tok=2))


def edit(folder, change=lambda tensors: None, **config):
    """Rewrite the weights and the config of a one-file checkpoint."""
    tensors = load_file(folder / safetensors_io.WEIGHTS)
    change(tensors)
    save_file(tensors, folder / safetensors_io.WEIGHTS)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def plain(model, folder, change):
    """A checkpoint of ``model`` with other values, nothing quantised."""
    model.save_pretrained(folder)
    edit(folder, change)
    return folder


def spread(scale, shape, block):
    """Each block's scale on each of its values."""
    rows = scale.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]


def in_fp8(name, tensor):
    """What the published models keep in FP8: matrices, but for the embedding, the head and the router."""
    return tensor.dim() == 2 and "_proj." in name


def write_fp8(model, folder, block, scales=torch.float32):
    """The model as an FP8 checkpoint, and beside it one with the very values that stands for; the latter's folder."""
    generator = torch.Generator().manual_seed(0)
    values = {}

    def quantise(tensors):
        for name in [name for name, tensor in tensors.items() if in_fp8(name, tensor)]:
            rows, columns = tensors[name].shape
            grid = (-(-rows // block[0]), -(-columns // block[1])) if block else ()
            scale = (torch.rand(grid, generator=generator) + 0.5).to(scales)
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            values[name] = tensors[name].float() * (spread(scale.float(), (rows, columns), block) if block else scale)
            if block and rows % block[0] == 0 and columns % block[1] == 0:
                theirs = Fp8Dequantize(None)._dequantize_one(tensors[name], scale, output_dtype=torch.float32)
                assert torch.equal(values[name], theirs)

    model.save_pretrained(folder)
    reported = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    edit(folder, quantise, quantization_config=reported)
    return plain(model, folder / "plain", lambda tensors: tensors.update(values))


def write_mxfp4(model, folder):
    """As ``write_fp8``, for experts in MXFP4."""
    generator = torch.Generator().manual_seed(0)
    values = {}

    def quantise(tensors):
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, columns, rows = tensors.pop(name).shape
            shape = (experts, rows, columns // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            exponents = torch.randint(118, 126, shape, dtype=torch.uint8, generator=generator)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
            values[name] = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)

    model.save_pretrained(folder)
    edit(folder, quantise, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain(model, folder / "plain", lambda tensors: tensors.update(values))


def same(folder, wanted, dtype=torch.float32):
    ours, theirs = (hf.load(f, device="cpu", dtype=dtype).state_dict() for f in (folder, wanted))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours)


# -- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe", "deepseek v3"])
@pytest.mark.parametrize("block", [[8, 16], [5, 7], [128, 128]])
def test_fp8_blocks_are_loaded_as_the_values_they_stand_for(kind, block, tmp_path):
    same(tmp_path, write_fp8(hf_model(kind), tmp_path, block))


def test_blocks_of_the_published_size_are_cut_short_at_the_edges(tmp_path):
    sizes = {"hidden_size": 160, "intermediate_size": 300, "num_hidden_layers": 1, "vocab_size": 20}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    wanted = write_fp8(model, tmp_path, [128, 128])
    for dtype in (torch.float32, torch.bfloat16):
        same(tmp_path, wanted, dtype)


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_may_be_of_fewer_bits(scales, tmp_path):
    same(tmp_path, write_fp8(hf_model("qwen3"), tmp_path, [16, 16], scales))


def test_one_scale_a_tensor_is_read_too_and_scales_of_inputs_are_not(tmp_path):
    wanted = write_fp8(hf_model("qwen3"), tmp_path, None)
    spare = {"model.layers.0.mlp.up_proj.activation_scale": torch.ones(())}
    edit(tmp_path, lambda tensors: tensors.update(spare))
    same(tmp_path, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_experts_are_loaded_as_the_values_they_stand_for(dtype, tmp_path):
    same(tmp_path, write_mxfp4(gpt_oss(), tmp_path), dtype)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_rank_reads_only_its_share_of_what_is_quantised(world, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "_TILE", 300)
    write_fp8(hf_model("deepseek v3"), tmp_path / "fp8", [8, 16])
    write_mxfp4(gpt_oss(), tmp_path / "mxfp4")
    for folder, often in ((tmp_path / "fp8", 1.2), (tmp_path / "mxfp4", 1.0)):
        whole = hf.load(folder, device="cpu", dtype=torch.float32).state_dict()
        readers = [FileReader() for _ in range(world)]
        ranks = [
            dict(hf.load_slices(folder, rank=rank, world=world, device="cpu", dtype=torch.float32, reader=reader))
            for rank, reader in enumerate(readers)
        ]
        assert all(torch.equal(torch.cat([slices[name] for slices in ranks]), whole[name]) for name in whole)
        stored = sum(tensor.stop - tensor.start for tensor in safetensors_io.stored_tensors(folder).values())
        # Ranks that meet inside a block both need its scale.
        assert stored <= sum(reader.bytes_read for reader in readers) <= often * stored
        assert max(reader.bytes_read for reader in readers) < 1.5 * often * stored / world


def test_what_was_quantised_is_saved_without_saying_so(tmp_path):
    model = hf_model("qwen3")
    wanted = write_fp8(model, tmp_path, [16, 16])
    decoder = hf.load(tmp_path, device="cpu", dtype=torch.float32)
    hf.export(decoder, tmp_path / "out", like=tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    theirs = type(model).from_pretrained(tmp_path / "out").state_dict()
    values = type(model).from_pretrained(wanted).state_dict()
    assert all(torch.equal(theirs[name], values[name]) for name in values)
    same(tmp_path / "out", wanted)


# -- refusals ---------------------------------------------------------------------------------

UP = "model.layers.0.mlp.up_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture
def fp8_folder(tmp_path):
    write_fp8(hf_model("qwen3"), tmp_path, [16, 16])
    return tmp_path


@pytest.fixture
def mxfp4_folder(tmp_path):
    write_mxfp4(gpt_oss(), tmp_path)
    return tmp_path


def refused(folder, match, change=lambda tensors: None, **config):
    edit(folder, change, **config)
    with pytest.raises(CheckpointError, match=match) as raised:
        hf.load(folder, device="cpu")
    assert str(raised.value).count("\n") == 0


def test_a_missing_scale_is_named_with_the_weight_that_needs_it(fp8_folder):
    match = rf"{UP}_scale_inv is missing from .*: {UP} in .*safetensors is stored as F8_E4M3 .* shape \(3, 2\)"
    refused(fp8_folder, match, lambda tensors: tensors.pop(f"{UP}_scale_inv"))


def test_a_scale_of_another_shape_is_named_with_both(fp8_folder):
    match = rf"{UP}_scale_inv in .*safetensors has shape \(2, 3\), but .* \(3, 2\)"
    refused(fp8_folder, match, lambda tensors: tensors.update({f"{UP}_scale_inv": torch.ones(2, 3)}))


def test_a_scale_of_another_format_is_named(fp8_folder):
    wrong = {f"{UP}_scale_inv": torch.ones(3, 2, dtype=torch.int32)}
    refused(fp8_folder, rf"{UP}_scale_inv in .* is stored as I32", lambda tensors: tensors.update(wrong))


def test_a_scale_without_a_weight_in_fp8_is_named(fp8_folder):
    match = rf"{UP}_scale_inv in .* belongs to no part"
    refused(fp8_folder, match, lambda tensors: tensors.update({UP: torch.ones(40, 32)}))


def test_fp8_that_the_config_does_not_announce_is_refused(fp8_folder):
    match = r"is stored as F8_E4M3, but config\.json has no such quantization_config"
    refused(fp8_folder, match, quantization_config=None)


def test_a_scale_a_tensor_that_is_several_is_refused(fp8_folder):
    reported = {"quant_method": "fp8", "weight_block_size": None}
    refused(fp8_folder, "one scale a matrix", quantization_config=reported)


def test_missing_misshapen_or_wrongly_stored_parts_of_mxfp4_are_named(mxfp4_folder):
    kept = load_file(mxfp4_folder / safetensors_io.WEIGHTS)
    scales, blocks = kept[f"{EXPERTS}_scales"], kept[f"{EXPERTS}_blocks"]
    wrong = {
        rf"{EXPERTS}_scales is missing": lambda tensors: tensors.pop(f"{EXPERTS}_scales"),
        rf"{EXPERTS} is missing": lambda tensors: tensors.pop(f"{EXPERTS}_blocks"),
        rf"{EXPERTS}_scales in .* has shape \(4, 64, 1\), but .* \(5, 64, 1\)": lambda tensors: tensors.update(
            {f"{EXPERTS}_scales": scales[:4]}
        ),
        rf"{EXPERTS}_blocks in .* is stored as I8": lambda tensors: tensors.update(
            {f"{EXPERTS}_blocks": blocks.view(torch.int8)}
        ),
    }
    for match, change in wrong.items():
        refused(mxfp4_folder, match, change)
        save_file(kept, mxfp4_folder / safetensors_io.WEIGHTS)


@pytest.mark.parametrize("method", ["bitsandbytes", "quark", None])
def test_other_methods_are_refused_by_name(method, fp8_folder):
    edit(fp8_folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UsageError, match=rf"quantization_config\.quant_method of config\.json is {method!r}") as raised:
        hf.load(fp8_folder, device="cpu")
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize("block", [[128], "128", [0, 128], [128, 1.5]])
def test_a_block_size_that_is_none_is_refused(block, fp8_folder):
    edit(fp8_folder, quantization_config={"quant_method": "fp8", "weight_block_size": block})
    with pytest.raises(UsageError, match=r"quantization_config\.weight_block_size .* two positive integers"):
        hf.load(fp8_folder, device="cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_holds_the_values_the_cpu_does(tmp_path):
    write_fp8(hf_model("deepseek v3"), tmp_path / "fp8", [8, 16])
    write_mxfp4(gpt_oss(), tmp_path / "mxfp4")
    for folder in (tmp_path / "fp8", tmp_path / "mxfp4", tmp_path / "fp8" / "plain"):
        for dtype in (torch.float32, torch.bfloat16):
            here, there = (hf.load(folder, device=device, dtype=dtype).state_dict() for device in ("cpu", "cuda"))
            assert all(there[name].is_cuda and torch.equal(here[name], there[name].cpu()) for name in here)
