"""Importance-sampling correction in the trainer: which one a batch gets, its effect on the weights, when it stops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.train.small_trainer import distance, model, ragged, step, weights, worker

from miles.algo.loss_aggregation import mean_per_trajectory
from miles.algo.policy_loss import TokenWeights
from miles.algo.registry import AlgoHooks
from miles.core.errors import ParityError
from miles.train.batch_tensors import flatten_batch
from miles.train.grad_accumulation import LogprobReader, build_micro_batches


def train_and_report(actor, samples, trainer):
    """The trainer's own log-probs in place of what the samples' engine said, to the bit."""
    flat = flatten_batch([[s] for s in samples], mean_per_trajectory)
    rows = build_micro_batches(flat, trainer._train, device=actor.device, replay=False)
    own = torch.cat(LogprobReader(temperature=1.0, chunk=None).compute_frozen(actor, rows)).numpy()
    out, start = [], 0
    for s in samples:
        logprobs = np.zeros(len(s), np.float32)
        logprobs[s.mask] = own[start : start + s.mask.sum()]
        out.append(replace(s, logprobs=logprobs))
        start += int(s.mask.sum())
    return tuple(out)


def engine_off_by(gap, *, seed=1, spread=0.0, **changes):
    """Samples whose engine is ``gap`` nats off, ``spread`` more at random; and the same as the trainer has it."""
    samples = ragged(**changes)
    actor = model()
    right = train_and_report(actor, samples, worker(actor))
    rng = np.random.default_rng(seed)
    wrong = tuple(
        replace(s, logprobs=np.where(s.mask, s.logprobs + gap + spread * rng.normal(size=len(s)), 0).astype(np.float32))
        for s in right
    )
    return wrong, right


def ratios(wrong, right):
    return [np.exp(r.logprobs - w.logprobs) for w, r in zip(wrong, right, strict=True)]


def trained(samples, algo=None, **more):
    trainer = worker(model(), algo=algo, **more)
    report = step(trainer, samples)
    return weights(trainer), report.metrics


def worth(samples, weight):
    """The samples with each token's advantage times a weight: what a weight of the surrogate amounts to."""
    return tuple(
        replace(s, advantages=(s.advantages * w).astype(np.float32)) for s, w in zip(samples, weight, strict=True)
    )


def test_where_the_engine_agrees_nothing_changes_to_the_bit():
    _, right = engine_off_by(0.0)
    plain, metrics = trained(right)
    assert metrics["parity_max_abs"] == 0 and metrics["parity_ess"] == metrics["parity_ppl_ratio"] == 1
    for algo in (
        {"use_tis": True},
        {"use_tis": True, "tis_level": "sequence", "tis_batch_normalize": True},
        {"use_tis": True, "tis_mode": "auto", "rs_veto_threshold": 1e-3},
    ):
        corrected, metrics = trained(right, algo)
        assert distance(plain, corrected) == 0 and metrics["tis_weight"] == pytest.approx(1)


def test_a_weight_moves_the_model_as_an_advantage_times_it_would():
    wrong, right = engine_off_by(0.1, spread=0.8)
    weight = [np.clip(r, 0.5, 2) for r in ratios(wrong, right)]
    corrected, metrics = trained(wrong, {"use_tis": True, "tis_clip_low": 0.5})
    scaled, _ = trained(worth(wrong, weight))
    uncorrected, _ = trained(wrong)
    assert distance(corrected, scaled) < 1e-6 < 1e-4 < distance(corrected, uncorrected)
    token = np.concatenate([r[s.mask] for r, s in zip(ratios(wrong, right), wrong, strict=True)])
    beyond = [((r < 0.5) | (r > 2))[s.mask].mean() for r, s in zip(ratios(wrong, right), wrong, strict=True)]
    assert metrics["tis_clipfrac"] == pytest.approx(np.mean(beyond), abs=1e-6) and 0 < metrics["tis_clipfrac"] < 1
    assert metrics["parity_ess"] == pytest.approx(token.sum() ** 2 / len(token) / (token**2).sum(), rel=1e-4)
    assert metrics["tis_ess"] > metrics["parity_ess"]


def test_what_is_masked_or_vetoed_is_not_learned_from():
    wrong, right = engine_off_by(0.0, spread=1.0)
    kept = [(r >= 0.5) & (r <= 5) for r in ratios(wrong, right)]
    iced, metrics = trained(wrong, {"use_tis": True, "tis_mode": "icepop"})
    weight = [np.where(k, r, 0) for k, r in zip(kept, ratios(wrong, right), strict=True)]
    assert distance(iced, trained(worth(wrong, weight))[0]) < 1e-6 and metrics["tis_maskfrac"] > 0
    vetoed, metrics = trained(wrong, {"rs_veto_threshold": 0.3})
    gone = [float((r[s.mask] >= 0.3).all()) for r, s in zip(ratios(wrong, right), wrong, strict=True)]
    assert distance(vetoed, trained(worth(wrong, gone))[0]) < 1e-6
    assert metrics["rs_vetofrac"] == pytest.approx(1 - np.mean(gone)) and 0 < metrics["rs_vetofrac"] < 1


@pytest.mark.parametrize("steps", [1, 2])
def test_normalised_weights_do_not_depend_on_how_a_batch_is_cut(steps):
    wrong, _ = engine_off_by(0.3, spread=0.5)
    algo = {"use_tis": True, "tis_level": "geometric", "tis_batch_normalize": True, "rs_veto_threshold": 0.2}
    whole, metrics = trained(wrong, algo, steps=steps)
    for size in (1, 3):
        cut, parts = trained(wrong, algo, steps=steps, train={"micro_batch_size": size})
        assert distance(whole, cut) < 1e-6
        for name in ("loss", "pg_loss", "tis", "tis_weight", "tis_ess", "rs_vetofrac"):
            assert parts[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6)


def test_a_uniform_mismatch_is_normalised_away():
    wrong, right = engine_off_by(0.5)
    plain, _ = trained(right)
    weighed, _ = trained(wrong, {"use_tis": True})
    normal, metrics = trained(wrong, {"use_tis": True, "tis_batch_normalize": True})
    assert metrics["tis_weight"] == pytest.approx(np.exp(-0.5), rel=1e-4)
    assert distance(plain, normal) < 1e-6 < distance(plain, weighed)


@pytest.mark.parametrize(
    ("gap", "spread", "rung"), [(0.0, 1e-5, 0), (0.005, 0.0, 1), (0.05, 0.0, 2), (-0.05, 0.0, 2), (0.0005, 0.0, 0)]
)
@pytest.mark.parametrize("steps", [1, 2])
def test_the_parity_of_a_batch_chooses_its_correction(gap, spread, rung, steps):
    wrong, _ = engine_off_by(gap, spread=spread)
    chosen, metrics = trained(wrong, {"use_tis": True, "tis_mode": "auto"}, steps=steps)
    assert metrics["tis_auto_mode"] == rung and ("tis_weight" in metrics) == (rung > 0)
    fixed: dict = {0: {}, 1: {"use_tis": True}, 2: {"use_tis": True, "tis_mode": "icepop"}}[rung]
    named, same = trained(wrong, fixed, steps=steps)
    assert distance(chosen, named) == 0
    assert same["parity_mean_abs"] == pytest.approx(metrics["parity_mean_abs"]) and "tis_auto_mode" not in same


def test_beyond_the_last_rung_the_run_stops_and_the_weights_stay():
    wrong, _ = engine_off_by(0.2)
    for more in ({}, {"parity_stop": 0.15}, {"parity_tolerance": 0.001, "parity_stop": 0.01}):
        trainer = worker(model(), algo={"use_tis": True, "tis_mode": "auto"}, **more)
        before = weights(trainer)
        with pytest.raises(ParityError, match=r"differ by 2.00e-01 .* the weights were not changed"):
            step(trainer, wrong)
        assert distance(before, weights(trainer)) == 0 and trainer.version.number == 0
    _, metrics = trained(wrong, {"use_tis": True, "tis_mode": "auto"}, parity_stop=0.5)
    assert metrics["tis_auto_mode"] == 2


def test_tokens_of_older_weights_are_weighed_against_the_trainer_itself():
    wrong, right = engine_off_by(0.1, spread=0.5, version=-1)
    plain, metrics = trained(wrong)
    assert "parity_mean_abs" not in metrics and metrics["ratio"] != pytest.approx(1, abs=1e-3)
    weighed, metrics = trained(wrong, {"use_tis": True, "tis_mode": "auto"})  # nothing to compare: truncated
    assert metrics["tis_auto_mode"] == 1 and metrics["ratio"] == pytest.approx(1, abs=1e-6)
    scaled, _ = trained(worth(right, [np.clip(r, 0, 2) for r in ratios(wrong, right)]), {"use_rollout_logprobs": False})
    assert distance(weighed, scaled) < 1e-6 < distance(weighed, plain)


def test_one_old_sample_is_reason_enough_to_weigh_a_batch():
    _, right = engine_off_by(0.0)
    old = replace(right[0], versions=np.where(right[0].mask, -1, right[0].versions).astype(np.int32))
    _, metrics = trained((old, *right[1:]), {"use_tis": True, "tis_mode": "auto"})
    assert metrics["parity_max_abs"] == 0 and metrics["tis_auto_mode"] == 1


def test_a_correction_of_ones_own_is_asked_and_measured():
    def halve(evidence, layout):
        assert evidence.engine_logp_R.shape == evidence.old_logp_R.shape == evidence.sample_R.shape
        weight_R = torch.full_like(evidence.old_logp_R, 0.5)
        return TokenWeights(weight_R=weight_R, metrics={"mine": layout.mean(weight_R)})

    wrong, _ = engine_off_by(0.1)
    halved, metrics = trained(wrong, {"use_tis": True}, algo_hooks=AlgoHooks(correction=halve))
    scaled, _ = trained(worth(wrong, [0.5] * len(wrong)))
    assert metrics["mine"] == pytest.approx(0.5) and distance(halved, scaled) == 0
