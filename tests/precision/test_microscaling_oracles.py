"""MXFP8, MXFP4 and NVFP4 against torchao and compressed-tensors."""

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as dequantize_outside
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from hypothesis import given
from hypothesis import strategies as st
from tests.precision.tensors import weights
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from miles.precision.dequantize import dequantize_mxfp4
from miles.precision.formats import get_format
from miles.precision.integer import unpack_nibbles
from miles.precision.microscaling import decode_e2m1, encode_e2m1
from miles.precision.quantize import dequantize, quantize

STACKS = st.sampled_from([(), (2,)])
COLUMNS = st.sampled_from([32, 96])
ELEMENTS = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}


def same(ours, theirs):
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("name", ELEMENTS)
@given(weight=weights(COLUMNS, stack=STACKS))
def test_mx_formats_have_the_bytes_of_torchao_with_scales_rounded_up(name, weight):
    # Numbers of bfloat16: torchao rounds a logarithm, which is exact for them.
    weight = weight.to(torch.bfloat16)
    scale, data = to_mx(weight, ELEMENTS[name], 32, ScaleCalculationMode.RCEIL)
    packed = quantize(weight, get_format(name))
    assert same(packed.scale, scale)
    assert same(packed.data, data)


@given(weight=weights(COLUMNS))
def test_mxfp4_is_read_back_as_the_checkpoint_reader_does(weight):
    packed = quantize(weight, get_format("mxfp4"))
    out = torch.empty(weight.shape)
    dequantize_mxfp4(packed.data.unflatten(-1, (-1, 16)), packed.scale, out)
    assert torch.equal(dequantize(packed, torch.float32), out)


@given(weight=weights(COLUMNS))
def test_mx_scales_are_those_of_compressed_tensors_or_twice_as_large(weight):
    # It rounds the largest magnitude to the nearest power of two, so that some values saturate.
    wide = weight.float().clamp(-1e30, 1e30)
    groups = wide.unflatten(-1, (-1, 32))
    args = QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    theirs, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    packed = quantize(wide, get_format("mxfp4"))
    ours = 2.0 ** (packed.scale.float() - 127)
    compared = groups.abs().amax(-1) > 1e-20
    ratio = (ours / theirs.float())[compared]
    assert ((ratio == 1) | (ratio == 2)).all()


@given(weight=weights(COLUMNS))
def test_nvfp4_has_the_bytes_of_torchao(weight):
    weight = weight.float()
    weight[0, 0] = 3.0  # a matrix of nothing but tiny numbers has no global scale there
    shared = per_tensor_amax_to_scale(weight.abs().max())
    scale, data = nvfp4_quantize(weight, 16, shared)
    packed = quantize(weight, get_format("nvfp4"))
    assert torch.equal(packed.global_scale, shared)
    assert torch.equal(shared, weight.abs().max() / (6 * 448))
    assert same(packed.scale, scale)
    assert same(packed.data, data)


@given(weight=weights(COLUMNS))
def test_nvfp4_is_what_compressed_tensors_reads(weight):
    # Its global scale is the reciprocal of NVIDIA's.
    weight = weight.float()
    weight[0, 0] = 3.0
    packed = quantize(weight, get_format("nvfp4"))
    assert torch.allclose(1 / generate_gparam(*weight.aminmax()), packed.global_scale, rtol=1e-6, atol=0)
    values = unpack_fp4_from_uint8(packed.data, *weight.shape, dtype=torch.float32)
    assert torch.equal(values, decode_e2m1(unpack_nibbles(packed.data)))
    assert torch.equal(pack_fp4_to_uint8(values.to(torch.bfloat16)), packed.data)
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
    wide = dequantize_outside(values, packed.scale.float(), None, args, torch.float32, 1 / packed.global_scale)
    assert torch.allclose(dequantize(packed, torch.float32), wide, rtol=1e-6, atol=0)


@given(weight=weights(COLUMNS))
def test_scales_of_nvfp4_are_those_of_compressed_tensors(weight):
    weight = weight.float()
    weight[0, 0] = 3.0
    groups = weight.unflatten(-1, (-1, 16))
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        symmetric=True,
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    )
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, generate_gparam(*weight.aminmax()))
    ours = quantize(weight, get_format("nvfp4")).scale.float()
    # Scales below the normal range and of zeros differ, and near a tie a scale may be the neighbour.
    exact = groups.abs().amax(-1).double() / 6 / (weight.abs().max().double() / 2688)
    tie = (exact - (ours + scale).double() / 2).abs() < exact * 1e-6
    assert (ours == scale)[(exact > 2.0**-6) & ~tie].all()


def test_e2m1_codes_are_those_of_compressed_tensors():
    x = torch.cat((torch.linspace(-7, 7, 4001), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])))
    assert torch.equal(decode_e2m1(encode_e2m1(x)), cast_to_fp4(x.clone()))
