"""Gradients of quantized layers: the straight-through definition, and torch's gradient of the dequantized expression.

Shapes: T rows, K in, N out, E experts, R rows sorted by expert.
"""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from miles.kernels.moe.grouped_gemm import sort_rows_by_group
from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.kernels.quantized.autograd import quantize_gradient
from miles.kernels.quantized.linear import quantized_linear
from miles.kernels.quantized.moe import grouped_quantized_linear
from miles.precision.formats import FORMATS
from miles.precision.quantize import dequantize, dequantize_activation, quantize, quantize_activation
from miles.precision.quantized_tensor import StraightThroughWeight

IMPLEMENTED = tuple(FORMATS)
SEGMENTS = (160, 32)
N, K = sum(SEGMENTS), 160


def operands(seed=0, rows=9, dtype=torch.float32, stack=()):
    torch.manual_seed(seed)
    x = torch.randn(rows, K, dtype=dtype, requires_grad=True)
    weight = torch.randn(*stack, N, K, dtype=dtype, requires_grad=True)
    bias = torch.randn(*stack, N, dtype=dtype, requires_grad=True)
    return x, weight, bias


def rounded(x, weight, format, segments=SEGMENTS):
    """The operands as the forward multiplies them."""
    x = x.detach()
    if format.quantizes_activations:
        x = dequantize_activation(quantize_activation(x, format)).to(x.dtype)
    return x, dequantize(quantize(weight.detach(), format, segments), weight.dtype)


@pytest.mark.parametrize("name", IMPLEMENTED)
@pytest.mark.parametrize("numerics", [FAST, BATCH_INVARIANT])
def test_gradients_are_those_of_the_dequantized_expression(name, numerics):
    format = FORMATS[name]
    x, weight, bias = operands()
    out = quantized_linear(x, StraightThroughWeight(format, weight, SEGMENTS), bias, numerics=numerics)
    x_rounded, weight_rounded = (t.requires_grad_() for t in rounded(x, weight, format))
    other_bias = bias.detach().clone().requires_grad_()
    expected = F.linear(x_rounded, weight_rounded, other_bias)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad)
    for ours, theirs in ((x, x_rounded), (weight, weight_rounded), (bias, other_bias)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_gradients_are_finite_differences_around_the_rounded_operands(name):
    format = FORMATS[name]
    x, weight, bias = operands(rows=3, dtype=torch.float64)
    grad = torch.randn(3, N, dtype=torch.float64)
    quantized_linear(x, StraightThroughWeight(format, weight, SEGMENTS), bias, numerics=FAST).backward(grad)
    x_rounded, weight_rounded = rounded(x, weight, format)

    def loss(dx, dweight):
        return ((x_rounded + dx) @ (weight_rounded + dweight).T * grad).sum()

    step = 1e-4
    for tensor, other, first in ((x, weight, True), (weight, x, False)):
        direction = torch.randn_like(tensor)
        zero = torch.zeros_like(other)
        ahead, behind = (loss(s * direction, zero) if first else loss(zero, s * direction) for s in (step, -step))
        expected = (ahead - behind) / (2 * step)
        torch.testing.assert_close((tensor.grad * direction).sum(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", IMPLEMENTED)
@pytest.mark.parametrize("numerics", [FAST, BATCH_INVARIANT])
def test_experts_have_the_gradients_of_each_experts_own_layer(name, numerics):
    format = FORMATS[name]
    x, weight, bias = operands(rows=12, stack=(3,))
    rows = sort_rows_by_group(torch.tensor([0, 2, 2, 0, 2, 2, 0, 0, 2, 0, 2, 2]).unsqueeze(1), 3)
    grad = torch.randn(12, N)
    out = grouped_quantized_linear(x, StraightThroughWeight(format, weight, SEGMENTS), rows, bias, numerics=numerics)
    out.backward(grad)
    ends = [0, *rows.ends_E.tolist()]
    for expert in range(3):
        part = slice(ends[expert], ends[expert + 1])
        own_x, own_weight, own_bias = (
            t.detach().clone().requires_grad_() for t in (x[part], weight[expert], bias[expert])
        )
        own = quantized_linear(own_x, StraightThroughWeight(format, own_weight, SEGMENTS), own_bias, numerics=numerics)
        own.backward(grad[part])
        torch.testing.assert_close(out[part], own, rtol=1e-5, atol=1e-4)
        for ours, theirs in ((x.grad[part], own_x), (weight.grad[expert], own_weight), (bias.grad[expert], own_bias)):
            torch.testing.assert_close(ours, theirs.grad, rtol=1e-5, atol=1e-4)


def test_a_frozen_packed_weight_passes_the_gradient_of_its_input():
    format = FORMATS["fp8"]
    x, weight, _ = operands()
    packed = quantize(weight.detach(), format, SEGMENTS)
    quantized_linear(x, packed, None, numerics=FAST).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, torch.ones(9, N) @ dequantize(packed, torch.float32), rtol=1e-5, atol=1e-4)


def test_the_input_is_saved_once_and_in_eight_bits():
    format = FORMATS["fp8"]
    x, weight, bias = operands(rows=64)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        quantized_linear(x, StraightThroughWeight(format, weight, SEGMENTS), bias, numerics=FAST)
    own = [t for t in saved if t.data_ptr() != weight.data_ptr()]
    assert sorted(str(t.dtype) for t in own) == ["torch.float32", "torch.float8_e4m3fn"]
    assert sum(t.nbytes for t in own) == 64 * (K + 4 * 2) < x.nbytes / 3


def test_recomputed_layers_have_the_same_gradients():
    format = FORMATS["fp8"]
    results = []
    for recompute in (False, True):
        x, weight, bias = operands()

        def layer(x, weight=weight, bias=bias):
            return quantized_linear(x, StraightThroughWeight(format, weight, SEGMENTS), bias, numerics=FAST).tanh()

        out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        out.sum().backward()
        results.append((x.grad, weight.grad, bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("backward", ["e4m3", "hybrid"])
@pytest.mark.parametrize("stack", [(), (2,)], ids=["linear", "experts"])
def test_an_fp8_backward_is_close_and_rounds_its_operands(backward, stack):
    format = FORMATS["fp8"]
    grads = []
    for precision in ("wide", backward):
        x, weight, bias = operands(rows=300, stack=stack)
        straight = StraightThroughWeight(format, weight, SEGMENTS, precision)
        if stack:
            rows = sort_rows_by_group(torch.arange(300).unsqueeze(1) % 2, 2)
            out = grouped_quantized_linear(x, straight, rows, bias, numerics=FAST)
        else:
            out = quantized_linear(x, straight, bias, numerics=FAST)
        torch.manual_seed(1)
        out.backward(torch.randn_like(out) * torch.rand(300, 1))
        grads.append((x.grad, weight.grad, bias.grad))
    (x_wide, weight_wide, bias_wide), (x_fp8, weight_fp8, bias_fp8) = grads
    assert torch.equal(bias_wide, bias_fp8)
    for wide, fp8 in ((x_wide, x_fp8), (weight_wide, weight_fp8)):
        relative = (wide - fp8).norm() / wide.norm()
        assert 1e-3 < relative < (0.04 if backward == "e4m3" else 0.08)


@pytest.mark.parametrize("backward", ["e4m3", "hybrid"])
def test_a_quantized_gradient_has_a_scale_for_each_row_and_128_columns(backward):
    grad = torch.randn(5, 300) * 10.0 ** torch.arange(-4, 1).unsqueeze(1)
    quantized = quantize_gradient(grad, backward)
    assert quantized.scale.shape == (5, 3) and quantized.data.shape == (5, 300)
    error = (dequantize_activation(quantized) - grad).abs().amax(1) / grad.abs().amax(1)
    assert error.max() <= (2**-4 if backward == "e4m3" else 2**-3)
