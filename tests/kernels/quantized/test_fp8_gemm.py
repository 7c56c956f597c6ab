"""The FP8 GEMM and the kernels that quantize its input, against the torch reference."""

import pytest
import torch
from tests.kernels.device import CARD, DEVICE, needs_triton, random

from miles.kernels.fused.activation import apply_activation
from miles.kernels.quantized.activation_quant import gated_activation_fp8, quantize_rows_fp8, rms_norm_fp8
from miles.kernels.quantized.fp8_gemm import Fp8Tile, fp8_gemm, list_fp8_tiles, select_fp8_tile
from miles.precision.formats import FORMATS
from miles.precision.quantize import dequantize, dequantize_activation, quantize, quantize_activation

SCALINGS = ["fp8", "fp8_pow2", "fp8_channel", "fp8_tensor"]
SHAPES = [(5, 256, 192, None), (17, 200, 136, (72, 64)), (1, 64, 48, None)]
TILES = list_fp8_tiles() if CARD else [Fp8Tile(64, 16, 4, 2), Fp8Tile(128, 64, 4, 2)]


def bits(x):
    return x.view(torch.uint8)


def assert_quantized(found, wide, format):
    expected = quantize_activation(wide, format)
    assert torch.equal(bits(found.data), bits(expected.data))
    assert torch.equal(found.scale, expected.scale)
    assert found.columns == expected.columns and found.dtype == wide.dtype


@needs_triton
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_quantized_to_the_references_bits(name, shape, poisoned):
    tokens, inputs, _, _ = shape
    x = random(tokens, inputs, dtype=torch.bfloat16)
    x[0] = 0
    assert_quantized(quantize_rows_fp8(x, FORMATS[name]), x, FORMATS[name])


@needs_triton
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_that_of_the_dequantized_operands(name, shape, poisoned):
    tokens, inputs, rows, segments = shape
    format = FORMATS[name]
    x = quantize_rows_fp8(random(tokens, inputs, dtype=torch.bfloat16), format)
    packed = quantize(random(rows, inputs, dtype=torch.bfloat16), format, segments)
    bias = random(rows, dtype=torch.bfloat16)
    expected = dequantize_activation(x) @ dequantize(packed, torch.float32).T + bias.float()
    outs = [fp8_gemm(x, packed, bias, tile) for tile in TILES]
    assert float((outs[0].float() - expected).abs().max()) < 0.01 * float(expected.abs().max())
    assert all(torch.equal(outs[0], out) for out in outs), "tiles change bits"


@needs_triton
def test_a_row_does_not_depend_on_the_others(poisoned):
    x, packed = random(9, 256, dtype=torch.bfloat16), quantize(random(64, 256), FORMATS["fp8"])
    together = fp8_gemm(quantize_rows_fp8(x, FORMATS["fp8"]), packed)
    alone = fp8_gemm(quantize_rows_fp8(x[4:5], FORMATS["fp8"]), packed)
    assert torch.equal(together[4:5], alone)


@needs_triton
def test_what_is_not_finite_stays_so(poisoned):
    x = random(3, 256, dtype=torch.bfloat16)
    x[0, 3], x[1, 130] = float("nan"), float("inf")
    out = fp8_gemm(quantize_rows_fp8(x, FORMATS["fp8"]), quantize(random(16, 256), FORMATS["fp8"]))
    assert not out[:2].isfinite().any() and out[2].isfinite().all()


@needs_triton
@pytest.mark.parametrize("name", ["fp8", "fp8_channel"])
@pytest.mark.parametrize("size", [160, 2304])
def test_a_gate_is_quantized_in_its_kernel(name, size, poisoned):
    gate_up = random(3, 2 * size, dtype=torch.bfloat16)
    gate, up = gate_up.chunk(2, -1)
    wide = (apply_activation(gate.double(), None, "silu").to(gate.dtype).double() * up.double()).to(gate.dtype)
    found, expected = gated_activation_fp8(gate_up, "silu", FORMATS[name]), quantize_activation(wide, FORMATS[name])
    # The sigmoid of the device may be off by a bit, which moves a value to the next of E4M3.
    assert (bits(found.data) == bits(expected.data)).double().mean() > 0.98


@needs_triton
@pytest.mark.parametrize("name", ["fp8", "fp8_channel"])
@pytest.mark.parametrize("added", [False, True])
def test_a_norm_is_quantized_in_its_kernel(name, added, poisoned):
    x, weight = random(3, 192, dtype=torch.bfloat16), random(192, dtype=torch.bfloat16)
    residual = random(3, 192, dtype=torch.bfloat16) if added else None
    total, found, wide = rms_norm_fp8(x, residual, weight, 1e-6, FORMATS[name], offset=1.0, keep=True)
    assert torch.equal(total, x if residual is None else x + residual)
    scale = weight.double() + 1
    expected = torch.nn.functional.rms_norm(total.double(), (192,), None, 1e-6) * scale
    assert wide is not None
    assert float((wide.double() - expected).abs().max()) < 0.01 * float(expected.abs().max())
    assert_quantized(found, wide, FORMATS[name])


def test_more_tokens_get_larger_tiles():
    few, many = (select_fp8_tile(tokens, 4096, torch.device(DEVICE)) for tokens in (1, 4096))
    assert few.tokens == 16 and many.tokens >= 128
