"""Quantization in Triton against the torch reference, bit for bit."""

import pytest
import torch
from tests.kernels.device import DEVICE, needs_triton, random

from miles.kernels.quantized.quantize_triton import quantize_rows_mxfp8, quantize_weight, supports_quantize_weight
from miles.precision.formats import get_format
from miles.precision.microscaling import quantize_mxfp8
from miles.precision.quantize import quantize

pytestmark = needs_triton
VALUES = (0.0, -0.0, 2.0**-9, 448.0, 464.0, 1e-38, -1e30, 3.5)


def same(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def weight_of(*shape, dtype=torch.float32):
    """Many magnitudes, special values, and a block of zeros."""
    weight = random(*shape) * torch.exp2(torch.randint(-12, 6, (*shape[:-1], 1)).float()).to(DEVICE)
    weight[..., :3, : len(VALUES)] = torch.tensor(VALUES, device=DEVICE)
    weight[..., :, 32:64] = 0
    return weight.to(dtype)


@pytest.mark.parametrize("name", ["fp8", "fp8_pow2"])
@pytest.mark.parametrize("shape", [(130, 150), (2, 128, 128)])
def test_blocks_are_those_of_the_reference(name, shape, poisoned):
    weight, format = weight_of(*shape, dtype=torch.bfloat16), get_format(name)
    packed, wanted = quantize_weight(weight, format), quantize(weight, format)
    assert same(packed.data, wanted.data) and same(packed.scale, wanted.scale)


def test_channels_are_those_of_the_reference(poisoned):
    weight, format = weight_of(2, 5, 100), get_format("fp8_channel")
    packed, wanted = quantize_weight(weight, format), quantize(weight, format)
    assert same(packed.data, wanted.data) and same(packed.scale, wanted.scale)


@pytest.mark.parametrize("columns", [32, 96, 1056])
def test_rows_of_mxfp8_are_those_of_the_reference(columns, poisoned):
    x = weight_of(4, columns)
    x[1, 5], x[2, 6] = float("nan"), float("inf")
    (data, scale), (wanted, wanted_scale) = quantize_rows_mxfp8(x), quantize_mxfp8(x)
    assert same(scale, wanted_scale)
    assert torch.equal(data.float().nan_to_num(1e9), wanted.float().nan_to_num(1e9))


def test_nan_makes_the_scale_of_its_block_nan():
    weight = random(130, 140)
    weight[129, 3] = float("nan")
    scale = quantize_weight(weight, get_format("fp8")).scale
    assert scale.isnan().tolist() == [[False, False], [True, False]]


def test_blocks_that_cross_a_segment_and_transposed_channels_are_left_to_the_reference():
    weight = torch.zeros(256, 128)
    assert supports_quantize_weight(weight, get_format("fp8"), (128, 128))
    assert not supports_quantize_weight(weight, get_format("fp8"), (100, 156))
    assert supports_quantize_weight(weight, get_format("fp8_channel"), (100, 156))
    assert not supports_quantize_weight(weight, get_format("mxfp8"))
