"""Gated activations as device code against the same in torch, step by step and in float64."""

import pytest
import torch
from tests.kernels.device import CARD, DEVICE, DTYPES, ROUNDING, apart, needs_triton, random

from miles.kernels.activation_kinds import is_limited, limited_swiglu
from miles.kernels.fused import activation as module
from miles.kernels.fused.activation import apply_activation, gated_activation_inference

LIMITED = [limited_swiglu(2.5), limited_swiglu(2.5, behind=True)]
KINDS = ["silu", "gelu_tanh", "relu2", "swiglu_clamped", *LIMITED]
SHAPES = [(1, 8), (3, 16), (5, 24), (2, 1100)] + ([(256, 3072), (16, 9728), (70000, 768)] if CARD else [])


@pytest.fixture
def on_device(monkeypatch, poisoned):
    monkeypatch.setattr(module, "use_triton_inference", lambda x: True)


def rounded(gate, up, kind):
    """The activation rounded, then times ``up``; in float64, as torch's own tanh gelu has no digits far below zero."""
    if kind == "swiglu_clamped" or is_limited(kind):
        return apply_activation(gate, up, kind)
    return (apply_activation(gate.double(), None, kind).to(gate.dtype).double() * up.double()).to(gate.dtype)


def halves(inner, interleaved):
    return inner.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else inner.chunk(2, -1)


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_activation_is_torchs(on_device, kind, interleaved, dtype, shape):
    rows, size = shape
    inner = 4 * random(rows, 2 * size, dtype=dtype)
    out = gated_activation_inference(inner, kind, interleaved=interleaved)
    assert out.shape == shape and out.dtype == dtype
    # It rounds at each of its few steps, and a single number has no others to make up for that.
    assert apart(out, apply_activation(*halves(inner.double(), interleaved), kind)) < 2 * ROUNDING[dtype]
    # Rounded where torch rounds: all but a few numbers are the same to the last bit.
    same = out == rounded(*halves(inner, interleaved), kind)
    assert dtype == torch.float32 or out.numel() < 100 or same.double().mean() > 0.9


@needs_triton
def test_rows_may_lie_apart(on_device):
    wide = random(4, 3, 40)
    assert torch.equal(
        gated_activation_inference(wide[:, 1, :32], "silu"),
        gated_activation_inference(wide[:, 1, :32].contiguous(), "silu"),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_outside_the_engine_gradients_are_those_of_the_formula(kind):
    gate, up = (3 * random(4, 8).double()).requires_grad_(), (4 * random(4, 8).double()).requires_grad_()
    torch.autograd.gradcheck(lambda g, u: apply_activation(g, u, kind), (gate, up))
    with torch.no_grad():
        joined = torch.cat((gate, up), -1)
        torch.testing.assert_close(
            gated_activation_inference(joined, kind), apply_activation(gate, up, kind), rtol=1e-14, atol=0
        )


@needs_triton
def test_numbers_beyond_every_bound_stay_numbers(on_device):
    edges = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 3e38]], device=DEVICE)
    for kind in ("silu", "gelu_tanh", "swiglu_clamped"):
        out = gated_activation_inference(torch.cat((edges, torch.ones_like(edges)), -1), kind)
        assert apart(out, apply_activation(edges.double(), torch.ones_like(edges).double(), kind)) < 1e-6


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [0, 1])
def test_what_is_not_a_number_stays_seen(on_device, kind, half):
    inner = torch.ones(1, 2, device=DEVICE)
    inner[0, half] = float("nan")
    assert gated_activation_inference(inner, kind).isnan().all()
