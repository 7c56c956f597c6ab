"""On-policy distillation: what a teacher says of the very tokens the policy drew, as something to learn from.

    sampled   a token is worth log q(token) - log p(token); its mean is minus the reverse KL, and so is the gradient's
    exact     KL(p || q) or KL(q || p) over the vocabulary, or over a set of tokens and one bucket for all others

p is the policy and q the teacher, both at one temperature.

``_R`` trained tokens of a micro-batch, ``_C`` tokens of a chunk, ``V`` vocabulary, ``S`` tokens of a set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from miles.algo.config import DEFAULT_TEACHER
from miles.core.errors import DataError
from miles.core.protocols import Credit
from miles.core.types import Group, Prompt, Sample

_RESOLUTION = 2.0**-24
"""Half of what sets the largest float32 below 1 apart from 1."""
TEACHER = "teacher"
"""The name under which a sample's extras hold the number of its teacher, at every token."""


class TokenSet(Protocol):
    """The largest tokens of teacher and student, as masks -> the tokens that are looked at one by one."""

    def __call__(self, teacher_CV: Tensor, student_CV: Tensor) -> Tensor: ...


def of_teacher(teacher_CV: Tensor, student_CV: Tensor) -> Tensor:
    """only-teacher: the teacher's most likely tokens."""
    return teacher_CV


def of_student(teacher_CV: Tensor, student_CV: Tensor) -> Tensor:
    """only-student: the policy's most likely tokens, where nearly all of a reverse KL lies."""
    return student_CV


def of_either(teacher_CV: Tensor, student_CV: Tensor) -> Tensor:
    """union: those of the teacher and those of the policy."""
    return teacher_CV | student_CV


def of_both(teacher_CV: Tensor, student_CV: Tensor) -> Tensor:
    """intersection: those that are among the most likely of both."""
    return teacher_CV & student_CV


def of_one(teacher_CV: Tensor, student_CV: Tensor) -> Tensor:
    """xor: those of one that are not the other's."""
    return teacher_CV ^ student_CV


TOKEN_SETS: Mapping[str, TokenSet] = {
    "only-student": of_student,
    "only-teacher": of_teacher,
    "intersection": of_both,
    "union": of_either,
    "xor": of_one,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Which tokens are looked at one by one: a set made of the ``k`` most likely of each."""

    k: int
    tokens: TokenSet

    def __call__(self, logp_CV: Tensor, teacher_CV: Tensor) -> Tensor:
        """The set as a mask."""
        return self.tokens(_largest(teacher_CV, self.k), _largest(logp_CV, self.k))


def _largest(logp_CV: Tensor, k: int) -> Tensor:
    at_Ck = logp_CV.topk(min(k, logp_CV.shape[-1]), dim=-1).indices
    return torch.zeros_like(logp_CV, dtype=torch.bool).scatter_(1, at_Ck, True)


def log_ratios(logp_CV: Tensor, teacher_CV: Tensor, top: TopK | None) -> Tensor:
    """log p/q of each token; with ``top``, of the bucket of all others for each token that is not in the set.

    The mean of it under p is the reverse KL, whose slope by the logits of p is p (log-ratio - KL): with ``top`` of
    the coarser distributions, which never are further apart than the whole ones.
    """
    ratio_CV = logp_CV - teacher_CV
    if top is None:
        return ratio_CV
    seen_CV = top(logp_CV, teacher_CV)
    others_C = _left(logp_CV, seen_CV) - _left(teacher_CV, seen_CV)
    # There is no bucket where every token is in the set.
    others_C = others_C.masked_fill(seen_CV.all(-1), 0)
    return torch.where(seen_CV, ratio_CV, others_C[:, None])


def set_ratios(logp_CV: Tensor, set_CS: Tensor, taught_CS: Tensor) -> Tensor:
    """The same for a teacher of whom only the log-probs ``taught_CS`` of some tokens are known; -1 is no token.

    What it leaves to all others is what is missing to 1, as far as a float32 log-prob tells.
    """
    known_CS = set_CS >= 0
    at_CS = set_CS.clamp(min=0)
    # Where there is no token its neighbour to the right is a column that is cut off again.
    aside = logp_CV.shape[-1]
    seen_CV = torch.zeros(len(logp_CV), aside + 1, dtype=torch.bool, device=logp_CV.device)
    seen_CV = seen_CV.scatter_(1, torch.where(known_CS, at_CS, aside), True)[:, :aside]
    held_C = taught_CS.double().exp().masked_fill(~known_CS, 0).sum(-1)
    taught_C = (1 - held_C).clamp(min=_RESOLUTION).log().to(logp_CV.dtype)
    others_C = (_left(logp_CV, seen_CV) - taught_C).masked_fill(seen_CV.all(-1), 0)
    # With no token in the set the bucket holds all of either.
    others_C = others_C.masked_fill(~seen_CV.any(-1), 0)
    ratio_CV = torch.where(seen_CV, logp_CV, others_C[:, None])
    ratio_CV = torch.cat([ratio_CV, others_C[:, None]], 1)
    taught_CS = taught_CS.to(logp_CV.dtype).masked_fill(~known_CS, 0)
    return ratio_CV.scatter_add_(1, torch.where(known_CS, at_CS, aside), -taught_CS)[:, :aside]


def _left(logp_CV: Tensor, seen_CV: Tensor) -> Tensor:
    return logp_CV.masked_fill(seen_CV, -torch.inf).logsumexp(-1)


def mean_under(logp_CV: Tensor, ratio_CV: Tensor) -> Tensor:
    """student_p: the reverse KL, KL(p || q), from what ``log_ratios`` gave."""
    return torch.linalg.vecdot(logp_CV.exp(), ratio_CV)


def slope(logp_CV: Tensor, ratio_CV: Tensor, kl_C: Tensor) -> Tensor:
    """By how much the reverse KL rises with each logit of the policy; exactly 0 where teacher and policy agree."""
    return (ratio_CV - kl_C[:, None]).mul_(logp_CV.exp())


@dataclass(frozen=True, slots=True, kw_only=True)
class Weigh:
    """By whose probability log-ratios are weighed: the divergence of a token, and how it rises with each logit."""

    mean: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor, Tensor], Tensor]


def mean_under_teacher(logp_CV: Tensor, ratio_CV: Tensor) -> Tensor:
    """teacher_p: the forward KL, KL(q || p), which is large wherever the teacher would go and the policy would not."""
    return torch.linalg.vecdot((logp_CV - ratio_CV).exp(), -ratio_CV)


def slope_to_teacher(logp_CV: Tensor, ratio_CV: Tensor, kl_C: Tensor) -> Tensor:
    """By how much the forward KL rises with each logit of the policy: p - q, the bucket's q shared out as p is."""
    return logp_CV.exp().sub_((logp_CV - ratio_CV).exp_())


WEIGHTS: Mapping[str, Weigh] = {
    "student_p": Weigh(mean=mean_under, slope=slope),
    "teacher_p": Weigh(mean=mean_under_teacher, slope=slope_to_teacher),
}


def sampled_signal(teacher_logp_R: Tensor, old_logp_R: Tensor) -> Tensor:
    """What a drawn token is worth: by how much the teacher finds it likelier than the policy that drew it did."""
    return teacher_logp_R - old_logp_R


# -- which teacher ----------------------------------------------------------------------------


def teacher_of(prompt: Prompt, names: Sequence[str], key: str) -> int:
    """The number of a prompt's teacher: the one its metadata name under ``key``, else the default one."""
    named = prompt.metadata.get(key)
    name = DEFAULT_TEACHER if named is None else str(named)
    if name in names:
        return list(names).index(name)
    if named is None:
        raise DataError(
            f"prompt {prompt.id} names no teacher in metadata[{key!r}]; mend it, or give one to all such prompts with "
            "--opd-teacher-load, or with an address alone in --opd-teacher-urls."
        )
    raise DataError(
        f"prompt {prompt.id} asks in metadata[{key!r}] for the teacher {name}, and there are {', '.join(names)}; mend "
        "it, or add that teacher to --opd-teachers or --opd-teacher-urls."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A credit whose rows say which of the teachers ``names`` scores them."""

    credit: Credit
    names: tuple[str, ...]
    key: str

    def __call__(self, group: Group) -> Sequence[Sample]:
        number = teacher_of(group.prompt, self.names, self.key)
        return [
            replace(row, extras={**row.extras, TEACHER: np.full(len(row), number, np.int16)})
            for row in self.credit(group)
        ]
