"""Top-k token sets for distillation: the tokens on which policy and teacher are compared at each position.

``n`` positions, ``k`` most likely tokens of either, ``S`` tokens of a set; -1 is no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from miles.core.types import Floats
from miles.rollout.distill.wire import Ids


class _Strategy(NamedTuple):
    """Which tokens a strategy keeps: those both have, those only the teacher has, those only the student has."""

    shared: bool
    teachers: bool
    students: bool


_STRATEGIES: Mapping[str, _Strategy] = MappingProxyType(
    {
        "only-student": _Strategy(shared=True, teachers=False, students=True),
        "only-teacher": _Strategy(shared=True, teachers=True, students=False),
        "intersection": _Strategy(shared=True, teachers=False, students=False),
        "union": _Strategy(shared=True, teachers=True, students=True),
        "xor": _Strategy(shared=False, teachers=True, students=True),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKSet:
    """A set build of the ``k`` most likely tokens of policy and teacher, restricted to ids below ``vocab_size``."""

    k: int
    strategy: str
    vocab_size: int

    @property
    def needs_student_top_k(self) -> bool:
        """Whether the policy's top tokens are needed."""
        return self.strategy != "only-teacher"

    @property
    def needs_teacher_top_k(self) -> bool:
        """Whether the teacher's top tokens are needed."""
        return self.strategy != "only-student"

    @property
    def scores_student_tokens(self) -> bool:
        """Whether the teacher must score the policy's top tokens, which may not be among its own."""
        return _STRATEGIES[self.strategy].students

    def build(
        self,
        top_nk: Ids | None,
        teacher_nk: Ids | None,
        teacher_logprob_nk: Floats | None,
        student_logprob_nk: Floats | None,
    ) -> tuple[Ids, Floats]:
        """Build the sets with the teacher's log-probs: from the policy's top tokens and the teacher's log-probs of
        them, and the teacher's top tokens with their log-probs; None is what was not requested."""
        strategy = _STRATEGIES[self.strategy]
        parts: list[tuple[Ids, Floats]] = []
        if teacher_nk is not None and teacher_logprob_nk is not None:
            shared_nk = np.zeros(teacher_nk.shape, bool) if top_nk is None else _is_in(teacher_nk, top_nk)
            keep_nk = np.where(shared_nk, strategy.shared, strategy.teachers) & (teacher_nk < self.vocab_size)
            parts.append(_mask_tokens(teacher_nk, teacher_logprob_nk, keep_nk))
        if strategy.students:
            assert top_nk is not None and student_logprob_nk is not None, "the policy's likeliest tokens were asked for"
            known_nk = np.zeros(top_nk.shape, bool) if teacher_nk is None else _is_in(top_nk, teacher_nk)
            parts.append(_mask_tokens(top_nk, student_logprob_nk, ~known_nk & (top_nk >= 0)))
        return np.concatenate([ids for ids, _ in parts], 1), np.concatenate([values for _, values in parts], 1)


def _is_in(ids_nk: Ids, others_nm: Ids) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return (ids_nk[:, :, None] == others_nm[:, None, :]).any(-1)


def _mask_tokens(
    ids_nk: Ids, values_nk: Floats, keep_nk: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> tuple[Ids, Floats]:
    return np.where(keep_nk, ids_nk, -1).astype(np.int32), np.where(keep_nk, values_nk, 0).astype(np.float32)
