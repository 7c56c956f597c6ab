"""Closed forms and hand numbers; gradients against float64 autograd and finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.algo.config import AlgoConfig
from miles.algo.kl import k1, k2, k3, low_var_kl
from miles.algo.objective import Clip, Evidence, PolicyLoss, SupervisedLoss, clipped_surrogate
from miles.algo.ratio import token_ratio
from miles.algo.reduce import Weighted, per_token, per_trajectory
from miles.algo.table import objective_of, reducer_of, rows
from miles.core.errors import UsageError

R = torch.float64
CLIP = Clip(low=0.2, high=0.28)


def evidence(logp, old, advantage, *, entropy=None, ref=None):
    return Evidence(
        logp_R=logp,
        old_logp_R=old,
        advantage_R=advantage,
        entropy_R=torch.zeros_like(logp) if entropy is None else entropy,
        ref_logp_R=ref,
    )


def policy_loss(**changes):
    return PolicyLoss(**({"ratio": token_ratio, "clip": CLIP, "divergence": k3} | changes))


def test_the_surrogate_by_hand():
    ratio = torch.tensor([1.0, 2.0, 0.5, 2.0, 0.5, 1.25], dtype=R)
    advantage = torch.tensor([2.0, 1.0, 1.0, -1.0, -1.0, 1.0], dtype=R)
    loss, clipped = clipped_surrogate(ratio, advantage, CLIP)
    # A > 0: capped at 1.28 above, free below. A < 0: free above, floored at 0.8 below.
    assert loss.tolist() == pytest.approx([-2.0, -1.28, -0.5, 2.0, 0.8, -1.25])
    assert clipped.tolist() == [False, True, False, False, True, False]


def test_the_dual_clip_bounds_the_loss_of_bad_tokens_and_stops_their_gradient():
    ratio = torch.tensor([10.0, 10.0, 2.0], dtype=R, requires_grad=True)
    advantage = torch.tensor([-2.0, 2.0, -2.0], dtype=R)
    loss, clipped = clipped_surrogate(ratio, advantage, Clip(low=0.2, high=0.28, dual=3.0))
    assert loss.tolist() == pytest.approx([6.0, -2.56, 4.0])
    assert clipped.tolist() == [True, True, False]
    loss.sum().backward()
    assert ratio.grad is not None and ratio.grad.tolist() == [0.0, 0.0, 2.0]


@given(st.lists(st.tuples(st.floats(0.01, 50), st.floats(-5, 5)), min_size=1, max_size=20))
def test_the_surrogate_is_never_below_the_free_loss_and_bounded_when_dual(pairs):
    ratio, advantage = (torch.tensor(column, dtype=R) for column in zip(*pairs, strict=True))
    free = -ratio * advantage
    plain, _ = clipped_surrogate(ratio, advantage, CLIP)
    dual, _ = clipped_surrogate(ratio, advantage, Clip(low=0.2, high=0.28, dual=2.0))
    assert (plain >= free).all()
    assert (dual <= 2.0 * advantage.abs() + 1e-12).all() and (dual <= plain).all()


def test_on_policy_the_gradient_is_the_plain_policy_gradient():
    logp = torch.randn(5, dtype=R, requires_grad=True)
    advantage, weight = torch.randn(5, dtype=R), torch.rand(5, dtype=R)
    terms = policy_loss()(evidence(logp, logp.detach(), advantage), Weighted(weight_R=weight))
    terms.loss.backward()
    assert logp.grad is not None and torch.allclose(logp.grad, -advantage * weight)
    assert terms.metrics["pg_clipfrac"] == 0 and float(terms.metrics["ratio"]) == pytest.approx(float(weight.sum()))


@pytest.mark.parametrize("estimator", [k1, k2, k3, low_var_kl])
def test_divergences_by_hand(estimator):
    x = torch.tensor([0.0, 0.5, -0.5, 3.0], dtype=R)  # logp - ref
    expected = {
        k1: x,
        k2: x * x / 2,
        k3: torch.expm1(-x) + x,
        low_var_kl: torch.expm1(-x) + x,
    }[estimator]
    assert torch.allclose(estimator(x - 1.0, torch.full_like(x, -1.0)), expected)


def test_the_low_variance_divergence_is_held_at_ten_with_a_finite_gradient():
    logp = torch.tensor([-200.0, -0.1, -5.0], requires_grad=True)
    ref = torch.tensor([-0.1, -200.0, -1.0])
    value = low_var_kl(logp, ref)
    assert value.tolist() == [10.0, 10.0, 10.0]
    value.sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == [0.0, 0.0, 0.0]
    assert k3(logp.detach(), ref)[1] > 100


def test_k1_and_k3_estimate_the_divergence_without_bias_and_k2_has_its_gradient():
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=R, requires_grad=True)
    ref = torch.log_softmax(torch.randn(6, dtype=R), -1)
    logp = torch.log_softmax(logits, -1)
    p = logp.exp()
    true = (p * (logp - ref)).sum()
    for estimator in (k1, k3):
        assert (p * estimator(logp, ref)).sum().item() == pytest.approx(true.item())
    (slope,) = torch.autograd.grad(true, logits, retain_graph=True)
    (found,) = torch.autograd.grad((p.detach() * k2(logp, ref)).sum(), logits)
    assert torch.allclose(found, slope)


def test_a_ratio_that_would_overflow_leaves_no_nan_behind():
    logp = torch.tensor([0.0, -300.0], requires_grad=True)
    old = torch.tensor([-300.0, 0.0])
    policy_loss()(evidence(logp, old, torch.tensor([1.0, 1.0])), Weighted(weight_R=torch.ones(2))).loss.backward()
    assert logp.grad is not None and logp.grad.isfinite().all()


def test_the_whole_policy_loss_is_the_sum_of_its_terms():
    torch.manual_seed(1)
    logp, entropy = (torch.randn(6, dtype=R, requires_grad=True) for _ in range(2))
    old, ref, advantage = torch.randn(6, dtype=R), torch.randn(6, dtype=R), torch.randn(6, dtype=R)
    weight = torch.rand(6, dtype=R)
    objective = policy_loss(kl_coef=0.1, entropy_coef=0.01)
    terms = objective(evidence(logp, old, advantage, entropy=entropy, ref=ref), Weighted(weight_R=weight))
    ratio = (logp - old).exp()
    surrogate = -(torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) * weight).sum()
    kl = (((ref - logp).exp() - (ref - logp) - 1) * weight).sum()
    loss = surrogate + 0.1 * kl - 0.01 * (entropy * weight).sum()
    assert terms.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    for name, value in (("pg_loss", surrogate), ("kl", kl), ("entropy", (entropy * weight).sum()), ("loss", loss)):
        assert terms.metrics[name].item() == pytest.approx(value.item(), rel=1e-12)
    inputs = (logp, entropy)
    for mine, theirs in zip(torch.autograd.grad(terms.loss, inputs), torch.autograd.grad(loss, inputs), strict=True):
        assert torch.allclose(mine, theirs)


def test_unweighted_kl_and_entropy_are_measured_but_give_no_gradient():
    logp, entropy = (torch.randn(3, dtype=R, requires_grad=True) for _ in range(2))
    terms = policy_loss()(
        evidence(logp, logp.detach(), torch.zeros(3, dtype=R), entropy=entropy, ref=torch.randn(3, dtype=R)),
        Weighted(weight_R=torch.ones(3, dtype=R)),
    )
    terms.loss.backward()
    assert terms.metrics["kl"] > 0 and entropy.grad is None
    assert logp.grad is not None and (logp.grad == 0).all()


def test_the_supervised_loss_is_the_negative_log_likelihood():
    logp = torch.tensor([-1.0, -3.0], dtype=R, requires_grad=True)
    layout = Weighted(weight_R=torch.full((2,), 0.5, dtype=R))
    terms = SupervisedLoss()(evidence(logp, logp.detach(), torch.ones(2, dtype=R)), layout)
    assert terms.loss.item() == 2.0
    terms.loss.backward()
    assert logp.grad is not None and logp.grad.tolist() == [-0.5, -0.5]


def test_reducers_by_hand():
    assert per_trajectory([2, 4, 0]).tolist() == pytest.approx([1 / 6, 1 / 12, 0.0])
    assert per_token([2, 4, 0]).tolist() == pytest.approx([1 / 6] * 3)
    assert per_token([0, 0]).sum() < math.inf and per_trajectory([]).tolist() == []


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(any))
def test_the_weights_of_a_batch_without_empty_trajectories_add_up_to_one(counts):
    total = sum(n * w for n, w in zip(counts, per_token(counts).tolist(), strict=True))
    assert total == pytest.approx(1.0)
    filled = [max(n, 1) for n in counts]
    assert sum(n * w for n, w in zip(filled, per_trajectory(filled).tolist(), strict=True)) == pytest.approx(1.0)


def test_the_table_follows_the_knobs_and_every_row_is_documented():
    found = objective_of(AlgoConfig(eps_clip=0.1, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2"))
    assert isinstance(found, PolicyLoss)
    assert found.clip == Clip(low=0.1, high=0.1) and found.divergence is k2 and found.kl_coef == 0.5
    unused = objective_of(AlgoConfig(kl_loss_coef=0.5))
    assert isinstance(unused, PolicyLoss) and unused.kl_coef == 0.0
    assert isinstance(objective_of(AlgoConfig(loss_type="sft_loss")), SupervisedLoss)
    assert reducer_of(AlgoConfig(calculate_per_token_loss=True)) is per_token
    assert all(len(docs) > 40 for _, _, docs in rows())


def test_a_dual_clip_that_would_bite_at_once_is_refused():
    with pytest.raises(UsageError, match="--eps-clip-c"):
        objective_of(AlgoConfig(eps_clip_c=1.0))
