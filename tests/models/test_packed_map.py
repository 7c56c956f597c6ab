"""Packed weights on the wire: every byte of the packed decoder once, and back again."""

from dataclasses import replace

import pytest
import torch
from tests.parity.planes import decoder_of, spec_of_kind

from miles.backends.native.server.weights.update import build_spec_index, merge_tensors
from miles.backends.remote.transports.buckets import iter_hf_named
from miles.core.errors import SyncError
from miles.models.decoder import Decoder
from miles.models.packing import pack_params
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.sync.manifest import compute_digests

KINDS = ("qwen3", "qwen3 moe", "gpt-oss", "step 3.7", "phi3")
MOE_SIZES = {
    "qwen3 moe": {"moe_intermediate_size": 32},
    "step 3.7": {"moe_intermediate_size": 32, "share_expert_dim": 32, "head_dim": 16},
}
NAMES = ("fp8", "fp8_channel", "fp8_tensor", "mxfp8", "nvfp4", "int8", "int4_g32_asym")


def packed_model(kind, name, ranks=1):
    wide = spec_of_kind(kind, hidden_size=32, intermediate_size=64, **MOE_SIZES.get(kind, {}))
    spec = replace(wide, quantization=QuantizationSpec(format=FORMATS[name], packed=True, tensor_parallel_size=ranks))
    params = {n: p.detach() for n, p in decoder_of(wide, torch.bfloat16).named_parameters()}
    return spec, pack_params(spec, params, torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_packed_tensors_travel_under_checkpoint_names_and_come_back_to_the_bit(kind, name):
    spec, packed = packed_model(kind, name)
    expected = dict(Decoder(spec, device="meta", dtype=torch.bfloat16).named_parameters())
    assert {n: (t.shape, t.dtype) for n, t in packed.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
    wire = dict(iter_hf_named(spec, packed))
    assert sum(t.nbytes for t in wire.values()) == sum(t.nbytes for t in packed.values())
    assert {n: tuple(t.shape) for n, t in wire.items()}.items() <= {
        n: piece.shape for n, (_, piece) in build_spec_index(spec).items()
    }.items()
    blank = {n: torch.zeros_like(t) for n, t in packed.items()}
    back = merge_tensors(spec, blank, {n: t.contiguous() for n, t in wire.items()})
    assert compute_digests(back) == compute_digests(packed)


def test_a_quarter_of_the_bytes_travels_in_int4():
    spec, packed = packed_model("qwen3", "int4_g32")
    quantized = [n for n in packed if n.endswith("_scale")]
    values = sum(packed[n.removesuffix("_scale")].nbytes for n in quantized)
    wide = dict(Decoder(replace(spec, quantization=None), device="meta", dtype=torch.bfloat16).named_parameters())
    assert 4 * values == sum(wide[n.removesuffix("_scale")].nbytes for n in quantized)


def test_wide_tensors_are_not_written_into_packed_ones():
    spec, packed = packed_model("qwen3", "fp8")
    name, tensor = next((n, t) for n, t in iter_hf_named(spec, packed) if t.dtype == torch.float8_e4m3fn)
    with pytest.raises(SyncError, match=r"this model's is quantized \(torch.float8_e4m3fn\); send packed tensors"):
        merge_tensors(spec, packed, {name: tensor.to(torch.bfloat16)})
