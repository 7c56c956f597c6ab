"""Closed forms and hand numbers; gradients against float64 autograd and finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.algo.loss_aggregation import ConstantLengthReducer, WeightedAggregator, mean_per_token, mean_per_trajectory
from miles.algo.policy_loss import (
    ClipRange,
    LossInputs,
    OffPolicySequenceMask,
    PolicyLoss,
    SFTLoss,
    TokenWeights,
    cispo_loss,
    gspo_ratio,
    k1,
    k2,
    k3,
    low_var_kl,
    ppo_clip_loss,
    token_ratio,
)

R = torch.float64
CLIP = ClipRange(low=0.2, high=0.28)


def evidence(logp, old, advantage, *, entropy=None, ref=None, engine=None, counts=None):
    counts = counts or [len(logp)]
    return LossInputs(
        logp_R=logp,
        old_logp_R=old,
        engine_logp_R=old if engine is None else engine,
        advantage_R=advantage,
        entropy_R=torch.zeros_like(logp) if entropy is None else entropy,
        sample_R=torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
        samples=len(counts),
        ref_logp_R=ref,
    )


def layout(weight, counts=None, mean=None):
    counts = torch.tensor(counts or [len(weight)])
    sample = torch.arange(len(counts)).repeat_interleave(counts)
    return WeightedAggregator(weight_R=weight, sample_R=sample, trained_S=counts, mean_R=mean)


def judged(advantage):
    return evidence(torch.zeros_like(advantage), torch.zeros_like(advantage), advantage)


def policy_loss(**changes):
    return PolicyLoss(**({"clip": CLIP, "kl_estimator": k3} | changes))


def randoms(*sizes, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(n, dtype=R) for n in sizes]


# -- surrogates -----------------------------------------------------------------------------


def test_the_surrogate_by_hand():
    ratio = torch.tensor([1.0, 2.0, 0.5, 2.0, 0.5, 1.25], dtype=R)
    advantage = torch.tensor([2.0, 1.0, 1.0, -1.0, -1.0, 1.0], dtype=R)
    loss, clipped = ppo_clip_loss(ratio, judged(advantage), CLIP)
    # A > 0: capped at 1.28 above, free below. A < 0: free above, floored at 0.8 below.
    assert loss.tolist() == pytest.approx([-2.0, -1.28, -0.5, 2.0, 0.8, -1.25])
    assert clipped.tolist() == [False, True, False, False, True, False]


def test_the_dual_clip_bounds_the_loss_of_bad_tokens_and_stops_their_gradient():
    ratio = torch.tensor([10.0, 10.0, 2.0], dtype=R, requires_grad=True)
    advantage = torch.tensor([-2.0, 2.0, -2.0], dtype=R)
    loss, clipped = ppo_clip_loss(ratio, judged(advantage), ClipRange(low=0.2, high=0.28, dual=3.0))
    assert loss.tolist() == pytest.approx([6.0, -2.56, 4.0])
    assert clipped.tolist() == [True, True, False]
    loss.sum().backward()
    assert ratio.grad is not None and ratio.grad.tolist() == [0.0, 0.0, 2.0]


@given(st.lists(st.tuples(st.floats(0.01, 50), st.floats(-5, 5)), min_size=1, max_size=20))
def test_the_surrogate_is_never_below_the_free_loss_and_bounded_when_dual(pairs):
    ratio, advantage = (torch.tensor(column, dtype=R) for column in zip(*pairs, strict=True))
    free = -ratio * advantage
    plain, _ = ppo_clip_loss(ratio, judged(advantage), CLIP)
    dual, _ = ppo_clip_loss(ratio, judged(advantage), ClipRange(low=0.2, high=0.28, dual=2.0))
    assert (plain >= free).all()
    assert (dual <= 2.0 * advantage.abs() + 1e-12).all() and (dual <= plain).all()


def test_on_policy_the_gradient_is_the_plain_policy_gradient():
    logp = torch.randn(5, dtype=R, requires_grad=True)
    advantage, weight = torch.randn(5, dtype=R), torch.rand(5, dtype=R)
    terms = policy_loss()(evidence(logp, logp.detach(), advantage), layout(weight))
    terms.loss.backward()
    assert logp.grad is not None and torch.allclose(logp.grad, -advantage * weight)
    assert terms.metrics["pg_clipfrac"] == 0 and float(terms.metrics["ratio"]) == pytest.approx(float(weight.sum()))


def test_cispo_weighs_by_the_clipped_ratio_and_keeps_every_gradient():
    logp = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.5], dtype=R)).requires_grad_()
    old = torch.log(torch.tensor([0.2, 0.2, 0.2, 0.1], dtype=R))  # ratios 0.5, 2, 1, 5
    advantage = torch.tensor([1.0, 1.0, -2.0, -1.0], dtype=R)
    terms = policy_loss(surrogate=cispo_loss)(evidence(logp, old, advantage), layout(torch.ones(4, dtype=R)))
    held = torch.tensor([0.8, 1.28, 1.0, 1.28], dtype=R)
    assert terms.loss.item() == pytest.approx(-(held * advantage * logp).sum().item())
    terms.loss.backward()
    assert logp.grad is not None and torch.allclose(logp.grad, -held * advantage)
    assert terms.metrics["pg_clipfrac"] == 3 and terms.metrics["ratio"] == pytest.approx(8.5)


# -- ratios ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_gspo_is_the_formula_of_its_paper_and_so_is_its_gradient(spread):
    counts, worth = [3, 1, 5, 2], torch.tensor([1.0, -0.5, -2.0, 0.7], dtype=R)
    (noise, old) = randoms(11, 11)
    logp = (old + spread * noise).requires_grad_()
    advantage = worth.repeat_interleave(torch.tensor(counts))
    weight = torch.from_numpy(mean_per_trajectory(counts)).repeat_interleave(torch.tensor(counts))
    terms = policy_loss(ratio=gspo_ratio)(evidence(logp, old, advantage, counts=counts), layout(weight, counts))
    # J = 1/G sum_i min(s_i A_i, clip(s_i) A_i), s_i = (pi(y_i) / pi_old(y_i))^(1/|y_i|)
    parts = []
    for now, before, a in zip(logp.split(counts), old.split(counts), worth, strict=True):
        s = (now.sum() - before.sum()).div(len(now)).exp()
        parts.append(torch.minimum(s * a, s.clamp(0.8, 1.28) * a))
    loss = -torch.stack(parts).mean()
    assert terms.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    (found,), (expected,) = torch.autograd.grad(terms.loss, logp), torch.autograd.grad(loss, logp)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
    assert spread < 1 or (expected == 0).any(), "no sample was clipped"


def test_a_sequence_ratio_gives_each_token_its_own_gradient():
    # GSPO-token: sg[s] * pi / sg[pi], for advantages that differ within a sample.
    counts, (logp, old, advantage) = [2, 3], randoms(5, 5, 5)
    logp = (old + 0.01 * logp).requires_grad_()
    ratio = gspo_ratio(logp - old, layout(torch.ones(5, dtype=R), counts))
    (ratio * advantage).sum().backward()
    means = torch.cat([(logp - old)[:2].mean().exp().expand(2), (logp - old)[2:].mean().exp().expand(3)])
    assert torch.allclose(ratio, means)
    assert logp.grad is not None and torch.allclose(logp.grad, advantage * means)


@pytest.mark.parametrize("ratio", [token_ratio, gspo_ratio])
def test_a_ratio_that_would_overflow_leaves_no_nan_behind(ratio):
    logp = torch.tensor([0.0, -300.0], requires_grad=True)
    old = torch.tensor([-300.0, 0.0])
    judge = policy_loss(ratio=ratio)
    judge(evidence(logp, old, torch.tensor([1.0, 1.0]), counts=[1, 1]), layout(torch.ones(2), [1, 1])).loss.backward()
    assert logp.grad is not None and logp.grad.isfinite().all()


# -- divergences ----------------------------------------------------------------------------


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


@pytest.mark.parametrize("estimator", [k1, k3])
def test_weighed_by_the_ratio_a_divergence_has_no_bias_on_what_older_weights_wrote(estimator):
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=R, requires_grad=True)
    old, ref = (torch.log_softmax(torch.randn(6, dtype=R), -1) for _ in range(2))
    logp = torch.log_softmax(logits, -1)
    # Every token of the vocabulary once, weighed by how often the old policy draws it: an exact mean.
    seen = evidence(logp, old, torch.zeros(6, dtype=R), ref=ref)
    judge = policy_loss(kl_estimator=estimator, kl_coef=1.0, unbiased_kl=True)
    terms = judge(seen, layout(old.exp()))
    true = (logp.exp() * (logp - ref)).sum()
    assert terms.loss.item() == pytest.approx(true.item()) == terms.metrics["kl"].item()
    (found,) = torch.autograd.grad(terms.loss, logits, retain_graph=True)
    (slope,) = torch.autograd.grad(true, logits, retain_graph=True)
    assert torch.allclose(found, slope)
    plain = policy_loss(kl_estimator=estimator, kl_coef=1.0)(seen, layout(old.exp()))
    assert plain.loss.item() != pytest.approx(true.item(), rel=1e-3)


# -- the whole loss -------------------------------------------------------------------------


def test_the_whole_policy_loss_is_the_sum_of_its_terms():
    torch.manual_seed(1)
    logp, entropy = (torch.randn(6, dtype=R, requires_grad=True) for _ in range(2))
    old, ref, advantage = torch.randn(6, dtype=R), torch.randn(6, dtype=R), torch.randn(6, dtype=R)
    weight = torch.rand(6, dtype=R)
    objective = policy_loss(kl_coef=0.1, entropy_coef=0.01)
    terms = objective(evidence(logp, old, advantage, entropy=entropy, ref=ref), layout(weight))
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
        layout(torch.ones(3, dtype=R)),
    )
    terms.loss.backward()
    assert terms.metrics["kl"] > 0 and entropy.grad is None
    assert logp.grad is not None and (logp.grad == 0).all()


def test_the_supervised_loss_is_the_negative_log_likelihood():
    logp = torch.tensor([-1.0, -3.0], dtype=R, requires_grad=True)
    half = layout(torch.full((2,), 0.5, dtype=R))
    terms = SFTLoss()(evidence(logp, logp.detach(), torch.ones(2, dtype=R)), half)
    assert terms.loss.item() == 2.0
    terms.loss.backward()
    assert logp.grad is not None and logp.grad.tolist() == [-0.5, -0.5]


# -- masks and corrections ------------------------------------------------------------------


def test_opsm_leaves_out_bad_samples_that_the_policy_has_left_behind():
    counts = [2, 2, 2, 1]
    engine = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0], dtype=R)
    #                     moved away, bad | moved away, good | bad, came nearer | bad, just within
    logp = torch.tensor([-1.0, -1.4, -1.0, -1.4, -1.2, -0.4, -1.1], dtype=R, requires_grad=True)
    advantage = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=R)
    found = OffPolicySequenceMask(delta=0.15)(
        evidence(logp, logp.detach(), advantage, engine=engine, counts=counts), layout(torch.ones(7, dtype=R), counts)
    )
    assert found.weight_R.tolist() == [0, 0, 1, 1, 1, 1, 1] and not found.weight_R.requires_grad
    assert found.metrics["opsm_clipfrac"] == 2
    # The old log-probs of the ratio may be the trainer's own: the drift is from the engine that wrote the tokens.
    terms = policy_loss(mask=OffPolicySequenceMask(delta=0.15))(
        evidence(logp, logp.detach(), advantage, engine=engine, counts=counts), layout(torch.ones(7, dtype=R), counts)
    )
    terms.loss.backward()
    assert logp.grad is not None and torch.allclose(logp.grad, -advantage * found.weight_R)


def test_a_correction_and_a_mask_weigh_the_surrogate_and_nothing_else():
    logp, old, advantage, ref, weight = randoms(4, 4, 4, 4, 4)
    logp.requires_grad_()
    half = torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=R)
    other = torch.tensor([1.0, 1.0, 0.0, 3.0], dtype=R)

    def by(weight):
        return lambda evidence, layout: TokenWeights(weight_R=weight, metrics={"seen": layout.mean(weight)})

    seen, means = evidence(logp, old, advantage, ref=ref), layout(weight)
    plain = policy_loss(kl_coef=0.1)(seen, means)
    terms = policy_loss(kl_coef=0.1, correction=by(half), mask=by(other))(seen, means)
    surrogate, _ = ppo_clip_loss((logp - old).exp(), seen, CLIP)
    assert terms.metrics["pg_loss"].item() == pytest.approx((surrogate * half * other * weight).sum().item())
    assert terms.metrics["kl"] == plain.metrics["kl"] and terms.metrics["ratio"] == plain.metrics["ratio"]
    assert terms.metrics["seen"].item() == pytest.approx((other * weight).sum().item())


# -- reduction ------------------------------------------------------------------------------


def test_reducers_by_hand():
    assert mean_per_trajectory([2, 4, 0]).tolist() == pytest.approx([1 / 6, 1 / 12, 0.0])
    assert mean_per_token([2, 4, 0]).tolist() == pytest.approx([1 / 6] * 3)
    assert ConstantLengthReducer(length=5)([2, 4, 0]).tolist() == pytest.approx([1 / 15] * 3)
    assert (
        mean_per_token([0, 0]).sum() < math.inf
        and mean_per_trajectory([]).tolist() == ConstantLengthReducer(length=3)([]).tolist() == []
    )


def test_metrics_are_means_whatever_the_loss_is_divided_by():
    logp, advantage = randoms(4, 4)
    weight, mean = torch.full((4,), 0.01, dtype=R), torch.full((4,), 0.25, dtype=R)
    entropy = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=R)
    judge = policy_loss(entropy_coef=0.5, kl_coef=2.0)
    seen = evidence(logp, logp, advantage, entropy=entropy, ref=logp - 1)
    terms = judge(seen, layout(weight, mean=mean))
    assert terms.metrics["entropy"] == 2.5 and terms.metrics["ratio"] == 1
    assert terms.metrics["kl"].item() == pytest.approx(math.exp(-1))
    expected = -0.01 * advantage.sum() - 0.5 * 0.01 * 10 + 2.0 * 0.01 * 4 * math.exp(-1)
    assert terms.loss.item() == pytest.approx(expected.item())


@given(st.lists(st.integers(1, 7), min_size=1, max_size=9), st.integers(0, 99))
def test_sums_and_means_of_samples_are_given_back_to_their_tokens(counts, seed):
    (x,) = randoms(sum(counts), seed=seed)
    means = layout(torch.ones_like(x), counts)
    parts = x.split(counts)
    assert torch.allclose(means.sum_of_sample(x), torch.cat([p.sum().expand(len(p)) for p in parts]))
    assert torch.allclose(means.mean_of_sample(x), torch.cat([p.mean().expand(len(p)) for p in parts]))
    assert torch.allclose(means.mean_of_sample(x.float()).double(), means.mean_of_sample(x), atol=1e-6)


@pytest.mark.parametrize("name", ["sum_of_sample", "mean_of_sample"])
def test_sums_of_samples_differentiate_as_finite_differences_do(name):
    (x,) = randoms(6)
    spread = getattr(layout(torch.ones(6, dtype=R), [1, 3, 2]), name)
    assert torch.autograd.gradcheck(lambda x: spread(x.square()).sin(), x.requires_grad_())


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(any))
def test_the_weights_of_a_batch_without_empty_trajectories_add_up_to_one(counts):
    total = sum(n * w for n, w in zip(counts, mean_per_token(counts).tolist(), strict=True))
    assert total == pytest.approx(1.0)
    filled = [max(n, 1) for n in counts]
    assert sum(n * w for n, w in zip(filled, mean_per_trajectory(filled).tolist(), strict=True)) == pytest.approx(1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")
def test_an_accelerator_sums_samples_as_the_cpu_does_and_the_same_each_time():
    counts = [1, 4096, 7, 300, 20000]
    (x, slope) = randoms(sum(counts), sum(counts))

    def found(device, dtype):
        each = WeightedAggregator(
            weight_R=torch.ones(len(x), device=device, dtype=dtype),
            sample_R=torch.arange(len(counts), device=device).repeat_interleave(torch.tensor(counts, device=device)),
            trained_S=torch.tensor(counts, device=device),
        )
        leaf = x.to(device, dtype).requires_grad_()
        ratio = gspo_ratio(leaf, each) + each.mean_of_sample(leaf)
        (grad,) = torch.autograd.grad((ratio * slope.to(device, dtype)).sum(), leaf)
        return ratio.detach().cpu().double(), grad.cpu().double()

    expected = found("cpu", R)
    again = [found("cuda", torch.float32) for _ in range(3)]
    assert all(torch.equal(a, b) for run in again[1:] for a, b in zip(run, again[0], strict=True))
    for mine, theirs in zip(again[0], expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_the_unbiased_low_variance_kl_is_bounded_with_its_ratio():
    ref = torch.tensor([-1.0, -1.0, -1.0, -9.0], dtype=R)
    logp = torch.tensor([-6.0, -6.0, -1.5, -1.0], dtype=R, requires_grad=True)
    old = torch.tensor([-9.0, -2.0, -1.0, -7.0], dtype=R)
    log_ratio = ref - logp.detach()
    product = (log_ratio.exp() - log_ratio - 1) * (logp.detach() - old).exp()
    assert product.max() > 2000 and product[1] < 10
    seen = evidence(logp, old, torch.zeros(4, dtype=R), ref=ref)
    terms = policy_loss(kl_estimator=low_var_kl, kl_coef=1.0, unbiased_kl=True)(seen, layout(torch.ones(4, dtype=R)))
    assert terms.loss.item() == pytest.approx(product.clamp(-10, 10).sum().item())
    (gradient,) = torch.autograd.grad(terms.loss, logp)
    assert gradient[0] == 0 and gradient[1] != 0


@pytest.mark.parametrize("estimator", [k1, k2, k3, low_var_kl])
@pytest.mark.parametrize("unbiased", [False, True])
def test_a_log_ratio_that_is_no_number_has_ratio_one_and_no_kl(estimator, unbiased):
    infinite = -math.inf
    logp = torch.tensor([infinite, -1.0, math.nan], dtype=R, requires_grad=True)
    old = torch.tensor([infinite, -1.0, -1.0], dtype=R)
    seen = evidence(logp, old, torch.tensor([2.0, 3.0, 4.0], dtype=R), ref=old)
    judge = policy_loss(kl_estimator=estimator, kl_coef=1.0, unbiased_kl=unbiased)
    terms = judge(seen, layout(torch.ones(3, dtype=R)))
    assert terms.metrics["ratio"] == 3 and terms.metrics["kl"] == 0 and terms.loss.item() == -9.0
    (gradient,) = torch.autograd.grad(terms.loss, logp)
    assert gradient.tolist() == [0.0, -2.0 if estimator is k1 else -3.0, 0.0]
    assert torch.equal(gspo_ratio(torch.zeros(3), layout(torch.ones(3))), torch.ones(3))
