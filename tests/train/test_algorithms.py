"""Each algorithm through the trainer, on a real model: against plain transformers, and however a batch is cut."""

import numpy as np
import pytest
import torch
from tests.train.small_trainer import EPS, distance, model, named, ragged, step, twin, weights, worker

from miles.algo.loss_aggregation import mean_per_token
from miles.algo.policy_loss import LossOutput
from miles.algo.registry import AlgoHooks

COMPARING = ["grpo", "gspo", "cispo", "rloo", "maxrl", "opo"]


def oracle(reference, s):
    tokens = torch.from_numpy(s.tokens.astype(np.int64))
    logp = torch.log_softmax(reference(tokens[None]).logits[0].float(), -1)
    at = torch.from_numpy(np.flatnonzero(s.mask))
    return logp[at - 1].gather(1, tokens[at][:, None])[:, 0]


def gspo(logp, old, worth):
    s = (logp - old).mean().exp()
    return -torch.minimum(s * worth, s.clamp(0.98, 1.01) * worth)


def cispo(logp, old, worth):
    return -((logp - old).exp().detach().clamp(0.98, 1.01) * worth * logp).mean()


@pytest.mark.parametrize("formula", [gspo, cispo])
def test_a_step_equals_its_transformers_twin(formula, tmp_path):
    actor = model()
    theirs = twin(actor, tmp_path)
    samples = ragged(6)
    knobs = {
        "advantage_estimator": formula.__name__,
        "eps_clip": 0.02,
        "eps_clip_high": 0.01,
        "use_rollout_logprobs": True,
    }
    trainer = worker(actor, algo=knobs, train={"max_tokens_per_gpu": 24, "weight_decay": 0.0, "clip_grad": 0.0})
    report = step(trainer, samples)
    losses = [
        formula(oracle(theirs, s), torch.from_numpy(s.logprobs[s.mask]), float(s.advantages[s.mask][0]))
        for s in samples
    ]
    loss = torch.stack(losses).mean()
    adam = torch.optim.AdamW(theirs.parameters(), lr=1e-2, eps=EPS, weight_decay=0.0)
    loss.backward()
    adam.step()
    assert report.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert 0 < report.metrics["pg_clipfrac"] < 1
    assert distance(weights(trainer), named(theirs, tmp_path)) < 1e-5


@pytest.mark.parametrize("name", COMPARING)
def test_a_batch_may_be_cut_anyhow(name):
    def trained(train):
        algo = {"advantage_estimator": name, "use_opsm": True, "opsm_delta": 0.01, "constant_loss_length": 8}
        trainer = worker(model(), algo=algo, train={"clip_grad": 0.0} | train, steps=2)
        return step(trainer, ragged(8)).metrics, weights(trainer)

    (whole, expected), (parts, found) = trained({}), trained({"max_tokens_per_gpu": 16})
    assert parts["micro_batches"] > whole["micro_batches"] == 2
    for metric in ("loss", "ratio", "entropy", "grad_norm", "opsm_clipfrac"):
        assert parts[metric] == pytest.approx(whole[metric], rel=1e-5, abs=1e-6)
    assert distance(expected, found) < 1e-6


def test_dr_grpo_divides_by_a_constant_and_metrics_stay_means():
    def trained(**algo):
        return step(worker(model(), algo=algo, train={"clip_grad": 0.0}), samples).metrics

    samples = ragged(6)
    token, constant = trained(calculate_per_token_loss=True), trained(constant_loss_length=50)
    tokens = sum(int(s.mask.sum()) for s in samples)
    assert constant["loss"] == pytest.approx(token["loss"] * tokens / (50 * len(samples)), rel=1e-5)
    assert constant["ratio"] == pytest.approx(1.0) and constant["pg_clipfrac"] == 0


def test_a_users_own_loss_and_reducer_are_what_is_descended():
    def likelihood(evidence, layout):
        """A plain policy gradient."""
        loss = layout.reduce(-evidence.advantage_R * evidence.logp_R)
        return LossOutput(loss=loss, metrics={"mine": layout.mean(evidence.logp_R.detach())})

    def trained(algo, **more):
        trainer = worker(model(), algo=algo, train={"clip_grad": 0.0}, **more)
        return step(trainer, ragged(6)).metrics, weights(trainer)

    own = AlgoHooks(loss_fn=likelihood, reducer=lambda counts: 2 * mean_per_token(counts))
    found, mine = trained({"loss_type": "custom_loss"}, algo_hooks=own)
    plain, ours = trained({"calculate_per_token_loss": True})  # on-policy the gradients are the same
    assert found["grad_norm"] == pytest.approx(2 * plain["grad_norm"], rel=1e-5)
    assert found["mine"] < 0 and "pg_loss" not in found
    assert found["parity_mean_abs"] == pytest.approx(plain["parity_mean_abs"])
    doubled = AlgoHooks(loss_fn=likelihood, reducer=mean_per_token)
    assert distance(ours, trained({"loss_type": "custom_loss"}, algo_hooks=doubled)[1]) < 1e-6
    assert distance(ours, mine) > 1e-5
