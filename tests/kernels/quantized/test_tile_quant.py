"""FP8 quantization by tiles and transposed, against the torch reference."""

import pytest
import torch
from tests.kernels.device import needs_triton, random

from miles.kernels.quantized import tile_quant as module
from miles.kernels.quantized.tile_quant import quantize_transposed_fp8, quantize_weight_fp8, transpose_fp8
from miles.precision.formats import FORMATS
from miles.precision.quantize import dequantize, dequantize_activation, quantize, quantize_activation


@pytest.fixture(autouse=True)
def on_device(monkeypatch, poisoned):
    monkeypatch.setattr(module, "use_triton", lambda x: True)


def bits(x):
    return x.contiguous().view(torch.uint8)


@needs_triton
@pytest.mark.parametrize("name", ["fp8", "fp8_channel"])
def test_a_weight_is_quantized_to_the_references_bits(name):
    weight, segments = random(2, 256, 128, dtype=torch.bfloat16), (128, 128)
    weight[0, :128] = 0
    found, expected = quantize_weight_fp8(weight, FORMATS[name], segments), quantize(weight, FORMATS[name], segments)
    assert found is not None
    assert torch.equal(bits(found.data), bits(expected.data)) and torch.equal(found.scale, expected.scale)
    assert found.row_block == expected.row_block


@needs_triton
def test_shapes_that_blocks_do_not_divide_are_left_to_the_reference():
    assert quantize_weight_fp8(random(200, 128), FORMATS["fp8"], (200,)) is None
    assert quantize_weight_fp8(random(256, 96), FORMATS["fp8"], (256,)) is None
    assert quantize_weight_fp8(random(256, 128), FORMATS["int4"], (256,)) is None


@needs_triton
@pytest.mark.parametrize("quantized", [False, True])
def test_rows_are_quantized_transposed_in_groups_of_tokens(quantized):
    x = random(150, 96, dtype=torch.bfloat16)
    source = quantize_activation(x, FORMATS["fp8"]) if quantized else x
    wide = dequantize_activation(source) if quantized else x.float()
    found = quantize_transposed_fp8(source)
    padded = torch.nn.functional.pad(wide, (0, 0, 0, 256 - 150)).T.contiguous()
    expected = quantize_activation(padded, FORMATS["fp8"])
    assert torch.equal(bits(found.data), bits(expected.data)) and torch.equal(found.scale, expected.scale)


def test_a_transposed_weight_dequantizes_to_the_transpose():
    packed = quantize(random(256, 128), FORMATS["fp8"])
    transposed = transpose_fp8(packed)
    assert torch.equal(dequantize(transposed, torch.float32), dequantize(packed, torch.float32).T)
