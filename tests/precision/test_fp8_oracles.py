"""FP8 quantization against compressed-tensors and against the quantizer of transformers."""

from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize as quantize_outside
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given
from hypothesis import strategies as st
from tests.precision.tensors import weights
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from miles.precision.formats import get_format
from miles.precision.quantize import dequantize, quantize, quantize_activation

STACKS = st.sampled_from([(), (2,)])


def quantize_by_compressed_tensors(x, low, high, **settings):
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, **settings)
    scale, _ = calculate_qparams(low, high, args)
    # Adding its zero point would take the sign of a zero.
    return quantize_outside(x, scale, None, args, dtype=torch.float8_e4m3fn), scale


def quantize_by_transformers(weight, block, scale_fmt):
    settings = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    made = Fp8Quantize(SimpleNamespace(quantization_config=settings))._quantize_one("w.weight", weight)
    return made["w.weight"], made["w.weight_scale_inv"].float()


def same(ours, theirs):
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@given(weight=weights(st.just(96)))
def test_channels_and_tokens_have_the_bytes_of_compressed_tensors(weight):
    wide = weight.float()
    low, high = wide.aminmax(dim=-1, keepdim=True)
    data, scale = quantize_by_compressed_tensors(wide, low, high, strategy="channel")
    packed, rows = quantize(weight, get_format("fp8_channel")), quantize_activation(weight, get_format("fp8_channel"))
    # The scale of a row of zeros is 1 here and a small number there.
    zero = (low == 0) & (high == 0)
    assert torch.equal(packed.scale, torch.where(zero, 1.0, scale))
    assert torch.equal(rows.scale, packed.scale)
    assert same(packed.data, data)
    assert same(rows.data, data)


@given(weight=weights(st.just(64)))
def test_a_tensor_has_the_bytes_of_compressed_tensors(weight):
    wide = weight.float()
    data, scale = quantize_by_compressed_tensors(wide, *wide.aminmax(), strategy="tensor")
    packed = quantize(weight, get_format("fp8_tensor"))
    assert same(packed.data, data)
    assert packed.scale == (scale if wide.any() else 1)


@given(weight=weights(st.sampled_from([128, 300]), st.sampled_from([1, 128, 130])))
def test_blocks_have_the_bytes_of_compressed_tensors(weight):
    wide = weight.float()
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(wide, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2).flatten(2)
    settings = {"strategy": "block", "block_structure": [128, 128]}
    data, scale = quantize_by_compressed_tensors(wide, blocks.amin(-1), blocks.amax(-1), **settings)
    packed = quantize(weight, get_format("fp8"))
    assert torch.equal(packed.scale, torch.where(blocks.any(-1), scale, 1.0))
    assert same(packed.data, data)


@given(weight=weights(st.sampled_from([128, 256]), st.sampled_from([128, 256]), STACKS))
def test_powers_of_two_have_the_bytes_of_transformers(weight):
    data, scale = quantize_by_transformers(weight, (128, 128), "ue8m0")
    packed = quantize(weight, get_format("fp8_pow2"))
    assert torch.equal(packed.scale, scale)
    assert same(packed.data, data)


@given(weight=weights(st.sampled_from([128, 256]), st.sampled_from([128, 256]), STACKS))
def test_blocks_differ_from_those_of_transformers_in_the_last_bit_of_a_scale_at_most(weight):
    data, scale = quantize_by_transformers(weight, (128, 128), "float")
    packed = quantize(weight, get_format("fp8"))
    assert torch.allclose(packed.scale, scale, rtol=2.0**-22, atol=0)
    steps = (packed.data.view(torch.uint8).int() - data.view(torch.uint8).int()).abs()
    assert steps.max() <= 1
    assert (steps > 0).float().mean() <= 0.02


@pytest.mark.parametrize("name", ["fp8", "fp8_channel", "fp8_tensor"])
def test_what_was_dequantized_is_quantized_to_the_same_bytes(name):
    """Not so ``fp8_pow2``: a block whose largest value rounds down to 224 gets half the scale the second time."""
    weight = torch.randn(256, 256)
    first = quantize(weight, get_format(name))
    again = quantize(dequantize(first, torch.float32), get_format(name))
    assert same(again.data, first.data)
    assert torch.allclose(again.scale, first.scale, rtol=2.0**-22, atol=0)
