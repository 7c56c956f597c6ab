"""FP8 quantization of transposed operands, against the torch reference."""

import pytest
import torch
from tests.kernels.device import DEVICE, needs_triton, random

from miles.kernels.quantized.transposed_quant import (
    quantize_both_fp8,
    quantize_transposed_fp8,
    transpose_bytes,
    transpose_fp8,
)
from miles.precision.formats import FORMATS
from miles.precision.quantize import dequantize, dequantize_activation, quantize, quantize_activation


def bits(x):
    return x.contiguous().view(torch.uint8)


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


@needs_triton
def test_one_kernel_quantizes_rows_and_columns():
    x = random(150, 384, dtype=torch.bfloat16)
    rows, columns = quantize_both_fp8(x)
    expected_rows, expected_columns = quantize_activation(x, FORMATS["fp8"]), quantize_transposed_fp8(x)
    assert torch.equal(bits(rows.data), bits(expected_rows.data)) and torch.equal(rows.scale, expected_rows.scale)
    assert torch.equal(bits(columns.data), bits(expected_columns.data))
    assert torch.equal(columns.scale, expected_columns.scale)


@needs_triton
@pytest.mark.parametrize("shape", [(132, 150), (6, 5), (3, 8, 130)])
def test_bytes_are_transposed(shape):
    x = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    assert torch.equal(transpose_bytes(x), x.mT)


def test_a_transposed_weight_dequantizes_to_the_transpose():
    packed = quantize(random(256, 128), FORMATS["fp8"])
    transposed = transpose_fp8(packed)
    assert torch.equal(dequantize(transposed, torch.float32), dequantize(packed, torch.float32).T)
