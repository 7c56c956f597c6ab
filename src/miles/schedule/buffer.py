"""Which of the groups that wait is trained on next, and whether it still is."""

from __future__ import annotations

from collections.abc import Sequence

from miles.core.errors import PlugError
from miles.core.plugs import DataBuffer
from miles.core.protocols import Verdict
from miles.core.types import Group, Version

KEPT = Verdict(keep=True)


def keep_waiting(group: Group, version: Version) -> Verdict:
    """A group that waited is trained on."""
    return KEPT


def freshest(waiting: Sequence[Group], version: Version) -> int:
    """The group whose oldest token is youngest; of several, the one that was asked for first."""
    written = [[t.oldest.number for t in group.trajectories if t.oldest is not None] for group in waiting]
    ages = [min(numbers, default=version.number) for numbers in written]
    return ages.index(max(ages))


def chosen(choose: DataBuffer, waiting: Sequence[Group], version: Version) -> int:
    """What ``choose`` answers, if there is such a group."""
    place = choose(waiting, version)
    if not isinstance(place, int) or not 0 <= place < len(waiting):
        raise PlugError(
            f"The data buffer chose {place!r} of {len(waiting)} waiting groups; it gives the place of one, from 0."
        )
    return place
