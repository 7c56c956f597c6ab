"""Credit where several policies meet in an attempt: each role is paid for its own part, and compared with its like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from miles.algo.credit import rows_of
from miles.core.protocols import Credit
from miles.core.roles import part_of
from miles.core.types import Author, Group, Sample, Span, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Paid:
    """How a role's part becomes rows, and the ``policy`` whose weights learn from them."""

    role: str
    policy: str
    credit: Credit


@dataclass(frozen=True, slots=True, kw_only=True)
class CastCredit:
    """A core.protocols.Credit. A role's reward is held against what the same role earned in the other attempts.

    A role's branches of an attempt share its reward and one loss denominator. An attempt in which a role had no part
    gives it a row without a trained token, so that every batch has as many of each; it is compared with nothing.
    """

    roles: Sequence[Paid]

    def __call__(self, group: Group) -> Sequence[Sample]:
        return [row for paid in self.roles for row in _rows(group, paid)]


def _rows(group: Group, paid: Paid) -> list[Sample]:
    parts = [part_of(t, paid.role) for t in group.trajectories]
    present = tuple(part for part in parts if part is not None)
    rows = list(paid.credit(replace(group, trajectories=present))) if present else []
    for trajectory, part in zip(group.trajectories, parts, strict=True):
        if part is None:
            rows += rows_of(group.prompt.id, _silent(trajectory), worth=0.0, trained=Author.POLICY)
    return [replace(row, policy=paid.policy) for row in rows]


def _silent(trajectory: Trajectory) -> Trajectory:
    """The same attempt with nothing in it to learn from."""
    nothing = Span(author=Author.PROMPT, tokens=np.zeros(1, np.int32))
    return replace(trajectory, branches=((nothing,),), reward=None)
