"""Keys and values in FP8: each vector by itself, to the nearest number that its power of two permits."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.tiers import examples

from miles.precision.kv_cache import dequantize_kv, quantize_kv, round_kv

# Every finite E4M3 number, written out from the definition of the format.
GRID = np.array(
    sorted(
        {s * m * 2.0**-9 for s in (-1, 1) for m in range(8)}
        | {s * (8 + m) * 2.0 ** (e - 10) for s in (-1, 1) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
    )
)
vectors = arrays(np.float32, (3, 8), elements=st.floats(-1e4, 1e4, width=32))


@given(vectors)
@settings(max_examples=examples(60), deadline=None)
def test_a_scale_is_the_least_power_of_two_that_fits_and_every_number_is_the_nearest(x):
    data, scale = (each.double().numpy() for each in quantize_kv(torch.from_numpy(x)))
    assert (np.log2(scale) % 1 == 0).all()
    most = np.abs(x).max(-1).astype(np.float64)
    assert (most <= 448 * scale).all() and ((most > 224 * scale) | (scale == 2.0**-64)).all()
    wanted = x.astype(np.float64) / scale[:, None]
    error = np.abs(wanted[..., None] - GRID)
    assert (np.abs(wanted - data) == error.min(-1)).all()


@given(vectors)
@settings(max_examples=examples(60), deadline=None)
def test_rounding_twice_is_rounding_once_and_bfloat16_holds_it(x):
    once = round_kv(torch.from_numpy(x))
    assert torch.equal(round_kv(once), once) and torch.equal(once.bfloat16().float(), once)
    assert torch.equal(round_kv(once.bfloat16()), once.bfloat16())


@given(vectors)
@settings(max_examples=examples(30), deadline=None)
def test_a_vector_is_rounded_alike_among_others_and_alone(x):
    whole = round_kv(torch.from_numpy(x))
    assert all(torch.equal(round_kv(torch.from_numpy(x[i : i + 1]))[0], whole[i]) for i in range(len(x)))


def test_the_error_is_that_of_three_bits_of_mantissa():
    torch.manual_seed(0)
    x = torch.randn(2000, 2, 128)
    rounded = dequantize_kv(*quantize_kv(x), torch.float32)
    assert ((rounded - x).abs() <= x.abs() / 16 + 2.0**-9 * 2.0**-6).all()
    plain = x.abs().amax(-1, keepdim=True) / 448
    reference = (x / plain).to(torch.float8_e4m3fn).float() * plain
    assert (rounded - x).norm() < 1.05 * (reference - x).norm()  # a scale that is no power of two gains little


def test_the_gradient_passes():
    x = torch.randn(4, 2, 8, requires_grad=True)
    weight = torch.randn(4, 2, 8)
    (round_kv(x) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_zeros_stay_zeros():
    data, scale = quantize_kv(torch.zeros(2, 3, 8))
    assert not data.float().any() and scale.isfinite().all()
