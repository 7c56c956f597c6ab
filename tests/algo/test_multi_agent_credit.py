"""Each role is paid for its own part: its own reward, its own baseline among the attempts, rows for its own policy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles.algo.advantages import MultiAgentEstimator, RoleEstimator
from miles.algo.config import AlgoConfig
from miles.algo.registry import build_advantage_estimator
from miles.core.agents import ROLES, select_role_part
from miles.core.types import Author, Group, Prompt, Reward, Span, Status, Trajectory, Version

CENTRED = build_advantage_estimator(
    AlgoConfig(advantage_estimator="grpo", grpo_std_normalization=False), response_limit=8
)


def branch(policy: str, length: int, version: int = 0) -> tuple[Span, ...]:
    said = Span(
        author=Author.POLICY,
        tokens=np.arange(length, dtype=np.int32),
        logprobs=np.zeros(length, np.float32),
        version=Version(policy, version),
    )
    return Span(author=Author.PROMPT, tokens=np.array([9], np.int32)), said


def attempt(index: int, parts: list[tuple[str, str]], **earned: float) -> Trajectory:
    """``parts``: a branch for each (role, policy)."""
    return Trajectory(
        branches=tuple(branch(policy, 2) for _, policy in parts),
        status=Status.COMPLETED,
        reward=Reward(value=0.0, parts=earned),
        index=index,
        metadata={ROLES: [role for role, _ in parts]},
    )


def group(*attempts: Trajectory) -> Group:
    return Group(prompt=Prompt(id=7, messages=()), trajectories=attempts)


def worth(row) -> float:
    return float(row.advantages[row.mask][0])


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=6))
def test_a_role_is_measured_by_what_its_own_role_earned(rewards):
    parts = [("a", "a"), ("b", "b")]
    made = group(*(attempt(i, parts, a=one, b=other) for i, (one, other) in enumerate(rewards)))
    rows = MultiAgentEstimator(
        roles=[
            RoleEstimator(role="a", policy="a", estimator=CENTRED),
            RoleEstimator(role="b", policy="b", estimator=CENTRED),
        ]
    )(made)
    for role, earned in zip("ab", zip(*rewards, strict=True), strict=True):
        mine = [row for row in rows if row.policy == role]
        alone = [worth(row) for row in mine]
        # Values that differ by less than a float32 can tell are one value to the rows.
        np.testing.assert_allclose(alone, np.array(earned) - np.mean(earned), atol=1e-5)
        assert [row.reward for row in mine] == list(earned)


def test_branches_of_one_role_share_its_reward_and_denominator():
    parts = [("a", "a"), ("a", "a"), ("b", "b")]
    made = group(attempt(0, parts, a=1.0, b=0.0), attempt(1, parts, a=0.0, b=1.0))
    rows = MultiAgentEstimator(
        roles=[
            RoleEstimator(role="a", policy="a", estimator=CENTRED),
            RoleEstimator(role="b", policy="b", estimator=CENTRED),
        ]
    )(made)
    assert [(r.policy, r.trajectory, r.samples_per_trajectory, worth(r)) for r in rows] == [
        *[("a", 0, 2, 0.5), ("a", 0, 2, 0.5), ("a", 1, 2, -0.5), ("a", 1, 2, -0.5)],
        *[("b", 0, 1, -0.5), ("b", 1, 1, 0.5)],
    ]


def test_two_roles_of_one_policy_are_compared_apart():
    parts = [("white", "a"), ("black", "a")]
    made = group(attempt(0, parts, white=1.0, black=-1.0), attempt(1, parts, white=0.0, black=0.0))
    paid = [RoleEstimator(role=role, policy="a", estimator=CENTRED) for role in ("white", "black")]
    rows = MultiAgentEstimator(roles=paid)(made)
    assert [(r.policy, worth(r)) for r in rows] == [("a", 0.5), ("a", -0.5), ("a", -0.5), ("a", 0.5)]


def test_a_role_that_had_no_part_gives_a_row_that_teaches_nothing():
    made = group(attempt(0, [("a", "a")], a=1.0), attempt(1, [("a", "a"), ("b", "b")], a=0.0, b=3.0))
    rows = MultiAgentEstimator(
        roles=[
            RoleEstimator(role="a", policy="a", estimator=CENTRED),
            RoleEstimator(role="b", policy="b", estimator=CENTRED),
        ]
    )(made)
    of_b = {row.trajectory: row for row in rows if row.policy == "b"}
    assert not of_b[0].mask.any() and of_b[0].samples_per_trajectory == 1
    assert worth(of_b[1]) == 0.0, "alone in its group"


def test_roles_that_earn_together_have_the_whole_reward():
    made = Trajectory(
        branches=(branch("a", 1), branch("b", 1)),
        status=Status.COMPLETED,
        reward=Reward(value=2.0),
        metadata={ROLES: ["a", "b"]},
    )
    assert [select_role_part(made, role).reward.value for role in ("a", "b")] == [2.0, 2.0]
    assert select_role_part(made, "c") is None
