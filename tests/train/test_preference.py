"""Training on pairs: a whole step against plain transformers, and however a batch is cut or ordered."""

import numpy as np
import pytest
import torch
from tests.train.small_trainer import EPS, distance, model, named, sample, step, twin, weights, worker
from torch.nn.functional import logsigmoid

from miles.core.errors import UsageError

DPO = {"loss_type": "dpo_loss", "dpo_beta": 0.5, "dpo_label_smoothing": 0.1}


def pairs(count=5, seed=0):
    rng = np.random.default_rng(seed)

    def reply(number, advantage):
        sizes = {"prompt": int(rng.integers(1, 5)), "reply": int(rng.integers(1, 8))}
        return sample(rng, **sizes, advantage=advantage, prompt_id=number, share=2, version=-1)

    return [reply(number, advantage) for number in range(count) for advantage in (1.0, -1.0)]


def reply_logp(reference, s):
    tokens = torch.from_numpy(s.tokens.astype(np.int64))
    logp = torch.log_softmax(reference(tokens[None]).logits[0].float(), -1)
    at = torch.from_numpy(np.flatnonzero(s.mask))
    return logp[at - 1].gather(1, tokens[at][:, None]).sum()


def trained(samples, *, steps=1, algo=DPO, **train):
    trainer = worker(model(), algo=algo, train={"clip_grad": 0.0} | train, steps=steps, reference=model(seed=1))
    return step(trainer, samples).metrics, weights(trainer)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_step_equals_its_transformers_twin(smoothing, tmp_path):
    actor, other = model(), model(seed=1)
    policy, reference = twin(actor, tmp_path / "policy"), twin(other, tmp_path / "reference")
    samples = pairs()
    trainer = worker(
        actor,
        algo=DPO | {"dpo_label_smoothing": smoothing},
        train={"max_tokens_per_gpu": 32, "weight_decay": 0.0, "clip_grad": 0.0},
        temperature=0.7,  # of sampling, which there is none of
        reference=other,
    )
    report = step(trainer, samples)
    gains = torch.stack([0.5 * (reply_logp(policy, s) - reply_logp(reference, s).detach()) for s in samples])
    margins = gains[::2] - gains[1::2]
    loss = (-(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)).mean()
    adam = torch.optim.AdamW(policy.parameters(), lr=1e-2, eps=EPS, weight_decay=0.0)
    loss.backward()
    adam.step()
    assert report.metrics["micro_batches"] > 1
    assert report.metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert report.metrics["dpo_accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert report.metrics["dpo_margin"] == pytest.approx(margins.mean().item(), abs=1e-5)
    assert report.metrics["dpo_chosen_reward"] == pytest.approx(gains[::2].mean().item(), abs=1e-5)
    assert report.metrics["dpo_rejected_reward"] == pytest.approx(gains[1::2].mean().item(), abs=1e-5)
    found = weights(trainer)
    assert distance(found, named(policy, tmp_path / "after")) < 1e-5


@pytest.mark.parametrize("train", [{"max_tokens_per_gpu": 24}, {"micro_batch_size": 2}, {"micro_batch_size": 4}])
def test_a_batch_may_be_cut_between_pairs(train):
    samples = pairs(6)
    (whole, expected), (parts, found) = trained(samples, steps=2), trained(samples, steps=2, **train)
    assert parts["micro_batches"] > whole["micro_batches"] == 2
    for metric in ("loss", "dpo_margin", "dpo_accuracy", "dpo_chosen_reward", "dpo_rejected_reward", "grad_norm"):
        assert parts[metric] == pytest.approx(whole[metric], rel=1e-5, abs=1e-6)
    assert distance(expected, found) < 1e-6


def test_the_order_of_pairs_does_not_matter():
    samples = pairs(6)
    turned = [s for at in (3, 0, 5, 2, 1, 4) for s in samples[2 * at : 2 * at + 2]]
    (whole, expected), (other, found) = trained(samples), trained(turned, max_tokens_per_gpu=24)
    assert other["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert distance(expected, found) < 1e-6


def test_a_pair_too_long_for_a_micro_batch_is_refused_by_name():
    with pytest.raises(UsageError, match=r"a pair of .* tokens does not fit --max-tokens-per-gpu 8"):
        trained(pairs(), max_tokens_per_gpu=8)


def test_pairs_need_a_reference():
    with pytest.raises(UsageError, match="--loss-type dpo_loss needs a reference model"):
        worker(model(), algo=DPO)


def test_the_preferred_replies_become_preferred():
    samples = pairs(4)
    actor, reference = model(), model()
    trainer = worker(actor, algo={"loss_type": "dpo_loss"}, train={"adam_eps": 1e-8}, updates=30, reference=reference)
    reports = [step(trainer, samples, number).metrics for number in range(30)]
    assert reports[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert reports[-1]["dpo_accuracy"] == pytest.approx(1.0) and reports[-1]["loss"] < 0.5
