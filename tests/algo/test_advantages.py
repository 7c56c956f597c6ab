import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.algo.advantages import (
    GroupRelativeAdvantages,
    OutcomeEstimator,
    OverlongPenalty,
    SFTEstimator,
    ValidatedEstimator,
    build_samples,
    dr_grpo_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    raw_reward_advantages,
    rloo_advantages,
    zero_advantages,
)
from miles.algo.config import AlgoConfig
from miles.algo.registry import ALGORITHMS, build_advantage_estimator, select_group_advantages
from miles.core.errors import HookError
from miles.core.media import PlacedImage, make_image_input
from miles.core.types import DEMONSTRATION, Author, Group, Prompt, Reward, Span, Status, Trajectory, Version


def prompt(*tokens):
    return Span(author=Author.PROMPT, tokens=np.array(tokens, np.int32))


def policy(*tokens, version=3, extras=None):
    return Span(
        author=Author.POLICY,
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        version=Version(number=version),
        extras=extras or {},
    )


def env(*tokens):
    return Span(author=Author.ENV, tokens=np.array(tokens, np.int32))


def attempt(*spans, reward=0.0, index=0, branches=None, **metadata):
    return Trajectory(
        branches=branches or (spans,),
        status=Status.COMPLETED,
        reward=Reward(value=reward),
        index=index,
        metadata=metadata,
    )


def group(*trajectories):
    return Group(prompt=Prompt(id=7, messages=()), trajectories=trajectories)


def compared(compare=dr_grpo_advantages, role_key=None):
    return OutcomeEstimator(advantage_fn=GroupRelativeAdvantages(group_fn=compare, role_key=role_key))


COMPARISONS = [grpo_advantages, dr_grpo_advantages, rloo_advantages, maxrl_advantages, opo_advantages]


# -- what an attempt is worth ---------------------------------------------------------------


def test_advantages_are_rewards_less_their_mean_over_the_sample_deviation():
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    assert np.allclose(dr_grpo_advantages(rewards, np.ones(4)), [0.5, -0.5, -0.5, 0.5])
    # The sample variance of two ones and two zeros is 4 * 0.25 / 3.
    expected = np.array([0.5, -0.5, -0.5, 0.5]) / (np.sqrt(1 / 3) + 1e-6)
    assert np.allclose(grpo_advantages(rewards, np.ones(4)), expected, rtol=1e-12)


def test_comparisons_by_hand():
    rewards, lengths = np.array([1.0, 0.0, 0.0, 2.0]), np.array([2.0, 4.0, 2.0, 2.0])
    assert rloo_advantages(rewards, lengths).tolist() == pytest.approx([1 - 2 / 3, -1, -1, 2 - 1 / 3])
    assert maxrl_advantages(rewards, lengths).tolist() == pytest.approx([1 / 3, -1, -1, 5 / 3])  # the mean is 3/4
    assert opo_advantages(rewards, lengths).tolist() == pytest.approx([0.4, -0.6, -0.6, 1.4])  # 6 of 10 tokens' worth
    assert raw_reward_advantages(rewards, lengths).tolist() == rewards.tolist()


@pytest.mark.parametrize("rewards", [[2.0], [0.3, 0.3, 0.3], [0.1] * 7, [0.0, 0.0]])
@pytest.mark.parametrize("compare", COMPARISONS)
def test_a_group_that_teaches_nothing_has_advantage_zero_and_never_nan(rewards, compare):
    assert (compare(np.array(rewards), np.ones(len(rewards))) == 0).all()


scored = st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 99)), min_size=1, max_size=16)


@given(scored, st.sampled_from(COMPARISONS))
def test_advantages_are_finite_and_keep_the_order_of_rewards(attempts, compare):
    rewards, lengths = np.array(attempts, np.float64).T
    worth = compare(rewards, lengths)
    assert np.isfinite(worth).all()
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(worth[order]) >= 0).all()


@given(scored, st.sampled_from(COMPARISONS), st.randoms())
def test_the_order_of_attempts_does_not_matter(attempts, compare, chance):
    rewards, lengths = np.array(attempts, np.float64).T
    mixed = np.array(chance.sample(range(len(rewards)), len(rewards)))
    scale = max(1.0, rewards.max())
    assert np.allclose(compare(rewards, lengths)[mixed], compare(rewards[mixed], lengths[mixed]), atol=1e-9 * scale)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12))
def test_leaving_one_out_is_the_reward_less_the_mean_of_the_others(rewards):
    found = rloo_advantages(np.array(rewards), np.ones(len(rewards)))
    others = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert np.allclose(found, others, atol=1e-9)


@given(scored.filter(lambda pairs: any(length for _, length in pairs)))
def test_the_optimal_baseline_leaves_nothing_over_when_tokens_are_counted(attempts):
    # The least sum of length * (reward - baseline)^2, which is where its slope is zero.
    rewards, lengths = np.array(attempts, np.float64).T
    if np.ptp(rewards) > 0:
        assert abs(float((lengths * opo_advantages(rewards, lengths)).sum())) <= 1e-6 * (lengths @ rewards + 1)


def expected_gradient(compare, logits, rewards, attempts):
    """The mean over all ways to draw ``attempts`` actions of the policy gradient an estimator gives, exactly."""
    p = np.exp(logits) / np.exp(logits).sum()
    total = np.zeros_like(p)
    for drawn in itertools.product(range(len(p)), repeat=attempts):
        worth = compare(rewards[list(drawn)], np.ones(attempts))
        scores = np.eye(len(p))[list(drawn)] - p  # d log p(action) / d logits
        total += np.prod(p[list(drawn)]) * (worth[:, None] * scores).mean(0)
    return p, total


def test_leaving_one_out_has_no_bias_and_a_shared_mean_shrinks_the_gradient():
    logits, rewards = np.array([0.3, -0.4, 0.9]), np.array([1.0, 0.2, 0.5])
    p, found = expected_gradient(rloo_advantages, logits, rewards, 4)
    true = p * (rewards - p @ rewards)  # d E[reward] / d logits
    assert np.allclose(found, true, atol=1e-12)
    assert np.allclose(expected_gradient(dr_grpo_advantages, logits, rewards, 4)[1], 3 / 4 * true, atol=1e-12)


@pytest.mark.parametrize("attempts", [2, 3, 5])
def test_maxrl_ascends_the_log_of_the_pass_rate_expanded_to_one_term_fewer_than_attempts(attempts):
    logits, rewards = np.array([0.3, -0.4, 0.9]), np.array([1.0, 0.0, 0.0])
    p, found = expected_gradient(maxrl_advantages, logits, rewards, attempts)
    slope = p * (rewards - p @ rewards)
    expected = sum((1 - p[0]) ** (k - 1) for k in range(1, attempts)) * slope
    assert np.allclose(found, expected, atol=1e-12)


def failing(rewards, failed):
    tries = tuple(
        Trajectory(
            branches=((prompt(1, 2), policy(5, 6)),),
            status=Status.FAILED if n in failed else Status.COMPLETED,
            reward=Reward(value=0.0 if n in failed else reward),
            index=n,
        )
        for n, reward in enumerate(rewards)
    )
    return Group(prompt=Prompt(id=1, messages=()), trajectories=tries)


@given(st.lists(st.floats(0, 3), min_size=2, max_size=6), st.data(), st.sampled_from(sorted(ALGORITHMS)))
def test_what_failed_is_not_trained_and_its_siblings_are_worth_what_they_would_be_without_it(rewards, data, name):
    failed = data.draw(st.sets(st.sampled_from(range(len(rewards))), max_size=len(rewards) - 1))
    credit = build_advantage_estimator(AlgoConfig(advantage_estimator=name), response_limit=9)
    rows = credit(failing(rewards, failed))
    alone = credit(failing([r for n, r in enumerate(rewards) if n not in failed], ()))
    assert len(rows) == len(rewards)
    assert [row.mask.any() for row in rows] == [n not in failed for n in range(len(rewards))]
    left = [row.advantages.tolist() for n, row in enumerate(rows) if n not in failed]
    assert left == [row.advantages.tolist() for row in alone]


def test_a_trajectory_whose_reward_failed_leaves_the_mean_of_its_group():
    group = failing([1.0, 0.0, 0.0], ())
    unscored = replace(group.trajectories[2], metadata={"unscored": "KeyError: 'judge'"})
    group = replace(group, trajectories=(*group.trajectories[:2], unscored))
    rows = build_advantage_estimator(AlgoConfig(), response_limit=9)(group)
    alone = build_advantage_estimator(AlgoConfig(), response_limit=9)(failing([1.0, 0.0], ()))
    assert [row.mask.any() for row in rows] == [True, True, False]
    assert [row.advantages.tolist() for row in rows[:2]] == [row.advantages.tolist() for row in alone]
    trained = build_advantage_estimator(AlgoConfig(failed_trajectories="train"), response_limit=9)(group)
    assert all(row.mask.any() for row in trained)


def test_what_failed_can_be_trained_on_with_the_reward_it_has():
    rows = build_advantage_estimator(AlgoConfig(failed_trajectories="train"), response_limit=9)(
        failing([1.0, 1.0], {1})
    )
    assert all(row.mask.any() for row in rows) and rows[1].advantages[-1] < 0


def test_maxrl_knows_the_smallest_rewards_there_are():
    least = np.nextafter(0.0, 1.0)
    assert maxrl_advantages(np.array([least, 0.0]), np.ones(2)).tolist() == [1.0, -1.0]
    assert maxrl_advantages(np.array([0.0, 0.0]), np.ones(2)).tolist() == [0.0, 0.0]


def test_maxrl_refuses_rewards_below_zero():
    with pytest.raises(HookError, match="--advantage-estimator maxrl divides by the mean reward"):
        maxrl_advantages(np.array([1.0, -1.0]), np.ones(2))


def test_each_role_is_measured_by_what_its_own_side_earned():
    credit = compared(rloo_advantages, role_key="side")
    plays = [("white", 1.0), ("black", -1.0), ("white", 0.0), ("black", 1.0), ("judge", 5.0)]
    rows = credit(group(*(attempt(prompt(1), policy(2), reward=r, index=i, side=s) for i, (s, r) in enumerate(plays))))
    assert [row.advantages[1] for row in rows] == [1.0, -2.0, -1.0, 2.0, 0.0]
    with pytest.raises(HookError, match="trajectory 0 of prompt 7 has no role"):
        credit(group(attempt(prompt(1), policy(2)), attempt(prompt(1), policy(2))))


def test_the_estimator_sets_the_comparison_and_a_knob_leaves_the_deviation_out():
    assert {name: a.advantages for name, a in ALGORITHMS.items() if a.advantages is not grpo_advantages} == {
        "rloo": rloo_advantages,
        "maxrl": maxrl_advantages,
        "opo": opo_advantages,
        "reinforce_plus_plus": raw_reward_advantages,
        "reinforce_plus_plus_baseline": dr_grpo_advantages,
        "ppo": raw_reward_advantages,
        "on_policy_distillation": zero_advantages,
    }
    for name in ("grpo", "gspo", "cispo"):
        assert select_group_advantages(AlgoConfig(advantage_estimator=name)) is grpo_advantages
        assert (
            select_group_advantages(AlgoConfig(advantage_estimator=name, grpo_std_normalization=False))
            is dr_grpo_advantages
        )
    assert (
        select_group_advantages(AlgoConfig(advantage_estimator="rloo", grpo_std_normalization=False)) is rloo_advantages
    )


# -- length ---------------------------------------------------------------------------------


def test_the_overlong_penalty_by_hand():
    penalty = OverlongPenalty(limit=20480, buffer=4096, factor=0.5)
    assert [penalty(n) for n in (0, 16384, 17408, 20480, 30000)] == [0, 0, -0.125, -0.5, -0.5]


def test_a_length_penalty_counts_before_attempts_are_compared_and_rows_keep_what_was_earned():
    credit = build_advantage_estimator(
        AlgoConfig(advantage_estimator="rloo", overlong_buffer_len=2, overlong_penalty_factor=0.5), response_limit=4
    )
    rows = credit(
        group(
            attempt(prompt(1), policy(2, 3), reward=1.0),
            attempt(prompt(1), policy(2, 3, 4), env(9, 9, 9), reward=1.0, index=1),
            attempt(prompt(1), policy(2, 3, 4, 5), reward=1.0, index=2),
        )
    )
    # 1, 0.75 and 0.5, each less the mean of the other two.
    assert [row.advantages[1] for row in rows] == [0.375, 0.0, -0.375]
    assert [row.reward for row in rows] == [1.0, 1.0, 1.0]


# -- hooks ----------------------------------------------------------------------------------


def test_a_users_own_worth_takes_the_place_of_the_comparison():
    asked = group(attempt(prompt(1), policy(2), reward=3.0), attempt(prompt(1), policy(2), reward=1.0, index=1))
    credit = build_advantage_estimator(
        AlgoConfig(), response_limit=4, advantage_fn=lambda g: [2 * r for r in g.rewards]
    )
    assert [row.advantages[1] for row in credit(asked)] == [6.0, 2.0]
    for wrong, says in (
        ([1.0], "returned 1 values for the 2 trajectories"),
        ([1.0, float("nan")], "is nan; it must be finite"),
    ):
        with pytest.raises(HookError, match=says):
            OutcomeEstimator(advantage_fn=lambda _, wrong=wrong: wrong)(asked)


def test_rows_of_a_users_own_must_be_those_of_the_attempts():
    branched = attempt(branches=((prompt(1), policy(2)), (prompt(1), policy(3, 4))), reward=2.0)
    asked = group(branched, attempt(prompt(1), policy(5), index=1))

    def rows(group):
        return [r for t in group.trajectories for r in build_samples(7, t, advantage=1.0, trained_author=Author.POLICY)]

    assert len(build_advantage_estimator(AlgoConfig(), response_limit=4, estimator=rows)(asked)) == 3
    with pytest.raises(HookError, match="returned samples of 1 trajectories for the 2"):
        ValidatedEstimator(estimator=lambda g: rows(g)[:2])(asked)
    with pytest.raises(HookError, match="the samples of trajectory 0 of prompt 7 are not contiguous"):
        ValidatedEstimator(estimator=lambda g: rows(g)[1:])(asked)


# -- rows -----------------------------------------------------------------------------------


def test_a_row_carries_tokens_mask_logprobs_and_versions_of_its_spans():
    first, second = compared()(
        group(
            attempt(prompt(1, 2), policy(3, version=4), env(9), policy(5, 6, version=5), reward=1.0),
            attempt(prompt(1, 2), policy(8), reward=0.0, index=1),
        )
    )
    assert first.tokens.tolist() == [1, 2, 3, 9, 5, 6] and first.tokens.dtype == np.int32
    assert first.mask.tolist() == [False, False, True, False, True, True]
    assert first.logprobs.tolist() == [0, 0, -0.5, 0, -0.5, -0.5]
    assert first.advantages.tolist() == [0, 0, 0.5, 0, 0.5, 0.5] and first.advantages.dtype == np.float32
    assert first.versions.tolist() == [-1, -1, 4, -1, 5, 5] and first.versions.dtype == np.int32
    assert (first.prompt_id, first.trajectory, first.samples_per_trajectory, first.reward) == (7, 0, 1, 1.0)
    assert (second.trajectory, second.reward) == (1, 0.0)


def test_branches_of_one_attempt_are_rows_that_share_its_worth():
    branched = attempt(branches=((prompt(1), policy(2)), (prompt(1), policy(3, 4))), reward=2.0)
    rows = compared()(group(branched, attempt(prompt(1), policy(5), index=1)))
    assert [r.samples_per_trajectory for r in rows] == [2, 2, 1] and [r.trajectory for r in rows] == [0, 0, 1]
    assert rows[0].advantages.max() == rows[1].advantages.max() == 1.0


def test_an_attempt_without_a_trained_token_still_gives_a_row():
    (row, _) = compared(grpo_advantages)(group(attempt(prompt(1, 2)), attempt(prompt(1, 2), policy(3))))
    assert not row.mask.any() and len(row) == 2


def test_extras_are_joined_and_none_stands_where_a_span_has_none():
    routed = np.array([[[0, 3]], [[1, 2]]], np.uint8)
    (row, _) = compared(grpo_advantages)(
        group(
            attempt(prompt(1), policy(4, 5, extras={"routed_experts": routed}), env(6)), attempt(prompt(1), policy(2))
        )
    )
    found = row.extras["routed_experts"]
    assert found.dtype == np.uint8 and found.tolist() == [[[255, 255]], [[0, 3]], [[1, 2]], [[255, 255]]]


def test_a_demonstration_trains_on_what_the_data_wrote_in_the_policys_place():
    def given(*tokens):
        ids, certain = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
        return Span(author=Author.POLICY, tokens=ids, logprobs=certain, version=DEMONSTRATION)

    (row,) = SFTEstimator()(group(attempt(prompt(1, 2), given(3, 4), env(5), given(6))))
    assert row.mask.tolist() == [False, False, True, True, False, True]
    assert row.advantages.tolist() == [0, 0, 1, 1, 0, 1]
    assert row.versions.tolist() == [-1] * 6 and row.logprobs.tolist() == [0] * 6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused_by_name(value):
    with pytest.raises(HookError, match="trajectory 1 of prompt 7"):
        compared(grpo_advantages)(
            group(attempt(prompt(1), policy(2)), attempt(prompt(1), policy(2), reward=value, index=1))
        )


def test_credit_and_knobs_import_without_torch():
    rooms = "miles.algo.advantages, miles.algo.config, miles.train.config, miles.train.optim.lr_scheduler"
    code = f"import sys, {rooms}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_sample_keeps_the_images_of_its_spans_at_their_places():
    def placed(start, value):
        pixels = np.full((4, 3), value, np.float32)
        return PlacedImage(start=start, length=2, image=make_image_input({"pixel_values": pixels}, 2))

    first, second = placed(1, 1.0), placed(0, 2.0)
    branch = (
        replace(prompt(1, 7, 7, 2), images=(first,)),
        policy(3, 4),
        replace(env(7, 7, 5), images=(second,)),
        policy(6),
    )
    one = attempt(*branch, reward=1.0)
    (sample,) = compared()(group(one, attempt(prompt(1), policy(2), index=1)))[:1]
    assert [(p.start, p.end, p.image) for p in sample.images] == [(1, 3, first.image), (6, 8, second.image)]
    assert sample.tokens[sample.images[1].start : sample.images[1].end].tolist() == [7, 7]
