import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.algo.credit import GroupRelative, Supervised, group_relative
from miles.core.errors import PlugError
from miles.core.types import Author, Group, Prompt, Reward, Span, Status, Trajectory, Version


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


def attempt(*spans, reward=0.0, index=0, branches=None):
    return Trajectory(branches=branches or (spans,), status=Status.COMPLETED, reward=Reward(value=reward), index=index)


def group(*trajectories):
    return Group(prompt=Prompt(id=7, messages=()), trajectories=trajectories)


def test_advantages_are_rewards_less_their_mean_over_the_sample_deviation():
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    assert np.allclose(group_relative(rewards, normalize_std=False), [0.5, -0.5, -0.5, 0.5])
    # The sample variance of two ones and two zeros is 4 * 0.25 / 3.
    expected = np.array([0.5, -0.5, -0.5, 0.5]) / (np.sqrt(1 / 3) + 1e-6)
    assert np.allclose(group_relative(rewards, normalize_std=True), expected, rtol=1e-12)


@pytest.mark.parametrize("rewards", [[2.0], [0.3, 0.3, 0.3], [0.1] * 7])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_group_that_teaches_nothing_has_advantage_zero_and_never_nan(rewards, normalize):
    assert (group_relative(np.array(rewards), normalize_std=normalize) == 0).all()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=16), st.booleans())
def test_advantages_are_finite_and_keep_the_order_of_rewards(rewards, normalize):
    worth = group_relative(np.array(rewards), normalize_std=normalize)
    assert np.isfinite(worth).all()
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(worth[order]) >= 0).all()


def test_a_row_carries_tokens_mask_logprobs_and_versions_of_its_spans():
    first, second = GroupRelative(normalize_std=False)(
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
    assert (first.prompt_id, first.trajectory, first.share, first.reward) == (7, 0, 1, 1.0)
    assert (second.trajectory, second.reward) == (1, 0.0)


def test_branches_of_one_attempt_are_rows_that_share_its_worth():
    branched = attempt(branches=((prompt(1), policy(2)), (prompt(1), policy(3, 4))), reward=2.0)
    rows = GroupRelative(normalize_std=False)(group(branched, attempt(prompt(1), policy(5), index=1)))
    assert [r.share for r in rows] == [2, 2, 1] and [r.trajectory for r in rows] == [0, 0, 1]
    assert rows[0].advantages.max() == rows[1].advantages.max() == 1.0


def test_an_attempt_without_a_trained_token_still_gives_a_row():
    (row, _) = GroupRelative(normalize_std=True)(group(attempt(prompt(1, 2)), attempt(prompt(1, 2), policy(3))))
    assert not row.mask.any() and len(row) == 2


def test_extras_are_joined_and_none_stands_where_a_span_has_none():
    routed = np.array([[[0, 3]], [[1, 2]]], np.uint8)
    (row, _) = GroupRelative(normalize_std=True)(
        group(
            attempt(prompt(1), policy(4, 5, extras={"routed_experts": routed}), env(6)), attempt(prompt(1), policy(2))
        )
    )
    found = row.extras["routed_experts"]
    assert found.dtype == np.uint8 and found.tolist() == [[[255, 255]], [[0, 3]], [[1, 2]], [[255, 255]]]


def test_a_demonstration_trains_on_what_the_data_wrote():
    (row,) = Supervised()(group(attempt(prompt(1, 2), env(3, 4))))
    assert row.mask.tolist() == [False, False, True, True]
    assert row.advantages.tolist() == [0, 0, 1, 1]
    assert row.versions.tolist() == [-1] * 4 and row.logprobs.tolist() == [0] * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused_by_name(value):
    with pytest.raises(PlugError, match="attempt 1 at prompt 7"):
        GroupRelative(normalize_std=True)(
            group(attempt(prompt(1), policy(2)), attempt(prompt(1), policy(2), reward=value))
        )


def test_credit_and_knobs_import_without_torch():
    rooms = "miles.algo.credit, miles.algo.config, miles.train.config, miles.train.rates"
    code = f"import sys, {rooms}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
