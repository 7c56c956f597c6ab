"""Several roles in one trajectory: whose part each branch is, and what that part earned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from miles.core.types import Group, Reward, Trajectory

ROLES = "roles"
"""In a trajectory's metadata: the role of each of its branches, in their order. Missing where there is only one."""


def roles_in(groups: Iterable[Group]) -> list[str]:
    """The roles that have a part in any of the groups, in the order they are met."""
    tries = (t for group in groups for t in group.trajectories)
    return list(dict.fromkeys(role for t in tries for role in t.metadata.get(ROLES, ())))


def earned(reward: Reward, role: str) -> float:
    """A role's own share of a reward: the part of its name, or all of it where the roles earn together."""
    return reward.parts.get(role, reward.value)


def part_of(trajectory: Trajectory, role: str) -> Trajectory | None:
    """The trajectory as the role has it: its branches, its reward; None where it had no part."""
    branches = tuple(
        branch for branch, name in zip(trajectory.branches, trajectory.metadata[ROLES], strict=True) if name == role
    )
    if not branches:
        return None
    reward = trajectory.reward
    own = None if reward is None else replace(reward, value=earned(reward, role))
    return replace(trajectory, branches=branches, reward=own)
