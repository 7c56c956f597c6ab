"""Returns, advantages and whitening against plain float64 loops and closed forms."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.algo.returns import (
    GAE,
    BatchMoments,
    ReinforcePlusPlusReturns,
    compute_token_rewards,
    discounted_sum,
    explained_variance,
    mark_sample_ends,
    whiten,
)

R = torch.float64
VALUES = st.floats(-10, 10)
DECAYS = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])


@st.composite
def batches(draw):
    """Samples with gaps: a mask over all tokens (environment tokens between trained ones), rewards, values."""
    masks = draw(
        st.lists(
            st.lists(st.booleans(), min_size=1, max_size=40).map(lambda m: [*m, True]),
            min_size=1,
            max_size=6,
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return [(np.array(m), rng.normal(size=len(m)), rng.normal(size=len(m))) for m in masks]


def loop(mask, reward, value, gamma, lambd):
    """GAE of one sample over all its tokens: an environment token hands on what it was given."""
    advantages = np.zeros(len(mask))
    after_value, after_advantage = 0.0, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            surprise = reward[t] + gamma * after_value - value[t]
            after_advantage = advantages[t] = surprise + gamma * lambd * after_advantage
            after_value = value[t]
    return advantages[mask], (advantages + value)[mask]


def flat(batch):
    reward, value = (torch.from_numpy(np.concatenate([s[i][s[0]] for s in batch])) for i in (1, 2))
    numbers = np.repeat(np.arange(len(batch)), [s[0].sum() for s in batch])
    return reward, value, torch.from_numpy(numbers)


@given(batches(), DECAYS, DECAYS)
@settings(max_examples=examples(60), deadline=None)
def test_advantages_are_those_of_a_loop_that_crosses_the_environments_tokens_undecayed(batch, gamma, lambd):
    found = GAE(gamma=gamma, lambd=lambd)(*flat(batch))
    expected = [loop(*sample, gamma, lambd) for sample in batch]
    assert np.allclose(found.advantage_R, np.concatenate([a for a, _ in expected]), rtol=1e-9, atol=1e-11)
    assert np.allclose(found.return_R, np.concatenate([g for _, g in expected]), rtol=1e-9, atol=1e-11)


@given(batches(), DECAYS)
@settings(max_examples=examples(40), deadline=None)
def test_returns_are_those_of_a_loop(batch, gamma):
    reward, _, numbers = flat(batch)
    found = ReinforcePlusPlusReturns(gamma=gamma)(reward, None, numbers)
    expected = [loop(mask, reward, 0 * value, gamma, 1.0)[0] for mask, reward, value in batch]
    assert np.allclose(found.advantage_R, np.concatenate(expected), rtol=1e-9, atol=1e-11)
    assert torch.equal(found.advantage_R, found.return_R)


@given(batches())
@settings(max_examples=examples(30), deadline=None)
def test_without_discounts_an_advantage_is_the_return_to_go_minus_the_value(batch):
    reward, value, numbers = flat(batch)
    found = GAE(gamma=1.0, lambd=1.0)(reward, value, numbers)
    to_go = torch.cat([reward[numbers == n].flip(0).cumsum(0).flip(0) for n in numbers.unique()])
    assert torch.allclose(found.advantage_R, to_go - value, atol=1e-11)
    assert torch.allclose(found.return_R, to_go, atol=1e-11)
    one_step = GAE(gamma=0.9, lambd=0.0)(reward, value, numbers).advantage_R
    after = torch.cat([torch.cat([v[1:], v.new_zeros(1)]) for v in (value[numbers == n] for n in numbers.unique())])
    assert torch.allclose(one_step, reward + 0.9 * after - value, atol=1e-11)


def test_numbers_worked_out_by_hand():
    reward, value = torch.tensor([0.0, 0.0, 1.0, 2.0], dtype=R), torch.tensor([0.5, 0.25, 0.5, 1.0], dtype=R)
    found = GAE(gamma=0.5, lambd=0.5)(reward, value, torch.tensor([0, 0, 0, 1]))
    # surprises: 0.125 - 0.5, 0.25 - 0.25, 1 - 0.5; a quarter of each is carried back; the other sample stands alone
    assert found.advantage_R.tolist() == [-0.375 + 0.5 / 16, 0.125, 0.5, 1.0]
    assert found.return_R.tolist() == [0.125 + 0.5 / 16, 0.375, 1.0, 2.0]


def test_a_constant_reward_is_a_geometric_series():
    numbers = torch.zeros(5000, dtype=torch.int64)
    found = discounted_sum(torch.ones(5000, dtype=R), numbers, 0.99)
    left = torch.arange(5000, 0, -1, dtype=R)
    assert torch.allclose(found, (1 - 0.99**left) / 0.01, rtol=1e-12)
    plain = discounted_sum(torch.ones(5000), numbers, 1.0)
    assert plain.dtype == torch.float32 and plain.tolist() == left.tolist()


@given(batches(), DECAYS, DECAYS)
@settings(max_examples=examples(30), deadline=None)
def test_a_sample_is_judged_the_same_to_the_bit_whoever_its_neighbours_are(batch, gamma, lambd):
    judge = GAE(gamma=gamma, lambd=lambd)
    reward, value, numbers = flat(batch)
    together = judge(reward.float(), value.float(), numbers)
    for n in numbers.unique():
        own = numbers == n
        alone = judge(reward.float()[own], value.float()[own], numbers[own])
        assert torch.equal(alone.advantage_R, together.advantage_R[own])
        assert torch.equal(alone.return_R, together.return_R[own])


def test_a_reward_falls_due_at_the_last_token_and_the_divergence_at_each():
    numbers = torch.tensor([3, 3, 5])
    worth = torch.tensor([2.0, 2.0, -1.0])
    assert mark_sample_ends(numbers).tolist() == [False, True, True]
    assert compute_token_rewards(worth, numbers).tolist() == [0.0, 2.0, -1.0]
    kl = torch.tensor([0.5, 1.0, 2.0])
    assert compute_token_rewards(worth, numbers, kl_R=kl, kl_coef=0.5).tolist() == [-0.25, 1.5, -2.0]


def test_no_token_is_no_trouble():
    nothing, nobody = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert (
        len(GAE()(nothing, nothing, nobody).advantage_R)
        == len(ReinforcePlusPlusReturns()(nothing, None, nobody).return_R)
        == 0
    )
    assert len(whiten(nothing, BatchMoments.from_values(nothing))) == 0


@given(st.lists(VALUES, min_size=2, max_size=50), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_a_batch_split_in_any_way_is_whitened_by_added_sums_as_one(values, data):
    whole = torch.tensor(values, dtype=R)
    shard = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(values), max_size=len(values))))
    parts = [whole[shard == n] for n in range(4)]  # any tokens of any sample, and perhaps none
    moments = BatchMoments.from_values(parts[0])
    for part in parts[1:]:
        moments = moments + BatchMoments.from_values(part)
    out = torch.empty_like(whole)
    for n, part in enumerate(parts):
        out[shard == n] = whiten(part, moments)
    expected = (whole - whole.mean()) / (whole.var() + 1e-8).sqrt()
    assert torch.allclose(out, expected, rtol=1e-6, atol=1e-6)
    assert moments.mean.item() == pytest.approx(whole.mean().item(), abs=1e-12)
    assert moments.std.item() == pytest.approx(np.std(values), abs=1e-6)


def test_advantages_that_are_all_equal_whiten_to_nothing():
    same = torch.full((7,), 0.3)
    assert whiten(same, BatchMoments.from_values(same)).abs().max() < 1e-6
    assert whiten(torch.tensor([5.0]), BatchMoments.from_values(torch.tensor([5.0]))).item() == 0.0


def test_explained_variance_is_one_for_a_prophet_and_nothing_for_a_constant():
    came = torch.tensor([1.0, 2.0, 4.0], dtype=R)

    def report_value(value):
        return explained_variance(BatchMoments.from_values(came - value), BatchMoments.from_values(came)).item()

    assert (
        report_value(came) == 1.0
        and report_value(came + 5) == pytest.approx(1.0)
        and report_value(0 * came) == pytest.approx(0.0)
    )
    assert report_value(-came) == pytest.approx(-3.0)
    assert explained_variance(BatchMoments.from_values(came), BatchMoments.from_values(torch.ones(3))).item() == 0.0
