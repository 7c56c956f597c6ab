"""The critic's loss by hand, and its gradient against autograd of the formula and finite differences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.algo.loss_aggregation import WeightedAggregator
from miles.algo.policy_loss import ValueLoss

R = torch.float64


def layout(weights):
    n = len(weights)
    return WeightedAggregator(weight_R=weights, sample_R=torch.zeros(n, dtype=torch.int64), trained_S=torch.tensor([n]))


def test_the_larger_of_the_free_and_the_held_error_counts():
    value = torch.tensor([0.1, 0.9, 0.9, -0.9], dtype=R, requires_grad=True)
    old, came = torch.zeros(4, dtype=R), torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=R)
    terms = ValueLoss(clip=0.2)(value, old, came, layout(torch.ones(4, dtype=R)))
    # within the clip; held at 0.2 on its way to 1; past it the wrong way, free; past it the wrong way, free
    expected = [0.81, 0.64, 0.81, 3.61]
    assert terms.loss.item() == pytest.approx(sum(expected))
    assert terms.metrics["value_loss"].item() == pytest.approx(sum(expected))
    assert terms.metrics["value_clipfrac"].item() == 3
    terms.loss.backward()
    assert value.grad is not None and value.grad.tolist() == pytest.approx([-1.8, 0.0, 1.8, -3.8])


@given(st.integers(0, 2**31), st.sampled_from([0.1, 0.5, 5.0]))
@settings(max_examples=examples(20), deadline=None)
def test_the_gradient_is_that_of_finite_differences_and_of_the_formula(seed, clip):
    torch.manual_seed(seed)
    value, old, came, weight = torch.randn(4, 9, dtype=R)
    value.requires_grad_()
    place = layout(weight.abs())
    assert torch.autograd.gradcheck(lambda v: ValueLoss(clip=clip)(v, old, came, place).loss, value)
    free, held = (value - came) ** 2, (old + (value - old).clamp(-clip, clip) - came) ** 2
    (expected,) = torch.autograd.grad((weight.abs() * torch.where(free >= held, free, held)).sum(), value)
    (found,) = torch.autograd.grad(ValueLoss(clip=clip)(value, old, came, place).loss, value)
    assert torch.allclose(found, expected, atol=1e-12)
