"""Normalisation as device code against what torch does with the same numbers."""

import pytest
import torch
from tests.kernels.device import DEVICE, DTYPES, ROUNDING, apart, needs_triton, random

from miles.kernels.fused import rms_norm as norm
from miles.kernels.fused.rms_norm import add_rms_norm, rms_norm
from miles.kernels.numerics import FAST

SHAPES = [(1, 8), (3, 24), (7, 128), (5, 1024), (2, 2560)] + (
    [(256, 5120), (8192, 2048)] if DEVICE.type == "cuda" else []
)


def plain(x, weight, eps, offset):
    """The definition, in float64."""
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.double() + offset)


@pytest.fixture
def on_device(monkeypatch, poisoned):
    monkeypatch.setattr(norm, "use_triton_inference", lambda x: True)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_is_torchs(on_device, shape, dtype, offset):
    x, weight = 3 * random(*shape, dtype=dtype), random(shape[1], dtype=dtype)
    out = rms_norm(x, weight, 1e-6, offset=offset, numerics=FAST)
    assert out.dtype == dtype and out.shape == x.shape
    assert apart(out, plain(x, weight, 1e-6, offset)) < ROUNDING[dtype] / 2


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_sum_is_rounded_before_it_is_normalised(on_device, shape, dtype, offset):
    x, delta, weight = random(*shape, dtype=dtype), random(*shape, dtype=dtype), random(shape[1], dtype=dtype)
    total, out = add_rms_norm(x, delta, weight, 1e-5, offset=offset, numerics=FAST)
    assert torch.equal(total, x + delta)
    assert apart(out, plain(total, weight, 1e-5, offset)) < ROUNDING[dtype] / 2


@needs_triton
def test_rows_may_lie_apart_and_have_more_dimensions(on_device):
    wide, weight = random(6, 3, 48), random(16)
    part = wide[:, 1:, 16:32]
    assert apart(rms_norm(part, weight, 1e-6, numerics=FAST), plain(part, weight, 1e-6, 0.0)) < 1e-5
    flat = wide[:, 0, 16:32]
    total, out = add_rms_norm(flat, wide[:, 1, :16], weight, 1e-6, numerics=FAST)
    assert torch.equal(total, flat + wide[:, 1, :16]) and apart(out, plain(total, weight, 1e-6, 0.0)) < 1e-5


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_outside_the_engine_it_is_torchs_own_with_gradients(offset):
    x, weight = random(4, 16).requires_grad_(), random(16).requires_grad_()
    total, out = add_rms_norm(x, x * 2, weight, 1e-6, offset=offset, numerics=FAST)
    assert torch.equal(out, rms_norm(x + x * 2, weight, 1e-6, offset=offset, numerics=FAST)) and total.requires_grad
    out.square().sum().backward()
    assert x.grad is not None and weight.grad is not None and apart(out, plain(total, weight, 1e-6, offset)) < 1e-5
