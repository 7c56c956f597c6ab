"""May a group be trained on? Each function is a core.protocols.Filter."""

from miles.core.protocols import Verdict
from miles.core.roles import ROLES, earned, roles_in
from miles.core.types import Group

KEPT = Verdict(keep=True)


def keep_all(group: Group) -> Verdict:
    """Every group teaches something."""
    return KEPT


def nonzero_std(group: Group) -> Verdict:
    """A group whose rewards all agree has no advantage to learn from; the reason says what they agree on.

    Where several roles earn for themselves, one whose rewards differ is enough.
    """
    rewards = group.rewards
    if len(set(rewards)) > 1 or any(_differs(group, role) for role in roles_in([group])):
        return KEPT
    return Verdict(keep=False, reason=f"zero_std_{round(rewards[0], 1):g}")


def _differs(group: Group, role: str) -> bool:
    return len({earned(t.reward, role) for t in group.trajectories if t.reward and role in t.metadata[ROLES]}) > 1


check_reward_nonzero_std = nonzero_std
