"""Weight-only GEMV, GEMM and experts in Triton against the dequantized weight in torch."""

import pytest
import torch
from tests.kernels.device import CARD, DEVICE, apart, needs_triton, random
from torch.nn import functional as F

from miles.kernels.fused.activation import apply_activation
from miles.kernels.moe.grouped_gemm import sort_rows_by_group
from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.kernels.quantized import weight_only as module
from miles.kernels.quantized.packed_weight import dequantize_weight
from miles.kernels.quantized.weight_only import (
    gated_weight_only_linear,
    grouped_weight_only_linear,
    weight_only_linear,
    weight_only_moe,
)
from miles.kernels.quantized.weight_only_gemm import WeightOnlyTile, weight_only_gemm
from miles.kernels.quantized.weight_only_gemv import GemvTile, weight_only_gemv
from miles.precision.formats import FORMATS, get_format
from miles.precision.quantize import dequantize, quantize

NAMES = [name for name, format in FORMATS.items() if not format.quantizes_activations]
DTYPE = torch.bfloat16 if CARD else torch.float16
pytestmark = needs_triton


@pytest.fixture(autouse=True)
def on_device(monkeypatch, poisoned):
    monkeypatch.setattr(module, "use_triton_inference", lambda x: True)


def pack(name, *shape):
    packed = quantize(random(*shape) * torch.linspace(0.1, 2, shape[-2], device=DEVICE)[:, None], get_format(name))
    return packed, dequantize(packed, torch.float64)


def split(x, bias, wide):
    return F.linear(x.double(), wide, None if bias is None else bias.double())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inputs", [32, 96, 256])
def test_one_row_times_a_packed_weight_is_that_times_the_dequantized(name, inputs):
    packed, wide = pack(name, 11, inputs)
    x, bias = random(1, inputs, dtype=DTYPE), random(11, dtype=DTYPE)
    assert apart(weight_only_linear(x, packed, None, numerics=FAST), split(x, None, wide)) < 2e-3
    assert apart(weight_only_linear(x, packed, bias, numerics=FAST), split(x, bias, wide)) < 2e-3


@pytest.mark.parametrize("name", ["int8", "int4", "int4_asym", "mxfp4"])
def test_rows_of_many_bytes_are_read_in_several_parts(name, monkeypatch):
    monkeypatch.setattr("miles.kernels.quantized.weight_only_gemv.MAX_HEAD", 64)
    packed, wide = pack(name, 6, 416)
    x = random(1, 416)
    assert apart(weight_only_gemv(x, packed, tile=GemvTile(4, 4, 1)), split(x, None, wide)) < 2e-4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 19])
def test_rows_times_a_packed_weight_are_those_times_the_dequantized(name, rows):
    packed, wide = pack(name, 40, 160)
    x, bias = random(rows, 160, dtype=DTYPE), random(40, dtype=DTYPE)
    assert apart(weight_only_linear(x, packed, bias, numerics=BATCH_INVARIANT), split(x, bias, wide)) < 2e-3


@pytest.mark.parametrize("name", ["int4", "int4_g32_asym", "nvfp4", "int8_g32"])
def test_every_tile_has_the_same_product(name):
    packed, wide = pack(name, 40, 160)
    x = random(9, 160, dtype=DTYPE)
    for tile in (WeightOnlyTile(16, 16, 64, 4, 2), WeightOnlyTile(64, 16, 64, 4, 2), WeightOnlyTile(32, 32, 32, 4, 3)):
        assert apart(weight_only_gemm(x, packed, tile=tile), split(x, None, wide)) < 2e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(11, 96), (3, 40, 160)])
def test_the_dequantization_kernel_has_the_bits_of_the_reference(name, shape):
    packed, _ = pack(name, *shape)
    for dtype in (DTYPE, torch.float32):
        assert torch.equal(dequantize_weight(packed, dtype), dequantize(packed, dtype))


@pytest.mark.parametrize("name", NAMES)
def test_the_gemm_multiplies_with_the_bytes_that_the_reference_dequantizes(name):
    # Rows of the identity return the weight itself.
    packed, _ = pack(name, 16, 64)
    out = weight_only_gemm(torch.eye(64, dtype=DTYPE, device=DEVICE), packed)
    assert torch.equal(out, dequantize(packed, DTYPE).T)


@pytest.mark.parametrize("name", ["int4", "mxfp4", "int8"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", ["silu", "swiglu_clamped"])
def test_a_gated_layer_is_the_activation_of_one_half_times_the_other(name, rows, kind):
    packed, wide = pack(name, 24, 64)
    x, bias = random(rows, 64), random(24)
    wanted = apply_activation(*split(x, bias, wide).chunk(2, -1), kind)
    assert apart(gated_weight_only_linear(x, packed, bias, kind, numerics=FAST), wanted) < 1e-3


@pytest.mark.parametrize("name", ["int4_g32", "nvfp4", "mxfp4"])
def test_rows_sorted_by_expert_meet_the_weight_of_their_expert(name):
    packed, wide = pack(name, 4, 24, 64)
    x, bias, experts = random(20, 64), random(4, 24), torch.randint(0, 3, (20, 1), device=DEVICE)
    rows = sort_rows_by_group(experts, 4)
    out = grouped_weight_only_linear(x, packed, rows, bias)
    wanted = torch.stack(
        [F.linear(r.double(), wide[e], bias[e].double()) for r, e in zip(x, rows.group_R, strict=True)]
    )
    assert apart(out, wanted) < 1e-3


@pytest.mark.parametrize("name", ["int4_g32_asym", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_token_gets_the_weighted_sum_of_its_experts(name, tokens, interleaved):
    (first, wide_first), (down, wide_down) = pack(name, 3, 64, 32), pack(name, 3, 32, 32)
    biases = (random(3, 64), random(3, 32))
    x, weights = random(tokens, 32), random(tokens, 2).softmax(-1)
    experts = torch.stack([torch.randperm(3, device=DEVICE)[:2] for _ in range(tokens)])
    out = weight_only_moe(x, weights, experts, first, down, "silu", biases, interleaved=interleaved)
    wanted = torch.zeros(tokens, 32, dtype=torch.float64, device=DEVICE)
    for token in range(tokens):
        for weight, expert in zip(weights[token], experts[token], strict=True):
            both = F.linear(x[token].double(), wide_first[expert], biases[0][expert].double())
            gate, up = (both[::2], both[1::2]) if interleaved else both.chunk(2, -1)
            inner = apply_activation(gate, up, "silu")
            wanted[token] += weight * F.linear(inner, wide_down[expert], biases[1][expert].double())
    assert apart(out, wanted) < 1e-3


@pytest.mark.parametrize("name", ["int4", "int4_asym", "mxfp4", "nvfp4", "int8"])
@pytest.mark.parametrize("rows", [1, 2])
def test_an_input_or_a_weight_that_is_not_finite_is_not_hidden(name, rows):
    x, weight = random(rows, 64), random(8, 64)
    weight[3, 5] = float("nan")
    out = weight_only_linear(x, quantize(weight, get_format(name)), None, numerics=FAST)
    assert not out[:, 3].isfinite().any()
    x[0, 7] = float("nan")
    out = weight_only_linear(x, quantize(random(8, 64), get_format(name)), None, numerics=FAST)
    assert out[0].isnan().all() and out[1:].isfinite().all()
