"""May a group be trained on? Each function is a core.protocols.Filter."""

from miles.core.protocols import Verdict
from miles.core.types import Group

KEPT = Verdict(keep=True)


def keep_all(group: Group) -> Verdict:
    """Every group teaches something."""
    return KEPT


def nonzero_std(group: Group) -> Verdict:
    """A group whose rewards all agree has no advantage to learn from; the reason says what they agree on."""
    rewards = group.rewards
    if len(set(rewards)) > 1:
        return KEPT
    return Verdict(keep=False, reason=f"zero_std_{round(rewards[0], 1):g}")


check_reward_nonzero_std = nonzero_std
