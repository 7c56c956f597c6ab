"""Hand numbers, exact expectations by enumeration, and what no correction may break."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.algo.config import AlgoConfig
from miles.algo.correction_schedule import RatioBounds
from miles.algo.importance_sampling import (
    LEVELS,
    WEIGHT_BOUNDINGS,
    ImportanceSampling,
    ImportanceWeighting,
    RejectionSampling,
    build_correction,
    finalize_metrics,
    token_level,
)
from miles.algo.loss_aggregation import WeightedAggregator
from miles.algo.policy_loss import ClipRange, LossInputs, PolicyLoss, k3

R = torch.float64
ANY = RatioBounds(low=0, high=1e6)
ln = math.log

# A config for each kind of correction, and several at once.
CONFIGS: list[dict[str, Any]] = [
    {"use_tis": True},
    {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.5},
    {"use_tis": True, "tis_level": "sequence", "tis_batch_normalize": True},
    {"use_tis": True, "tis_level": "geometric", "tis_mode": "mask", "tis_clip_low": 0.5},
    {"use_tis": True, "tis_mode": "icepop", "tis_batch_normalize": True},
    {"use_rs": True},
    {"use_rs": True, "rs_level": "sequence", "tis_batch_normalize": True},
    {"rs_veto_threshold": 0.1},
    {"use_tis": True, "use_rs": True, "rs_level": "geometric", "rs_veto_threshold": 1e-2, "tis_batch_normalize": True},
]
SAMPLES = st.lists(st.lists(st.floats(-6, 6), min_size=1, max_size=5), min_size=1, max_size=6)


def layout(lengths, weight=None):
    trained = torch.tensor(lengths)
    sample = torch.repeat_interleave(torch.arange(len(lengths)), trained)
    weight_R = torch.full((int(trained.sum()),), 0.25, dtype=R) if weight is None else weight
    return WeightedAggregator(weight_R=weight_R, sample_R=sample, trained_S=trained)


def evidence(old, engine, where, *, logp=None, advantage=None):
    return LossInputs(
        logp_R=old if logp is None else logp,
        old_logp_R=old,
        engine_logp_R=engine,
        advantage_R=torch.ones_like(old) if advantage is None else advantage,
        entropy_R=torch.zeros_like(old),
        sample_R=where.sample_R,
        samples=len(where.trained_S),
    )


def weighed(samples, correction, *, weight=None):
    """Weights and metrics of samples of log-ratios (trainer - engine), normalised over all of them."""
    ratio = torch.tensor([x for s in samples for x in s], dtype=R)
    where = layout([len(s) for s in samples], weight)
    engine = torch.full_like(ratio, -2.0)
    if correction.normalize and correction.mean is None:
        correction = correction.with_batch_mean(correction.partial_sums(engine, engine + ratio, where))
    found = correction(evidence(engine + ratio, engine, where), where)
    return found.weight_R.tolist(), {name: float(value) for name, value in found.metrics.items()}


def weighing(mode="truncate", level="token", low=0.0, high=2.0):
    return ImportanceSampling(
        weighting=ImportanceWeighting(mode=mode, level=LEVELS[level], bounds=RatioBounds(low=low, high=high))
    )


# -- by hand --------------------------------------------------------------------------------


def test_each_level_by_hand():
    samples = [[ln(2), ln(4)], [ln(0.5)]]
    for level, expected in {"token": [2, 4, 0.5], "sequence": [8, 8, 0.5], "geometric": [8**0.5, 8**0.5, 0.5]}.items():
        weights, metrics = weighed(samples, weighing(level=level, high=100.0))
        assert weights == pytest.approx(expected)
        assert metrics["tis"] == metrics["tis_weight"] == pytest.approx(sum(expected) / 4)


def test_a_log_ratio_that_is_no_number_weighs_one():
    for level in LEVELS:
        weights, metrics = weighed([[math.nan, ln(1)], [ln(0.5)]], weighing(level=level))
        assert weights == pytest.approx([1, 1, 0.5]) and math.isfinite(metrics["tis"])


def test_each_mode_by_hand():
    samples = [[ln(0.25), ln(1.5)], [ln(0.6), ln(3)]]
    clipped, metrics = weighed(samples, weighing("truncate", low=0.5, high=2.0))
    assert clipped == pytest.approx([0.5, 1.5, 0.6, 2.0]) and metrics["tis_clipfrac"] == 0.5
    assert weighed(samples, weighing("truncate", high=2.0))[0] == pytest.approx([0.25, 1.5, 0.6, 2.0])
    masked, metrics = weighed(samples, weighing("mask", low=0.4, high=2.0))
    assert masked == pytest.approx([0, 1.5, 0.6, 0]) and metrics["tis_maskfrac"] == 0.5
    assert metrics["tis"] == pytest.approx((0.25 + 1.5 + 0.6 + 3) / 4) and "tis_clipfrac" not in metrics
    iced = build_correction(AlgoConfig(use_tis=True, tis_mode="icepop"))
    assert weighed([[ln(0.4), ln(0.6), ln(4.9), ln(5.1)]], iced)[0] == pytest.approx([0, 0.6, 4.9, 0])


def test_a_sample_is_masked_as_a_whole_where_its_own_ratio_decides():
    # 4 · 0.25 · 1 = 1 is kept, though single tokens are far off; 1.5 · 1.5 = 2.25 is not.
    samples = [[ln(4), ln(0.25), 0.0], [ln(1.5), ln(1.5)]]
    assert weighed(samples, weighing("mask", "sequence"))[0] == pytest.approx([1, 1, 1, 0, 0])
    assert weighed(samples, weighing("mask", "geometric"))[0] == pytest.approx([1, 1, 1, 1.5, 1.5])


def test_rejection_leaves_out_and_does_not_weigh():
    samples = [[ln(0.4), ln(1.9)], [ln(2.1), ln(0.6)]]
    rejecting = ImportanceSampling(rejection=RejectionSampling(level=token_level, bounds=RatioBounds(low=0.5, high=2)))
    weights, metrics = weighed(samples, rejecting)
    assert weights == [0, 1, 0, 1] and metrics["rs_maskfrac"] == 0.5
    assert "tis" not in metrics and metrics["tis_weight"] == 0.5
    whole = ImportanceSampling(
        rejection=RejectionSampling(level=LEVELS["sequence"], bounds=RatioBounds(low=0.5, high=1))
    )
    assert weighed(samples, whole)[0] == [1, 1, 0, 0]


def test_one_impossible_token_vetoes_its_sample():
    samples = [[0.0, ln(0.9e-4)], [0.0, ln(1.1e-4)], [5.0]]
    weights, metrics = weighed(samples, ImportanceSampling(veto=1e-4))
    assert weights == [0, 0, 1, 1, 1] and metrics["rs_vetofrac"] == 0.5
    both = replace(weighing("truncate"), veto=1e-4)
    assert weighed(samples, both)[0] == pytest.approx([0, 0, 1, 1.1e-4, 2])


def test_normalised_weights_have_a_mean_of_one_as_the_loss_takes_it():
    samples = [[ln(0.5), ln(3)], [ln(1.0)]]
    share = torch.tensor([0.25, 0.25, 0.5], dtype=R)
    weights, metrics = weighed(samples, replace(weighing(), normalize=True), weight=share)
    mean = 0.25 * 0.5 + 0.25 * 2 + 0.5
    assert weights == pytest.approx([0.5 / mean, 2 / mean, 1 / mean])
    assert sum(w * s for w, s in zip(weights, share.tolist(), strict=True)) == pytest.approx(1)
    assert metrics["tis_weight"] == pytest.approx(mean)  # what it was divided by


def test_a_batch_that_is_left_out_altogether_weighs_nothing_and_divides_by_nothing():
    for normalize in (False, True):
        gone = replace(ImportanceSampling(veto=0.5), normalize=normalize)
        assert weighed([[-9.0, 0.0], [-9.0]], gone)[0] == [0, 0, 0]


def test_normalising_without_the_batch_mean_is_refused():
    with pytest.raises(AssertionError, match="not known yet"):
        where = layout([1])
        ImportanceSampling(veto=0.1, normalize=True)(evidence(torch.zeros(1), torch.zeros(1), where), where)


def test_wild_log_probs_give_finite_weights():
    samples = [[900.0, 800.0], [-900.0, -800.0]]
    for level, mode in itertools.product(LEVELS, WEIGHT_BOUNDINGS):
        weights, metrics = weighed(samples, weighing(mode, level, high=5.0))
        assert all(math.isfinite(x) for x in (*weights, *metrics.values()))
        assert weights[0] == (5.0 if mode == "truncate" else 0.0) and weights[2] < 1e-8


def test_the_effective_sample_size_is_that_of_the_weights_in_use():
    _, metrics = weighed([[ln(2), ln(8)], [-99.0], [0.0]], weighing("mask", high=4.0, low=0.1))
    done = finalize_metrics(metrics | {"loss": 3.0})
    assert done["tis_ess"] == pytest.approx((2 + 1) ** 2 / (4 * (4 + 1))) and done["loss"] == 3.0
    assert not {"tis_square", "tis_mass"} & done.keys()
    assert finalize_metrics({"loss": 1.0}) == {"loss": 1.0}


# -- the config -----------------------------------------------------------------------------


def test_the_config_says_what_is_done():
    assert build_correction(AlgoConfig()) is None
    assert build_correction(AlgoConfig(use_tis=True, tis_mode="auto")) is None  # until the parity is known
    iced = build_correction(AlgoConfig(use_tis=True, tis_mode="auto", rs_veto_threshold=1e-4), "icepop")
    assert iced.veto == 1e-4 and iced.weighting.mode == "icepop"
    assert iced.weighting.bounds == RatioBounds(low=0.5, high=5)
    plain = build_correction(AlgoConfig(use_tis=True))
    assert plain == weighing() and build_correction(AlgoConfig(use_tis=True), "icepop") == plain
    with pytest.raises(AssertionError):
        build_correction(AlgoConfig(), "truncate")


# -- what no correction may break -----------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, R], ids=str)
def test_where_engine_and_trainer_agree_every_correction_is_the_identity(config, dtype):
    torch.manual_seed(0)
    where = layout([3, 1, 5], torch.rand(9).to(dtype))
    logp = torch.randn(9, dtype=dtype)
    correction = build_correction(AlgoConfig(**config))
    if correction.normalize:
        correction = correction.with_batch_mean(correction.partial_sums(logp, logp, where))
    found = correction(evidence(logp, logp, where), where)
    assert found.weight_R.dtype == dtype and found.weight_R.tolist() == [1.0] * 9
    assert all(float(found.metrics[n]) == 0 for n in found.metrics if n.endswith("frac"))
    assert finalize_metrics({n: float(v) for n, v in found.metrics.items()})["tis_ess"] == pytest.approx(1)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_weight_carries_no_gradient(config):
    torch.manual_seed(0)
    where = layout([3, 1, 5])
    old, engine = (torch.randn(9, dtype=R, requires_grad=True) for _ in range(2))
    correction = build_correction(AlgoConfig(**config))
    if correction.normalize:
        correction = correction.with_batch_mean(correction.partial_sums(engine, old, where))
    found = correction(evidence(old, engine, where), where)
    assert not found.weight_R.requires_grad and not any(v.requires_grad for v in found.metrics.values())


@given(
    SAMPLES,
    st.floats(0, 1),
    st.floats(1, 50),
    st.sampled_from(sorted(LEVELS)),
    st.sampled_from(sorted(WEIGHT_BOUNDINGS)),
)
def test_weights_stay_within_their_bounds_or_are_zero(samples, low, high, level, mode):
    weights, metrics = weighed(samples, weighing(mode, level, low, high))
    assert all((mode != "truncate" and w == 0) or low <= w <= high for w in weights)
    assert 0 <= finalize_metrics(metrics)["tis_ess"] <= 1 + 1e-9


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@given(samples=SAMPLES, data=st.data())
def test_cutting_and_permuting_a_global_batch_changes_nothing(config, samples, data):
    correction = build_correction(AlgoConfig(**config))
    whole, metrics = weighed(samples, correction)
    starts = list(itertools.accumulate((len(s) for s in samples), initial=0))
    order = data.draw(st.permutations(range(len(samples))))
    cut = data.draw(st.integers(0, len(samples)))
    shards = [[samples[i] for i in part] for part in (order[:cut], order[cut:]) if part]
    if correction.normalize:
        correction = correction.with_batch_mean(sum(_parts(correction, shard) for shard in shards))
    found = [weighed(shard, correction) for shard in shards]
    expected = [w for i in order for w in whole[starts[i] : starts[i + 1]]]
    assert [w for weights, _ in found for w in weights] == pytest.approx(expected, rel=1e-9)
    for name, value in metrics.items():
        assert sum(part[name] for _, part in found) == pytest.approx(value, rel=1e-9, abs=1e-12)


def _parts(correction, samples):
    ratio = torch.tensor([x for s in samples for x in s], dtype=R)
    engine = torch.full_like(ratio, -2.0)
    return correction.partial_sums(engine, engine + ratio, layout([len(s) for s in samples]))


def test_weights_multiply_the_surrogate_and_nothing_else():
    torch.manual_seed(3)
    where = layout([2, 3])
    old, engine, advantage, ref = (torch.randn(5, dtype=R) for _ in range(4))
    logp = (old + 0.1 * torch.randn(5, dtype=R)).requires_grad_()
    seen = replace(evidence(old, engine, where, logp=logp, advantage=advantage), ref_logp_R=ref)
    plain = PolicyLoss(clip=ClipRange(low=0.2, high=0.2), kl_estimator=k3, kl_coef=0.3)
    correction = weighing(low=0.5)
    corrected = replace(plain, correction=correction)(seen, where)
    weight = (old - engine).exp().clamp(0.5, 2)
    ratio = (logp - old).exp()
    surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss = (0.25 * weight * surrogate).sum() + 0.3 * (0.25 * k3(logp, ref)).sum()
    assert corrected.loss.item() == pytest.approx(loss.item())
    (found,) = torch.autograd.grad(corrected.loss, logp)
    (expected,) = torch.autograd.grad(loss, logp)
    assert torch.allclose(found, expected)
    assert {"tis", "tis_weight", "tis_clipfrac"} <= corrected.metrics.keys()


# -- what it is for: the gradient of the policy that is trained, from tokens another one drew ---


def gradient(logits, engine, worth, correction):
    """The exact mean, over what the engine draws, of the gradient that the loss gives; horizon 1 or 2, two arms.

    ``logits`` [1, 2] for one draw, or [3, 2]: the first draw, the second after arm 0, the second after arm 1.
    """
    logits = logits.clone().requires_grad_()
    trainer = torch.log_softmax(logits, -1)
    horizon = 1 if len(logits) == 1 else 2
    paths = list(itertools.product(range(2), repeat=horizon))

    def along(table, path):
        return [table[0, path[0]], *(table[1 + path[0], path[1]] for _ in path[1:])]

    logp = torch.stack([x for path in paths for x in along(trainer, path)])
    drawn = torch.stack([x for path in paths for x in along(engine, path)])
    chance = torch.stack([sum(along(engine, path)).exp() for path in paths]).repeat_interleave(horizon)
    advantage = torch.tensor([worth[path] for path in paths], dtype=R).repeat_interleave(horizon)
    where = layout([horizon] * len(paths), chance)
    objective = PolicyLoss(clip=ClipRange(low=0.2, high=0.2), kl_estimator=k3, correction=correction)
    terms = objective(evidence(logp.detach(), drawn, where, logp=logp, advantage=advantage), where)
    (found,) = torch.autograd.grad(terms.loss, logits)
    return found


def biases(logits, engine, worth, corrections):
    truth = gradient(logits, torch.log_softmax(logits, -1), worth, None)
    return [float((gradient(logits, engine, worth, c) - truth).norm()) for c in corrections]


def test_two_arms_drawn_by_another_policy():
    """Trainer (0.8, 0.2), engine (0.5, 0.5), arm 0 worth 1: in closed form.

    The gradient for logit 0 is -p_engine(0) w(0) (1 - 0.8): 0.16 in truth, 0.1 uncorrected, and with the
    weight 1.6 of arm 0 held at 1.2, 0.12.
    """
    logits = torch.tensor([[ln(0.8), ln(0.2)]], dtype=R)
    engine = torch.tensor([[ln(0.5), ln(0.5)]], dtype=R)
    worth = {(0,): 1.0, (1,): 0.0}
    found = [gradient(logits, engine, worth, c)[0].tolist() for c in (None, weighing(high=1.2), weighing(high=2.0))]
    assert [first for first, _ in found] == pytest.approx([-0.1, -0.12, -0.16])
    assert [first + second for first, second in found] == pytest.approx([0, 0, 0])


@given(st.floats(-1.5, 1.5), st.floats(-0.8, 0.8), st.floats(-2, 2), st.floats(-2, 2))
def test_unbounded_weights_take_away_all_bias_and_truncated_ones_some(logit, shift, one, two):
    logits = torch.tensor([[logit, 0.0]], dtype=R)
    engine = torch.log_softmax(logits + torch.tensor([[shift, 0.0]], dtype=R), -1)
    worth = {(0,): one, (1,): 0.0}
    plain, held, free = biases(logits, engine, worth, [None, weighing(high=1.1), weighing(high=1e6)])
    assert free <= 1e-12 and held <= plain + 1e-12
    both = {(0,): one, (1,): two}
    assert biases(logits, engine, both, [weighing(high=1e6)])[0] <= 1e-12


def test_over_two_draws_only_the_whole_samples_weight_is_without_bias():
    torch.manual_seed(0)
    logits = torch.randn(3, 2, dtype=R)
    engine = torch.log_softmax(logits + 0.4 * torch.randn(3, 2, dtype=R), -1)
    worth = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 0.5, (1, 1): -1.0}
    levels = [weighing(level=level, high=1e6) for level in ("token", "sequence", "geometric")]
    plain, by_token, by_sequence, by_mean = biases(logits, engine, worth, [None, *levels])
    assert by_sequence <= 1e-12
    assert by_token < plain and by_mean < plain
