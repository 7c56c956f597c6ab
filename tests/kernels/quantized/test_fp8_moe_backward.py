"""FP8 backward of experts in Triton, against float32 matmuls of the dequantized operands and torch's own gradients.

Shapes: R rows sorted by expert, E experts, K in, N out.
"""

import pytest
import torch
from tests.kernels import interpreter  # noqa: F401
from tests.kernels.device import CARD, DEVICE, apart, needs_triton, random

from miles.kernels.moe.grouped_gemm import sort_rows_by_group
from miles.kernels.numerics import FAST
from miles.kernels.quantized import autograd
from miles.kernels.quantized import fp8_moe_backward as module
from miles.kernels.quantized.moe import grouped_quantized_linear
from miles.kernels.quantized.transposed_quant import transpose_fp8
from miles.precision.formats import FORMATS
from miles.precision.quantize import dequantize, dequantize_activation, quantize, quantize_activation
from miles.precision.quantized_tensor import StraightThroughWeight

pytestmark = needs_triton
BF16 = torch.bfloat16
# Rows of each expert: whole blocks, none, one row, part of a block, more than a block.
COUNTS = {"mixed": (128, 0, 1, 5, 130), "all to one": (0, 0, 140), "one row": (0, 1), "empty ends": (0, 5, 0)}


def sorted_rows(counts):
    groups = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return sort_rows_by_group(groups[torch.randperm(len(groups))].unsqueeze(1).to(DEVICE), len(counts))


def round_segment(x_RC):
    """Rows of one expert, rounded in groups of 128 rows."""
    padded = torch.nn.functional.pad(x_RC.float(), (0, 0, 0, -len(x_RC) % 128))
    return dequantize_activation(quantize_activation(padded.T.contiguous(), FORMATS["fp8"])).T[: len(x_RC)]


def quantize_with_torch(weight, format):
    """``quantize_weight`` in torch: its kernel takes minutes in the interpreter, and has tests of its own."""
    return quantize(weight, format)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("quantized", [False, True])
def test_groups_of_rows_do_not_cross_experts(counts, quantized, poisoned):
    rows, x = sorted_rows(counts), random(sum(counts), 160, dtype=BF16)
    x *= torch.exp2(torch.arange(len(x), device=DEVICE) % 23 - 11).unsqueeze(1)  # neighbours of very different size
    source = quantize_activation(x, FORMATS["fp8"]) if quantized else x
    wide = dequantize_activation(source) if quantized else x.float()
    found = module.quantize_grouped_transposed_fp8(source, rows, len(counts))
    block = 0
    for segment in wide.split(counts):
        blocks = -(-len(segment) // 128)
        ours = found.data[:, block * 128 : (block + blocks) * 128].float().unflatten(1, (-1, 128))
        ours = (ours * found.scale[block : block + blocks].T.unsqueeze(-1)).flatten(1).T
        assert torch.equal(ours[: len(segment)], round_segment(segment)) and not ours[len(segment) :].any()
        block += blocks


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("shape", [(128, 256), (200, 144)])
def test_gradients_of_weights_are_matmuls_of_the_rounded_operands(counts, shape, poisoned):
    rows, (outputs, inputs) = sorted_rows(counts), shape
    grad, x = random(sum(counts), outputs, dtype=BF16), random(sum(counts), inputs, dtype=BF16)
    held = quantize_activation(x, FORMATS["fp8"])
    out = module.fp8_grouped_grad_weight(grad, held, rows, len(counts))
    assert out.shape == (len(counts), *shape) and out.dtype == BF16
    for ours, dy, own in zip(out, grad.split(counts), dequantize_activation(held).split(counts), strict=True):
        wanted = round_segment(dy).T @ round_segment(own) if len(dy) else torch.zeros_like(ours)
        assert apart(ours, wanted) < 4e-3


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_gradients_of_inputs_are_matmuls_of_the_rounded_operands(counts, poisoned):
    rows = sorted_rows(counts)
    weight, grad = random(len(counts), 256, 160, dtype=BF16), random(sum(counts), 256, dtype=BF16)
    packed = quantize(weight, FORMATS["fp8"])
    transposed = transpose_fp8(packed)
    out = module.fp8_grouped_grad_input(grad, transposed, rows)
    held = dequantize(packed, torch.float32)
    for ours, dy, own in zip(out.split(counts), grad.split(counts), held, strict=True):
        rounded = dequantize_activation(quantize_activation(dy, FORMATS["fp8"]))
        assert apart(ours, rounded @ own) < 4e-3


def run(weight, x, rows, bias, grad, precision):
    weight, x, bias = (t.detach().clone().requires_grad_() for t in (weight, x, bias))
    held = StraightThroughWeight(FORMATS["fp8"], weight, (128, 128), precision)
    grouped_quantized_linear(x, held, rows, bias, numerics=FAST).backward(grad)
    return x.grad, weight.grad, bias.grad


def test_experts_train_with_an_fp8_backward(monkeypatch):
    counts = COUNTS["mixed"]
    rows = sorted_rows(counts)
    weight, bias = random(len(counts), 256, 128, dtype=BF16), random(len(counts), 256, dtype=BF16)
    x, grad = random(sum(counts), 128, dtype=BF16), random(sum(counts), 256, dtype=BF16)
    wide = run(weight, x, rows, bias, grad, "wide")
    monkeypatch.setattr(autograd, "supports_fp8_grouped_backward", lambda *_: False)
    emulated = run(weight, x, rows, bias, grad, "e4m3")
    monkeypatch.undo()
    launched = []
    for name in ("fp8_grouped_grad_input", "fp8_grouped_grad_weight"):
        kernel = getattr(module, name)
        monkeypatch.setattr(autograd, name, lambda *a, kernel=kernel: launched.append(kernel) or kernel(*a))
    if not CARD:
        monkeypatch.setattr(module, "use_triton", lambda x: True)
        monkeypatch.setattr(autograd, "quantize_weight", quantize_with_torch)
    ours = run(weight, x, rows, bias, grad, "e4m3")
    assert launched == [module.fp8_grouped_grad_input, module.fp8_grouped_grad_weight]
    for name, mine, reference, exact in zip(("x", "weight", "bias"), ours, emulated, wide, strict=True):
        assert apart(mine, reference) < 0.02, name  # which rounds operands to bfloat16 in between
        assert (0.02 < apart(mine, exact) < 0.05) == (name != "bias"), name
    assert not ours[1][1].any() and torch.equal(ours[2], wide[2])  # an expert without rows; the bias is not rounded


@pytest.mark.parametrize("precision", ["hybrid", "wide"])
def test_other_backward_precisions_do_not_use_the_kernels(monkeypatch, precision):
    rows = sorted_rows((3, 2))
    monkeypatch.setattr(module, "use_triton", lambda x: True)
    monkeypatch.setattr(autograd, "fp8_grouped_grad_input", lambda *_: pytest.fail("E4M3 kernel"))
    weight, bias = random(2, 256, 128, dtype=BF16), random(2, 256, dtype=BF16)
    grads = run(weight, random(5, 128, dtype=BF16), rows, bias, random(5, 256, dtype=BF16), precision)
    assert all(grad.isfinite().all() for grad in grads)
