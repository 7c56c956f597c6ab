"""Multi-agent trajectories: the role of each branch, and each role's share of the reward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from miles.core.types import Group, Reward, Trajectory

ROLES = "roles"
"""Trajectory metadata key: the role of each branch, in order. Absent if there is only one role."""


def list_roles(groups: Iterable[Group]) -> list[str]:
    """Return all roles that appear in the groups, in order of first appearance."""
    trajectories = (t for group in groups for t in group.trajectories)
    return list(dict.fromkeys(role for t in trajectories for role in t.metadata.get(ROLES, ())))


def get_role_reward(reward: Reward, role: str) -> float:
    """Return the role's own reward: the reward part of its name, or the whole reward if all roles share it."""
    return reward.parts.get(role, reward.value)


def select_role_part(trajectory: Trajectory, role: str) -> Trajectory | None:
    """Return the trajectory with only the role's branches and reward; None if the role has no branch."""
    branches = tuple(
        branch for branch, name in zip(trajectory.branches, trajectory.metadata[ROLES], strict=True) if name == role
    )
    if not branches:
        return None
    reward = trajectory.reward
    role_reward = None if reward is None else replace(reward, value=get_role_reward(reward, role))
    return replace(trajectory, branches=branches, reward=role_reward)
