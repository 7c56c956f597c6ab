"""Quantized shards of a trainer's ranks: those of the quantized weight, or refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parity.planes import decoder_of, spec_of_kind
from tests.tiers import examples

from miles.models.checkpoint.param_map import build_param_map
from miles.models.packing import pack_params
from miles.models.parallel.quantized_shards import find_divided_block
from miles.models.parallel.tp_sharding import shard_param, shard_spec
from miles.models.quantization import fused_segments, plan_quantization
from miles.precision.formats import FORMATS, QuantizationSpec, WeightFormat
from miles.precision.quantize import dequantize, quantize, row_block
from miles.precision.quantized_tensor import QuantizedTensor


def divided(spec, params, world):
    """The first weight whose shards are quantized otherwise than the weight itself."""
    rank_slices = build_param_map(shard_spec(spec, world))
    for name, quantized in plan_quantization(spec).items():
        full = dequantize(quantize(params[name], quantized.format, quantized.segments), torch.float32)
        segments = fused_segments(rank_slices[name])
        for rank in range(world):
            shard = shard_param(spec, name, params[name], rank, world)
            ours = dequantize(quantize(shard, quantized.format, segments), torch.float32)
            if not torch.equal(ours, shard_param(spec, name, full, rank, world)):
                return name
    return None


@settings(max_examples=examples(40), deadline=None)
@given(
    rows=st.sampled_from([1, 4, 8, 16, 24, None]),
    columns=st.sampled_from([4, 8, 16, 32, None]),
    world=st.sampled_from([2, 4]),
    kind=st.sampled_from(["qwen3", "qwen3 moe", "phi3"]),
)
def test_a_weight_is_refused_where_its_shards_would_be_quantized_otherwise(rows, columns, world, kind):
    format = WeightFormat(name="fp8_test", element="e4m3", rows=rows, columns=columns, scale="float32")
    spec = replace(spec_of_kind(kind), quantization=QuantizationSpec(format=format, packed=False))
    params = {name: p.detach() for name, p in decoder_of(spec, torch.float32).named_parameters()}
    found = find_divided_block(spec, world)
    assert (found is None) == (divided(spec, params, world) is None)


@pytest.mark.parametrize("name", ["fp8", "int8_g128", "int4", "int4_g32_asym", "mxfp4"])
@pytest.mark.parametrize("shared_scales", [False, True], ids=["engine of one", "engine of two"])
def test_packed_shards_are_the_shards_of_the_weight(name, shared_scales):
    """Whether scales are stored by blocks of rows or, for engines of several ranks, by row."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_key_value_heads": 4}
    format, ranks = FORMATS[name], 2 if shared_scales else 1
    quantization = QuantizationSpec(format=format, packed=True, tensor_parallel_size=ranks)
    spec = replace(spec_of_kind("qwen3", **sizes), quantization=quantization)
    assert find_divided_block(spec, 2) is None
    params = {
        name: p.detach() for name, p in decoder_of(replace(spec, quantization=None), torch.float32).named_parameters()
    }
    rank_spec = shard_spec(spec, 2)
    packed = pack_params(spec, params, torch.float32)
    for name, own in plan_quantization(rank_spec).items():
        whole = read_packed(spec, packed, name)
        for rank in range(2):
            parts = {f"{name}{s}": shard_param(spec, f"{name}{s}", packed[f"{name}{s}"], rank, 2) for s in own.suffixes}
            block = row_block(format, len(parts[name]), own.segments, ranks)
            shard = dequantize(QuantizedTensor.from_tensors(format, name, parts, block), torch.float32)
            wide = replace(spec, quantization=None)
            assert torch.equal(shard, shard_param(wide, name, whole, rank, 2))


def read_packed(spec, packed, name):
    """A packed weight, dequantized."""
    own = plan_quantization(spec)[name]
    parts = {f"{name}{suffix}": packed[f"{name}{suffix}"] for suffix in own.suffixes}
    block = row_block(own.format, len(parts[name]), own.segments, own.tensor_parallel_size)
    return dequantize(QuantizedTensor.from_tensors(own.format, name, parts, block), torch.float32)


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "nvfp4"])
def test_scales_of_a_whole_weight_or_row_are_never_sharded(name):
    wide = spec_of_kind("qwen3", intermediate_size=64)
    spec = replace(wide, quantization=QuantizationSpec(format=FORMATS[name], packed=False))
    assert find_divided_block(spec, 1) is None
    assert find_divided_block(spec, 2) is not None
