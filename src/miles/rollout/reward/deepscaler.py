"""Answers after thinking: the box must come after the thought has ended."""

from __future__ import annotations

from miles.rollout.reward import math

_ENDINGS = ("</think>", "###Response")


def sides(reply: str, label: str) -> tuple[str, str] | None:
    """The last box after the last end of thinking, and the label's value; None when either is not there."""
    wanted = math.truth(label)
    for ending in _ENDINGS:
        if ending in reply:
            return math.sides(reply.rpartition(ending)[2], wanted)
    return None
