"""FP8 experts in Triton against the torch reference, which dequantizes."""

import pytest
import torch
from tests.kernels.device import needs_triton, random

from miles.kernels.moe.grouped_gemm import sort_rows_by_group
from miles.kernels.numerics import FAST
from miles.kernels.quantized import moe as module
from miles.kernels.quantized.activation_quant import quantize_rows_fp8
from miles.kernels.quantized.fp8_moe import fp8_grouped_gemm, fp8_moe
from miles.kernels.quantized.moe import QuantizedExperts, grouped_quantized_linear, quantized_moe
from miles.precision.formats import FORMATS
from miles.precision.quantize import quantize


def build(name, tokens, width, size, experts=4, chosen=2):
    format = FORMATS[name]
    first = quantize(random(experts, 2 * size, width, dtype=torch.bfloat16) / 8, format, (size, size))
    down = quantize(random(experts, width, size, dtype=torch.bfloat16) / 8, format)
    x = random(tokens, width, dtype=torch.bfloat16)
    experts_Tk = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)]).to(x.device)
    weights_Tk = torch.rand(tokens, chosen).to(x.device, torch.bfloat16)
    return x, weights_Tk, experts_Tk, first, down


@needs_triton
@pytest.mark.parametrize("name", ["fp8", "fp8_channel"])
@pytest.mark.parametrize("shape", [(5, 128, 128), (3, 96, 64)])
def test_the_fused_experts_are_the_references(name, shape, poisoned, monkeypatch):
    x, weights_Tk, experts_Tk, first, down = build(name, *shape)
    out = fp8_moe(quantize_rows_fp8(x, FORMATS[name]), weights_Tk, experts_Tk, first, down, "silu")
    monkeypatch.setattr(module, "supports_fp8_gemm", lambda *_: False)
    experts = QuantizedExperts(first, down, None, None, "silu", False, FAST)
    expected = quantized_moe(x, weights_Tk, experts_Tk, experts)
    # A bit of difference before the second quantization moves a value to the next of E4M3.
    assert float((out.float() - expected.float()).abs().max()) < 0.03 * float(expected.float().abs().max())


@needs_triton
@pytest.mark.parametrize("name", ["fp8", "fp8_channel"])
def test_sorted_rows_meet_their_experts(name, poisoned, monkeypatch):
    x, _, experts_Tk, first, _ = build(name, 6, 96, 64)
    rows = sort_rows_by_group(experts_Tk, 4)
    x_RD = x[rows.order_R // 2]
    out = fp8_grouped_gemm(quantize_rows_fp8(x_RD, FORMATS[name]), first, rows)
    monkeypatch.setattr(module, "supports_fp8_gemm", lambda *_: False)
    expected = grouped_quantized_linear(x_RD, first, rows, None, numerics=FAST)
    assert float((out.float() - expected.float()).abs().max()) < 0.01 * float(expected.float().abs().max())
