"""A packed decoder's weights under the names of a quantized checkpoint: the bytes that ``miles convert`` writes."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tests.parity.planes import spec_of_kind
from tests.server_api.tiny import BLOCKS, make

from miles.core.errors import CheckpointError
from miles.models.checkpoint import hf
from miles.models.checkpoint.convert import convert_checkpoint, plan_conversion
from miles.models.checkpoint.hf_packed import iter_quantized_hf
from miles.models.packing import pack_params
from miles.models.resolve import resolve_spec
from miles.precision.formats import FORMATS, QuantizationSpec


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        # Projections of 96 and 48 rows: their blocks end inside a fused parameter.
        "uneven": make(root / "uneven", 0, head_dim=24),
        "dense": make(root / "dense", 0, **BLOCKS),
        "experts": make(root / "experts", 0, experts=True, **BLOCKS, moe_intermediate_size=128),
    }


def pack(folder, **how):
    spec = replace(resolve_spec(folder, "native"), quantization=QuantizationSpec(packed=True, **how))
    params = dict(hf.load_slices(folder, rank=0, world=1, device="cpu", dtype=torch.float32))
    return spec, pack_params(spec, params, torch.float32)


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("uneven", {"format": FORMATS["fp8"]}),
        ("uneven", {"format": FORMATS["fp8"], "tensor_parallel_size": 2}),
        ("dense", {"format": FORMATS["fp8_pow2"], "layers_at_start": 1, "layers_at_end": 1}),
        ("dense", {"format": FORMATS["int4_g32"]}),
        ("experts", {"format": FORMATS["fp8"]}),
        ("experts", {"format": FORMATS["fp8_channel"], "experts_only": True}),
    ],
)
def test_the_tensors_are_those_of_the_quantized_checkpoint(folders, tmp_path, model, how):
    spec, packed = pack(folders[model], **how)
    assert spec.quantization is not None
    quantization = replace(spec.quantization, tensor_parallel_size=1)
    plan = plan_conversion(folders[model], format=None, dtype=torch.float32, quantization=quantization)
    convert_checkpoint(plan, tmp_path / "quantized")
    stored, sent = load_file(tmp_path / "quantized" / "model.safetensors"), dict(iter_quantized_hf(spec, packed))
    assert sent.keys() == stored.keys() and any("_scale" in name for name in sent)
    for name, tensor in stored.items():
        assert sent[name].dtype == tensor.dtype and sent[name].shape == tensor.shape, name
        assert torch.equal(sent[name].contiguous().view(torch.uint8), tensor.view(torch.uint8)), name


def test_fp8_tensors_are_views_of_what_the_decoder_holds(folders):
    spec, packed = pack(folders["experts"], format=FORMATS["fp8"])
    own = {tensor.untyped_storage().data_ptr() for tensor in packed.values()}
    assert all(tensor.untyped_storage().data_ptr() in own for _, tensor in iter_quantized_hf(spec, packed))


def test_some_parameters_become_their_own_tensors_only(folders):
    spec, packed = pack(folders["dense"], format=FORMATS["fp8"])
    names = ("layers.1.mlp.down.weight", "layers.1.mlp.down.weight_scale", "norm.weight")
    sent = dict(iter_quantized_hf(spec, {name: packed[name] for name in names}))
    down = "model.layers.1.mlp.down_proj.weight"
    assert sent.keys() == {"model.norm.weight", down, f"{down}_scale_inv"}


def test_experts_that_a_checkpoint_keeps_in_one_tensor_are_refused():
    spec = spec_of_kind("gpt-oss")
    spec = replace(spec, quantization=QuantizationSpec(format=FORMATS["fp8"], packed=True))
    with pytest.raises(CheckpointError, match="cannot be written in fp8"):
        list(iter_quantized_hf(spec, {}))
