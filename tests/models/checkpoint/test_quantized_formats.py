"""Published quantized layouts are read as the values they stand for."""

import json

import pytest
import torch
from tests.models.checkpoint.quantized_checkpoints import (
    SCHEMES,
    edit,
    pack_awq,
    pack_gptq,
    write_compressed,
    write_packed,
)
from tests.models.oracle import hf_model

from miles.core.errors import CheckpointError, UsageError
from miles.models.checkpoint import hf, load

UP = "model.layers.0.mlp.up_proj."
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False, "desc_act": False}


def small(kind="qwen3"):
    return hf_model(kind, intermediate_size=64)


def read(folder, dtype=torch.float32):
    return hf.load(folder, device="cpu", dtype=dtype).state_dict()


def check_same(folder, wanted, tolerance=0.0):
    ours, theirs = read(folder), read(wanted)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=tolerance, atol=0), name


@pytest.mark.parametrize("kind", SCHEMES)
def test_compressed_tensors_are_read_as_the_values_they_stand_for(kind, tmp_path, monkeypatch):
    wanted = write_compressed(small(), tmp_path, kind)
    # A divisor is not exactly the factor that we multiply with.
    check_same(tmp_path, wanted, 2e-7 if kind == "nvfp4" else 0.0)
    whole = read(tmp_path)
    monkeypatch.setattr(load, "_TILE", 300)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in read(tmp_path).items())


def test_modules_in_the_ignore_list_are_read_plain(tmp_path):
    check_same(
        tmp_path, write_compressed(small("qwen3 moe"), tmp_path, "fp8 per channel", keep=("q_proj", "down_proj"))
    )


def test_experts_are_read_one_by_one(tmp_path):
    model = hf_model("qwen3 moe", moe_intermediate_size=32)
    check_same(tmp_path, write_compressed(model, tmp_path, "int4 asymmetric"))


def test_groups_of_a_config_are_told_apart_by_their_targets(tmp_path):
    write_compressed(small(), tmp_path, "fp8 per tensor")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    other = {**group, "targets": ["re:.*self_attn.*"], "weights": {**group["weights"], "strategy": "channel"}}
    config["config_groups"] = {"group_0": group, "group_1": other}
    edit(tmp_path, lambda tensors: None, quantization_config=config)
    with pytest.raises(CheckpointError, match=r"self_attn.q_proj.weight_scale in .* needs one scale a row"):
        read(tmp_path)


def test_modelopt_multiplies_with_its_second_scale_and_its_cache_scales_are_not_used(tmp_path):
    wanted = write_compressed(small(), tmp_path, "nvfp4")

    def rename(tensors):
        for name in [name for name in tensors if name.endswith("weight_packed")]:
            base = name.removesuffix("_packed")
            tensors[base] = tensors.pop(name)
            tensors[f"{base}_scale_2"] = 1 / tensors.pop(f"{base}_global_scale")[0]
            tensors[f"{base.removesuffix('weight')}input_scale"] = torch.ones(())
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())

    edit(tmp_path, rename)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    reported = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(reported))
    check_same(tmp_path, wanted, 2e-7)


def test_modelopt_fp8_has_one_scale_a_tensor(tmp_path):
    wanted = write_compressed(small(), tmp_path, "fp8 per tensor")
    shrink = {"quant_method": "modelopt", "quant_algo": "FP8"}

    def flatten(tensors):
        tensors.update({name: t.reshape(()) for name, t in tensors.items() if name.endswith("_scale")})

    edit(tmp_path, flatten, quantization_config=shrink)
    check_same(tmp_path, wanted)


@pytest.mark.parametrize("tile", [300, 1 << 22])
def test_awq_is_unpacked_in_its_order(tile, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "_TILE", tile)
    check_same(tmp_path, write_packed(small(), tmp_path, lambda w, g: pack_awq(w, 8, g), AWQ))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_gptq_is_unpacked_by_its_version_and_order(bits, act_order, layout, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "_TILE", 300)
    config = {**GPTQ, "bits": bits, "desc_act": act_order, "checkpoint_format": layout}
    offset = 1 if layout == "gptq" else 0
    wanted = write_packed(
        small(), tmp_path, lambda w, g: pack_gptq(w, 8, bits, g, act_order=act_order, offset=offset), config
    )
    check_same(tmp_path, wanted)


def test_gptq_biases_of_zeros_are_ignored_and_others_are_not(tmp_path):
    wanted = write_packed(small(), tmp_path, lambda w, g: pack_gptq(w, 8, 4, g), GPTQ)
    edit(tmp_path, lambda tensors: tensors.update({f"{UP}bias": torch.zeros(64)}))
    check_same(tmp_path, wanted)
    edit(tmp_path, lambda tensors: tensors.update({f"{UP}bias": torch.ones(64)}))
    with pytest.raises(CheckpointError, match=rf"{UP}bias in .* belongs to no part"):
        read(tmp_path)


def test_a_rank_reads_its_rows_of_every_layout(tmp_path):
    write_compressed(small(), tmp_path / "int4", "int4 asymmetric")
    write_packed(small(), tmp_path / "awq", lambda w, g: pack_awq(w, 8, g), AWQ)
    for folder in (tmp_path / "int4", tmp_path / "awq"):
        whole = read(folder)
        ranks = [dict(hf.load_slices(folder, rank=r, world=3, device="cpu", dtype=torch.float32)) for r in range(3)]
        assert all(torch.equal(torch.cat([part[name] for part in ranks]), whole[name]) for name in whole)


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**AWQ, "version": "gemv"}, "version"),
        ({**AWQ, "bits": 3}, "bits"),
        ({**AWQ, "zero_point": False}, "zero_point"),
        ({**GPTQ, "bits": 3}, "bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({**GPTQ, "dynamic": {"-:mlp": {}}}, "dynamic"),
        ({**GPTQ, "group_size": 0}, "group_size"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"quant_method": "compressed-tensors", "config_groups": {"FP8": ["Linear"]}}, "config_groups.FP8"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(config, key, tmp_path):
    small().save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: None, quantization_config=config)
    with pytest.raises(UsageError, match=rf"quantization_config\.{key} of config\.json") as raised:
        read(tmp_path)
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_bits": 6}, "num_bits"),
        ({"actorder": "group"}, "actorder"),
        ({"type": "float", "num_bits": 8, "symmetric": False}, "symmetric"),
        ({"strategy": "attn_head"}, "strategy"),
        ({"group_size": None}, "group_size"),
        ({"strategy": "block", "block_structure": [16]}, "block_structure"),
    ],
)
def test_weight_arguments_that_are_not_supported_are_refused_by_their_key(change, key, tmp_path):
    write_compressed(small(), tmp_path, "int4")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"].update(change)
    edit(tmp_path, lambda tensors: None, quantization_config=config)
    match = rf"quantization_config\.config_groups\.group_0\.weights\.{key} of config\.json"
    with pytest.raises(UsageError, match=match):
        read(tmp_path)


def test_parts_that_are_missing_or_misshapen_are_named(tmp_path):
    write_packed(small(), tmp_path / "awq", lambda w, g: pack_awq(w, 8, g), AWQ)
    edit(tmp_path / "awq", lambda tensors: tensors.pop(f"{UP}scales"))
    with pytest.raises(CheckpointError, match=rf"{UP}scales is missing from .*: {UP}qweight needs it"):
        read(tmp_path / "awq")
    write_compressed(small(), tmp_path / "int4", "int4")
    edit(tmp_path / "int4", lambda tensors: tensors.update({f"{UP}weight_scale": torch.ones(64, 2)}))
    with pytest.raises(CheckpointError, match=rf"{UP}weight_scale in .* has shape \(64, 2\), but .* \(64, 4\)"):
        read(tmp_path / "int4")
    edit(tmp_path / "int4", lambda tensors: tensors.update({f"{UP}weight_g_idx": torch.arange(32)}))
    edit(tmp_path / "int4", lambda tensors: tensors.update({f"{UP}weight_scale": torch.ones(64, 4)}))
    with pytest.raises(CheckpointError, match=rf"{UP}weight_g_idx in .* reorders columns"):
        read(tmp_path / "int4")


def test_columns_in_another_order_than_the_config_says_are_refused(tmp_path):
    write_packed(small(), tmp_path, lambda w, g: pack_gptq(w, 8, 4, g, act_order=True), GPTQ)
    with pytest.raises(CheckpointError, match=r"g_idx in .*\.desc_act of config\.json is not true"):
        read(tmp_path)
