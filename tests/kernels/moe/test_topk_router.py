"""Routes as device code against a softmax of torch's."""

import pytest
import torch
from tests.kernels.device import CARD, DEVICE, DTYPES, ROUNDING, apart, needs_triton, random

from miles.kernels.moe import topk_router as module
from miles.kernels.moe.topk_router import route_topk


@pytest.fixture
def on_device(monkeypatch, poisoned):
    monkeypatch.setattr(module, "use_triton_inference", lambda x: True)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(3, 4, 2), (2, 7, 1), (4, 9, 3), (3, 8, 8), (5, 60, 6)]
    + ([(8192, 128, 8), (16, 512, 10), (2, 256, 8)] if CARD else []),
)
@pytest.mark.parametrize("normalise", [False, True])
def test_routes_are_the_softmaxs_largest(monkeypatch, poisoned, shape, dtype, normalise):
    tokens, experts, per_token = shape
    logits, how = 2 * random(tokens, experts, dtype=dtype), {"normalise": normalise, "scale": 1.5, "dtype": dtype}
    wanted_weights, wanted = route_topk(logits, per_token, **how)
    monkeypatch.setattr(module, "use_triton_inference", lambda x: True)
    weights, found = route_topk(logits, per_token, **how)
    # Which of several equal logits is taken is free; that they are the largest is not.
    assert torch.equal(logits.gather(1, found), logits.gather(1, wanted)) and weights.dtype == dtype
    assert all(len(set(row)) == per_token for row in found.tolist())
    assert apart(weights, wanted_weights) < ROUNDING[dtype] / 2


@needs_triton
def test_a_token_that_is_not_a_number_still_goes_to_experts_there_are(on_device):
    logits = torch.full((2, 5), float("nan"), device=DEVICE)
    _, found = route_topk(logits, 3, normalise=True, scale=1.0, dtype=torch.float32)
    assert ((found >= 0) & (found < 5)).all()


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 8, 3), (4, 13, 5), (3, 60, 8)])
def test_of_equal_logits_the_first_experts_are_taken(on_device, shape, dtype):
    tokens, experts, per_token = shape
    logits = torch.randint(0, 3, (tokens, experts)).to(DEVICE, dtype)
    logits[0] = 1.0
    weights, found = route_topk(logits, per_token, normalise=False, scale=1.0, dtype=dtype)
    assert torch.equal(found, logits.sort(descending=True, stable=True).indices[:, :per_token])
    wanted = logits.softmax(-1, dtype=torch.float32).gather(1, found)
    assert apart(weights, wanted) < ROUNDING[dtype]


@needs_triton
@pytest.mark.parametrize("normalise", [False, True])
def test_experts_that_may_not_be_chosen_have_no_weight(on_device, normalise):
    none = float("-inf")
    logits = torch.tensor([[none, 2.0, none, 1.0, 0.5], [0.3, none, none, 0.2, none], [none] * 5], device=DEVICE)
    weights, found = route_topk(logits, 3, normalise=normalise, scale=1.0, dtype=torch.float32)
    assert found[:2, :2].tolist() == [[1, 3], [0, 3]] and found[0, 2] == 4 and ((found >= 0) & (found < 5)).all()
    wanted = logits[:2].softmax(-1).sort(descending=True).values[:, :3]
    wanted = wanted / wanted.sum(-1, keepdim=True) if normalise else wanted
    assert apart(weights[:2], wanted) < 1e-6 and weights[1, 2] == 0
    # As of a softmax over nothing.
    assert weights[2].isnan().all()
