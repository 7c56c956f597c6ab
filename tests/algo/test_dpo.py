"""The loss of pairs in closed form, its gradient against autograd in float64, and how a pair becomes rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algo.config import AlgoConfig
from miles.algo.dpo import BradleyTerryLoss, DPOLoss, PairEstimator
from miles.algo.loss_aggregation import WeightedAggregator, mean_per_trajectory
from miles.algo.policy_loss import LossInputs
from miles.algo.registry import build_advantage_estimator, build_loss
from miles.core.types import DEMONSTRATION, Author, Group, Prompt, Reward, Span, Status, Trajectory

F64 = torch.float64


def evidence(logp, ref, counts):
    """Samples of so many tokens, a chosen and a rejected one in turn."""
    sample = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return LossInputs(
        logp_R=logp,
        old_logp_R=logp.detach(),
        engine_logp_R=torch.zeros_like(ref),
        advantage_R=(1.0 - 2.0 * (sample % 2)).to(logp.dtype),
        entropy_R=torch.ones_like(ref),
        sample_R=sample,
        samples=len(counts),
        ref_logp_R=ref,
    )


def layout(counts, pairs=None):
    """Weights as the trainer gives them: ``pairs`` are the token counts of every pair of the global batch."""
    mine = [a + b for a, b in zip(counts[::2], counts[1::2], strict=True)]
    weight = torch.from_numpy(mean_per_trajectory(pairs or mine))[: len(mine)]
    trained = torch.tensor(counts)
    return WeightedAggregator(
        weight_R=weight.repeat_interleave(torch.tensor(mine)),
        sample_R=torch.arange(len(counts)).repeat_interleave(trained),
        trained_S=trained,
    )


def logprobs(counts, seed=0):
    torch.manual_seed(seed)
    return torch.randn(sum(counts), dtype=F64), torch.randn(sum(counts), dtype=F64)


def by_hand(logp, ref, counts, beta, smoothing):
    gains = [beta * (a - b).sum() for a, b in zip(logp.split(counts), ref.split(counts), strict=True)]
    margins = torch.stack(gains[::2]) - torch.stack(gains[1::2])
    losses = -(1 - smoothing) * torch.sigmoid(margins).log() - smoothing * torch.sigmoid(-margins).log()
    return losses.mean(), margins


def test_one_pair_by_hand():
    logp = torch.tensor([-1.0, -2.0, -3.0], dtype=F64)
    ref = torch.tensor([-2.0, -2.5, -1.0], dtype=F64)
    terms = DPOLoss(beta=0.5)(evidence(logp, ref, [2, 1]), layout([2, 1]))
    # chosen: 0.5 (1 + 0.5) = 0.75; rejected: 0.5 (-2) = -1; margin 1.75
    assert terms.loss.item() == pytest.approx(math.log(1 + math.exp(-1.75)), abs=1e-12)
    found = {name: value.item() for name, value in terms.metrics.items()}
    assert found["dpo_chosen_reward"] == pytest.approx(0.75)
    assert found["dpo_rejected_reward"] == pytest.approx(-1.0)
    assert found["dpo_margin"] == pytest.approx(1.75)
    assert found["dpo_accuracy"] == pytest.approx(1.0) and found["entropy"] == pytest.approx(1.0)


def test_a_policy_that_is_its_reference_loses_log_two():
    logp, _ = logprobs([3, 2, 1, 4])
    terms = DPOLoss(beta=0.1, smoothing=0.2)(evidence(logp, logp, [3, 2, 1, 4]), layout([3, 2, 1, 4]))
    assert terms.loss.item() == pytest.approx(math.log(2)) and terms.metrics["dpo_accuracy"].item() == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_is_that_of_the_formula(smoothing):
    counts = [3, 2, 1, 4, 2, 2]
    logp, ref = logprobs(counts)
    mine, theirs = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    terms = DPOLoss(beta=0.7, smoothing=smoothing)(evidence(mine, ref, counts), layout(counts))
    expected, margins = by_hand(theirs, ref, counts, 0.7, smoothing)
    terms.loss.backward()
    expected.backward()
    assert terms.loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(mine.grad, theirs.grad, rtol=0, atol=1e-12)
    assert terms.metrics["dpo_margin"].item() == pytest.approx(margins.mean().item())
    assert terms.metrics["dpo_accuracy"].item() == pytest.approx((margins > 0).double().mean().item())


def test_the_gradient_is_what_finite_differences_find():
    counts = [2, 3, 1, 1]
    logp, ref = logprobs(counts)
    loss = DPOLoss(beta=0.4, smoothing=0.05)
    assert torch.autograd.gradcheck(
        lambda x: loss(evidence(x, ref, counts), layout(counts)).loss, logp.requires_grad_()
    )


def test_a_margin_beyond_all_measure_has_a_finite_loss_and_gradient():
    logp = torch.tensor([-1e4, -1e-3], dtype=torch.float32, requires_grad=True)
    ref = torch.tensor([-1e-3, -1e4])
    terms = DPOLoss(beta=1.0)(evidence(logp, ref, [1, 1]), layout([1, 1]))
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(2e4, rel=1e-5)
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx([-1.0, 1.0])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=2, max_size=6), st.integers(0, 99))
def test_parts_of_a_batch_add_up_in_any_order(pairs, seed):
    counts = [n for pair in pairs for n in pair]
    totals = [a + b for a, b in pairs]
    logp, ref = logprobs(counts, seed)
    loss = DPOLoss(beta=0.3)
    whole = loss(evidence(logp, ref, counts), layout(counts))
    places = np.cumsum([0, *totals])
    parts = []
    for number in reversed(range(len(pairs))):
        cut, own = slice(places[number], places[number + 1]), list(pairs[number])
        rest = [n for i, n in enumerate(totals) if i != number]
        parts.append(loss(evidence(logp[cut], ref[cut], own), layout(own, pairs=[totals[number], *rest])))
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), abs=1e-6)
    for name in whole.metrics:
        added = sum(part.metrics[name].item() for part in parts)
        assert added == pytest.approx(whole.metrics[name].item(), abs=1e-6)


def test_a_pair_is_one_trajectory_of_two_marked_rows():
    def reply(index, *tokens):
        asked = Span(author=Author.PROMPT, tokens=np.array([1, 2], np.int32))
        ids, certain = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
        said = Span(author=Author.POLICY, tokens=ids, logprobs=certain, version=DEMONSTRATION)
        reward = Reward(value=1.0 - index)
        return Trajectory(branches=((asked, said),), status=Status.COMPLETED, reward=reward, index=index)

    group = Group(prompt=Prompt(id=7, messages=()), trajectories=(reply(0, 5, 6, 9), reply(1, 8, 9)))
    credit = build_advantage_estimator(AlgoConfig(loss_type="dpo_loss"), response_limit=8)
    assert isinstance(credit, PairEstimator)
    chosen, rejected = credit(group)
    assert (chosen.trajectory, chosen.samples_per_trajectory, rejected.trajectory, rejected.samples_per_trajectory) == (
        0,
        2,
        0,
        2,
    )
    assert chosen.advantages.tolist() == [0, 0, 1, 1, 1] and rejected.advantages.tolist() == [0, 0, -1, -1]
    assert chosen.mask.tolist() == [False, False, True, True, True]


def test_the_table_follows_the_knobs():
    config = AlgoConfig(loss_type="dpo_loss", dpo_beta=0.3, dpo_label_smoothing=0.1)
    assert build_loss(config) == DPOLoss(beta=0.3, smoothing=0.1)


def test_a_reward_models_loss_by_hand_and_in_parts():
    torch.manual_seed(0)
    scores = torch.randn(8, dtype=F64, requires_grad=True)
    terms = BradleyTerryLoss()(scores, 4)
    margins = (scores[::2] - scores[1::2]).tolist()
    assert terms.loss.item() == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins) / 4, abs=1e-12)
    assert terms.metrics["rm_margin"].item() == pytest.approx(sum(margins) / 4)
    assert terms.metrics["rm_accuracy"].item() == sum(m > 0 for m in margins) / 4
    chosen, rejected = scores[::2].mean().item(), scores[1::2].mean().item()
    assert terms.metrics["rm_chosen_score"].item() == pytest.approx(chosen)
    assert terms.metrics["rm_rejected_score"].item() == pytest.approx(rejected)
    parts = [BradleyTerryLoss()(scores[at : at + 2], 4) for at in (6, 0, 4, 2)]
    for name in terms.metrics:
        assert sum(p.metrics[name].item() for p in parts) == pytest.approx(terms.metrics[name].item(), abs=1e-12)
    assert torch.autograd.gradcheck(lambda x: BradleyTerryLoss()(x, 4).loss, scores)
