"""Dynamic sampling filters: whether a group is trained on. Each function is a core.protocols.Filter."""

from dataclasses import replace

from miles.core.agents import ROLES, get_role_reward, list_roles
from miles.core.protocols import Filter, FilterResult
from miles.core.types import UNSCORED, Group

KEPT = FilterResult(keep=True)


def keep_all(group: Group) -> FilterResult:
    """Keep every group."""
    return KEPT


def drop_unscored(group_filter: Filter) -> Filter:
    """The filter of the scored trajectories of a group; a group without any is dropped."""

    def keep(group: Group) -> FilterResult:
        scored = group.scored_trajectories
        if group.trajectories and not scored:
            return FilterResult(keep=False, reason=UNSCORED)
        return group_filter(group if len(scored) == len(group.trajectories) else replace(group, trajectories=scored))

    return keep


def nonzero_std(group: Group) -> FilterResult:
    """Drop a group whose rewards are all equal, since its advantages are zero; the reason names the reward.

    Where several roles have their own rewards, one whose rewards differ is enough.
    """
    rewards = group.rewards
    if len(set(rewards)) > 1 or any(_differs(group, role) for role in list_roles([group])):
        return KEPT
    return FilterResult(keep=False, reason=f"zero_std_{round(rewards[0], 1):g}")


def _differs(group: Group, role: str) -> bool:
    return (
        len({get_role_reward(t.reward, role) for t in group.trajectories if t.reward and role in t.metadata[ROLES]}) > 1
    )


check_reward_nonzero_std = nonzero_std
