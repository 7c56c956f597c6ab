"""On-policy distillation (OPD): KL between policy and teacher on the tokens that the policy sampled.

    sampled   a token's advantage is log q(token) - log p(token), whose mean is minus the reverse KL
    exact     KL(p || q) or KL(q || p) over the vocabulary, or over a token set and one bucket for all other tokens

p is the policy and q the teacher, both at the same temperature.

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
from miles.core.protocols import AdvantageEstimator
from miles.core.types import Group, Prompt, Sample

_RESOLUTION = 2.0**-24
"""Half the distance between 1 and the largest float32 below it."""
TEACHER_INDEX = "teacher"
"""Key of a sample's extras: the index of its teacher, at every token."""


class TokenSetFn(Protocol):
    """Combine masks of the teacher's and the student's top-k tokens into one token set."""

    def __call__(self, teacher_CV: Tensor, student_CV: Tensor) -> Tensor: ...


def select_teacher_tokens(teacher_CV: Tensor, student_CV: Tensor) -> Tensor:
    """only-teacher: the teacher's most likely tokens."""
    return teacher_CV


def select_student_tokens(teacher_CV: Tensor, student_CV: Tensor) -> Tensor:
    """only-student: the policy's most likely tokens, which dominate the reverse KL."""
    return student_CV


def select_union(teacher_CV: Tensor, student_CV: Tensor) -> Tensor:
    """union: the most likely tokens of the teacher and of the policy."""
    return teacher_CV | student_CV


def select_intersection(teacher_CV: Tensor, student_CV: Tensor) -> Tensor:
    """intersection: tokens that are among the most likely of both."""
    return teacher_CV & student_CV


def select_xor(teacher_CV: Tensor, student_CV: Tensor) -> Tensor:
    """xor: tokens that are among the most likely of exactly one of the two."""
    return teacher_CV ^ student_CV


TOKEN_SETS: Mapping[str, TokenSetFn] = {
    "only-student": select_student_tokens,
    "only-teacher": select_teacher_tokens,
    "intersection": select_intersection,
    "union": select_union,
    "xor": select_xor,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKTokens:
    """Token set made of the ``k`` most likely tokens of teacher and student."""

    k: int
    tokens: TokenSetFn

    def __call__(self, logp_CV: Tensor, teacher_CV: Tensor) -> Tensor:
        """Return the set as a mask."""
        return self.tokens(_top_k_mask(teacher_CV, self.k), _top_k_mask(logp_CV, self.k))


def _top_k_mask(logp_CV: Tensor, k: int) -> Tensor:
    index_Ck = logp_CV.topk(min(k, logp_CV.shape[-1]), dim=-1).indices
    return torch.zeros_like(logp_CV, dtype=torch.bool).scatter_(1, index_Ck, True)


def compute_log_ratios(logp_CV: Tensor, teacher_CV: Tensor, top: TopKTokens | None) -> Tensor:
    """Return log p/q of each token; with ``top``, tokens outside the set get the log-ratio of their common bucket.

    Its mean under p is the reverse KL, whose gradient by the logits of p is p (log-ratio - KL). With ``top`` this is
    the KL of the coarser distributions, a lower bound of the full KL.
    """
    ratio_CV = logp_CV - teacher_CV
    if top is None:
        return ratio_CV
    in_set_CV = top(logp_CV, teacher_CV)
    bucket_C = _log_mass_outside(logp_CV, in_set_CV) - _log_mass_outside(teacher_CV, in_set_CV)
    # Without a token outside the set there is no bucket.
    bucket_C = bucket_C.masked_fill(in_set_CV.all(-1), 0)
    return torch.where(in_set_CV, ratio_CV, bucket_C[:, None])


def compute_log_ratios_from_topk(logp_CV: Tensor, set_CS: Tensor, teacher_logp_CS: Tensor) -> Tensor:
    """Like ``compute_log_ratios`` for a teacher of which only the log-probs of a token set are known; -1 is no token.

    The probability of its bucket is 1 minus that of the set, within the resolution of a float32 log-prob.
    """
    valid_CS = set_CS >= 0
    index_CS = set_CS.clamp(min=0)
    # Entries without a token go to an extra last column that is cut off again.
    vocab_size = logp_CV.shape[-1]
    in_set_CV = torch.zeros(len(logp_CV), vocab_size + 1, dtype=torch.bool, device=logp_CV.device)
    in_set_CV = in_set_CV.scatter_(1, torch.where(valid_CS, index_CS, vocab_size), True)[:, :vocab_size]
    set_mass_C = teacher_logp_CS.double().exp().masked_fill(~valid_CS, 0).sum(-1)
    teacher_bucket_C = (1 - set_mass_C).clamp(min=_RESOLUTION).log().to(logp_CV.dtype)
    bucket_C = (_log_mass_outside(logp_CV, in_set_CV) - teacher_bucket_C).masked_fill(in_set_CV.all(-1), 0)
    # With an empty set the bucket has all the mass of both.
    bucket_C = bucket_C.masked_fill(~in_set_CV.any(-1), 0)
    ratio_CV = torch.where(in_set_CV, logp_CV, bucket_C[:, None])
    ratio_CV = torch.cat([ratio_CV, bucket_C[:, None]], 1)
    teacher_logp_CS = teacher_logp_CS.to(logp_CV.dtype).masked_fill(~valid_CS, 0)
    return ratio_CV.scatter_add_(1, torch.where(valid_CS, index_CS, vocab_size), -teacher_logp_CS)[:, :vocab_size]


def _log_mass_outside(logp_CV: Tensor, in_set_CV: Tensor) -> Tensor:
    return logp_CV.masked_fill(in_set_CV, -torch.inf).logsumexp(-1)


def reverse_kl(logp_CV: Tensor, ratio_CV: Tensor) -> Tensor:
    """student_p: the reverse KL, KL(p || q), from the result of ``compute_log_ratios``."""
    return torch.linalg.vecdot(logp_CV.exp(), ratio_CV)


def reverse_kl_grad(logp_CV: Tensor, ratio_CV: Tensor, kl_C: Tensor) -> Tensor:
    """Return the gradient of the reverse KL by the policy's logits; exactly 0 where teacher and policy agree."""
    return (ratio_CV - kl_C[:, None]).mul_(logp_CV.exp())


@dataclass(frozen=True, slots=True, kw_only=True)
class KLDirection:
    """Reverse or forward KL of a token, and its gradient by the policy's logits."""

    kl: Callable[[Tensor, Tensor], Tensor]
    grad: Callable[[Tensor, Tensor, Tensor], Tensor]


def forward_kl(logp_CV: Tensor, ratio_CV: Tensor) -> Tensor:
    """teacher_p: the forward KL, KL(q || p), large where the teacher puts mass and the policy does not."""
    return torch.linalg.vecdot((logp_CV - ratio_CV).exp(), -ratio_CV)


def forward_kl_grad(logp_CV: Tensor, ratio_CV: Tensor, kl_C: Tensor) -> Tensor:
    """Return the gradient of the forward KL by the policy's logits: p - q, with the bucket's q distributed like p."""
    return logp_CV.exp().sub_((logp_CV - ratio_CV).exp_())


KL_DIRECTIONS: Mapping[str, KLDirection] = {
    "student_p": KLDirection(kl=reverse_kl, grad=reverse_kl_grad),
    "teacher_p": KLDirection(kl=forward_kl, grad=forward_kl_grad),
}


def distillation_advantage(teacher_logp_R: Tensor, old_logp_R: Tensor) -> Tensor:
    """Return a sampled token's advantage: the teacher's log-prob minus the log-prob at sampling time."""
    return teacher_logp_R - old_logp_R


# -- teacher selection --------------------------------------------------------------------------


def resolve_teacher(prompt: Prompt, names: Sequence[str], key: str) -> int:
    """Return the index of a prompt's teacher: the one named by ``metadata[key]``, else the default one."""
    requested = prompt.metadata.get(key)
    name = DEFAULT_TEACHER if requested is None else str(requested)
    if name in names:
        return list(names).index(name)
    if requested is None:
        raise DataError(
            f"prompt {prompt.id} names no teacher in metadata[{key!r}]; add one, or set a default teacher with "
            "--opd-teacher-load, or with an address without a name in --opd-teacher-urls."
        )
    raise DataError(
        f"prompt {prompt.id} names teacher {name} in metadata[{key!r}], but the teachers are {', '.join(names)}; fix "
        "the name, or add that teacher to --opd-teachers or --opd-teacher-urls."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherAssignedEstimator:
    """An advantage estimator whose samples carry the index of their teacher among ``names``."""

    estimator: AdvantageEstimator
    names: tuple[str, ...]
    key: str

    def __call__(self, group: Group) -> Sequence[Sample]:
        index = resolve_teacher(group.prompt, self.names, self.key)
        return [
            replace(sample, extras={**sample.extras, TEACHER_INDEX: np.full(len(sample), index, np.int16)})
            for sample in self.estimator(group)
        ]
