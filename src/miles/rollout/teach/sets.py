"""The tokens that policy and teacher are compared on one by one, at each place: from whose top tokens they are made.

``n`` places, ``k`` of the likeliest tokens of either, ``S`` tokens of a set; -1 is no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from miles.core.types import Floats
from miles.rollout.teach.wire import Ids


class _Kept(NamedTuple):
    """Which of the teacher's tokens belong, and which of the policy's own: those both have, and those one has alone."""

    shared: bool
    teachers: bool
    students: bool


_KEPT: Mapping[str, _Kept] = MappingProxyType(
    {
        "only-student": _Kept(shared=True, teachers=False, students=True),
        "only-teacher": _Kept(shared=True, teachers=True, students=False),
        "intersection": _Kept(shared=True, teachers=False, students=False),
        "union": _Kept(shared=True, teachers=True, students=True),
        "xor": _Kept(shared=False, teachers=True, students=True),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSet:
    """A set made of the ``k`` likeliest tokens of policy and teacher, of those below ``vocabulary``."""

    k: int
    strategy: str
    vocabulary: int

    @property
    def asks_student(self) -> bool:
        """Must the policy's likeliest tokens be known?"""
        return self.strategy != "only-teacher"

    @property
    def asks_teacher(self) -> bool:
        """Must the teacher's?"""
        return self.strategy != "only-student"

    @property
    def watches(self) -> bool:
        """Must the teacher be asked about tokens that may not be among its own likeliest?"""
        return _KEPT[self.strategy].students

    def made(
        self, top_nk: Ids | None, teacher_nk: Ids | None, teacher_logprob_nk: Floats | None, watched_nk: Floats | None
    ) -> tuple[Ids, Floats]:
        """The sets with the teacher's log-probs: from the policy's tokens and what the teacher gives them, its own
        likeliest and theirs; None what was not asked for."""
        kept = _KEPT[self.strategy]
        parts: list[tuple[Ids, Floats]] = []
        if teacher_nk is not None and teacher_logprob_nk is not None:
            shared_nk = np.zeros(teacher_nk.shape, bool) if top_nk is None else _among(teacher_nk, top_nk)
            take_nk = np.where(shared_nk, kept.shared, kept.teachers) & (teacher_nk < self.vocabulary)
            parts.append(_only(teacher_nk, teacher_logprob_nk, take_nk))
        if kept.students:
            assert top_nk is not None and watched_nk is not None, "the policy's likeliest tokens were asked for"
            known_nk = np.zeros(top_nk.shape, bool) if teacher_nk is None else _among(top_nk, teacher_nk)
            parts.append(_only(top_nk, watched_nk, ~known_nk & (top_nk >= 0)))
        return np.concatenate([ids for ids, _ in parts], 1), np.concatenate([values for _, values in parts], 1)


def _among(ids_nk: Ids, others_nm: Ids) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return (ids_nk[:, :, None] == others_nm[:, None, :]).any(-1)


def _only(
    ids_nk: Ids, values_nk: Floats, take_nk: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> tuple[Ids, Floats]:
    return np.where(take_nk, ids_nk, -1).astype(np.int32), np.where(take_nk, values_nk, 0).astype(np.float32)
