"""INT8 and INT4 against compressed-tensors (pack-quantized) and torchao."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as dequantize_outside
from compressed_tensors.quantization.lifecycle.forward import quantize as quantize_outside
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given
from hypothesis import strategies as st
from tests.precision.tensors import weights
from torchao.quantization.quant_primitives import dequantize_affine

from miles.precision.formats import FORMATS, get_format
from miles.precision.integer import decode_integers
from miles.precision.quantize import dequantize, quantize

STACKS = st.sampled_from([(), (2,)])
INTEGERS = [name for name, format in FORMATS.items() if format.element in ("int8", "int4")]


def quantize_by_compressed_tensors(weight, format):
    """Values and zero points from -8 (or -128), and scales."""
    group = format.columns or weight.shape[-1]
    groups = weight.float().unflatten(-1, (-1, group))
    args = QuantizationArgs(
        num_bits=format.bits,
        type="int",
        symmetric=not format.zero_point,
        strategy="group",
        group_size=group,
        scale_dtype=torch.bfloat16,
        zp_dtype=torch.int8,
    )
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    return quantize_outside(weight.float(), scale, zero, args, dtype=torch.int8), scale, zero, args


@pytest.mark.parametrize("name", INTEGERS)
@given(weight=weights(st.sampled_from([128, 256]), stack=STACKS))
def test_values_scales_and_zero_points_are_those_of_compressed_tensors(name, weight):
    format = get_format(name)
    value, scale, zero, args = quantize_by_compressed_tensors(weight, format)
    packed = quantize(weight, format)
    assert torch.equal(packed.scale.float(), scale)
    if packed.zero is not None:
        assert torch.equal(packed.zero.to(torch.int8) - 8, zero)
    stored = decode_integers(packed.data, format.bits, None).to(torch.int8)
    assert torch.equal(stored, value)
    wide = dequantize_outside(value, scale, zero, args, torch.float32)
    assert torch.equal(dequantize(packed, torch.float32), wide)


@pytest.mark.parametrize("name", [name for name in INTEGERS if FORMATS[name].bits == 4])
@given(weight=weights(st.just(128)))
def test_bytes_are_those_of_pack_quantized_checkpoints(name, weight):
    packed = quantize(weight, get_format(name))
    value = quantize_by_compressed_tensors(weight, get_format(name))[0]
    words = packed.data.view(torch.int32)
    assert torch.equal(pack_to_int32(value, 4), words)
    assert torch.equal(unpack_from_int32(words, 4, weight.shape), value)


@pytest.mark.parametrize("name", ["int8_g32", "int4_g32", "int4_g32_asym"])
def test_torchao_reads_the_same_numbers(name):
    packed = quantize(torch.randn(6, 96), get_format(name))
    stored = decode_integers(packed.data, packed.format.bits, None).to(torch.int8)
    zero = None if packed.zero is None else packed.zero.to(torch.int8) - 8
    wide = dequantize_affine(stored, (1, 32), packed.scale.float(), zero, torch.int8, output_dtype=torch.float32)
    assert torch.equal(wide, dequantize(packed, torch.float32))
