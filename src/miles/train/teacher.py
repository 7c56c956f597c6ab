"""Teachers: frozen models that score the tokens the policy drew.

The logits of all tokens at once would be the largest tensors of a training step, twice. Here only one chunk of the
policy's and of the teacher's exists; the forward keeps one number a token, and the backward computes each chunk again.

``_R`` trained tokens, ``_C`` tokens of a chunk, ``D`` hidden size of the policy and ``E`` of the teacher,
``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.algo.config import AlgoConfig, distils
from miles.algo.distill import TOKEN_SETS, TopK, log_ratios, mean_under, sampled_signal, slope
from miles.algo.objective import Terms
from miles.algo.reduce import Layout
from miles.train.logits import Backward, Output, chunk_rows, log_softmax_of, logprobs
from miles.train.roles import TrainModel
from miles.train.rows import Rows, samples_of


def reverse_kl(
    policy: Output,
    teacher: Output,
    target_R: Tensor,
    *,
    temperature: float = 1.0,
    top: TopK | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """KL(policy || teacher) of each token, differentiable by the policy, and the teacher's log-prob of each target.

    With ``top``, tokens outside its set count as one. ``chunk`` tokens' logits exist at a time.
    """
    rows = chunk or max(1, chunk_rows(policy.head_VD) // 2)
    how = _How(temperature=temperature, top=top, rows=rows, softcap=policy.softcap, teacher_softcap=teacher.softcap)
    held = (policy.hidden_RD, policy.head_VD, teacher.hidden_RD.detach(), teacher.head_VD.detach(), target_R)
    return _ReverseKl.apply(*held, how)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    temperature: float
    top: TopK | None
    rows: int
    softcap: float | None
    teacher_softcap: float | None


class _ReverseKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        taught_RE: Tensor,
        teacher_VE: Tensor,
        target_R: Tensor,
        how: _How,
    ) -> tuple[Tensor, Tensor]:
        ctx.how = how
        ctx.set_materialize_grads(False)
        parts: list[tuple[Tensor, Tensor]] = []
        for start in range(0, max(len(hidden_RD), 1), how.rows):
            part = slice(start, start + how.rows)
            logp_CV, _ = log_softmax_of(hidden_RD[part], head_VD, how.temperature, how.softcap)
            taught_CV, _ = log_softmax_of(taught_RE[part], teacher_VE, how.temperature, how.teacher_softcap)
            said_C = taught_CV.gather(1, target_R[part, None]).squeeze(1)
            parts.append((mean_under(logp_CV, log_ratios(logp_CV, taught_CV, how.top)), said_C))
        kl_R, said_R = torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])
        ctx.save_for_backward(hidden_RD, head_VD, taught_RE, teacher_VE, kl_R)
        ctx.mark_non_differentiable(said_R)
        return kl_R, said_R

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_R: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        if grad_R is None:
            return None, None, None, None, None, None
        hidden_RD, head_VD, taught_RE, teacher_VE, kl_R = ctx.saved_tensors
        how: _How = ctx.how
        chunks = range(0, max(len(hidden_RD), 1), how.rows)
        back = Backward(head_VD, chunks=len(chunks), wide=kl_R.dtype, needs=ctx.needs_input_grad[:2])
        for start in chunks:
            part = slice(start, start + how.rows)
            logp_CV, bend_CV = log_softmax_of(hidden_RD[part], head_VD, how.temperature, how.softcap)
            taught_CV, _ = log_softmax_of(taught_RE[part], teacher_VE, how.temperature, how.teacher_softcap)
            grad_CV = slope(logp_CV, log_ratios(logp_CV, taught_CV, how.top), kl_R[part])
            grad_CV = grad_CV.mul_(grad_R[part, None]).div_(how.temperature)
            back.add(grad_CV if bend_CV is None else grad_CV.mul_(bend_CV), hidden_RD[part])
        return *back.done(), None, None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one teacher made of its samples; ``at_R`` are their tokens among those of the micro-batch, None for all."""

    teacher: Output
    at_R: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """The teachers' log-probs of the drawn tokens and, where it is exact, the reverse KL with its gradient."""

    said_R: Tensor
    kl_R: Tensor | None
    coef: float

    def advantage(self, advantage_R: Tensor, old_logp_R: Tensor) -> Tensor:
        """What a token is worth, with what the teacher adds to it unless the KL itself is in the loss."""
        if self.kl_R is not None:
            return advantage_R
        return advantage_R + self.coef * sampled_signal(self.said_R, old_logp_R)

    def added(self, terms: Terms, old_logp_R: Tensor, layout: Layout) -> Terms:
        """A micro-batch's part of the loss with the KL, where that is in it, and with the metrics of the lesson."""
        loss, metrics = terms.loss, dict(terms.metrics)
        kl_R = -sampled_signal(self.said_R, old_logp_R) if self.kl_R is None else self.kl_R.detach()
        metrics |= {"distill_kl": layout.mean(kl_R), "teacher_logp": layout.mean(self.said_R)}
        if self.kl_R is not None:
            loss = loss + self.coef * layout.reduce(self.kl_R)
            metrics["loss"] = loss.detach()
        return Terms(loss=loss, metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Teachers:
    """Scores every sample by its own one of the frozen ``models``; the first one where a sample names none.

    ``exact``: minimise the reverse KL itself, over the tokens of ``top`` where that is given; else reward the drawn
    tokens by it. Logits are divided by ``temperature``; ``chunk`` tokens' exist at a time.
    """

    models: Sequence[TrainModel]
    coef: float
    temperature: float
    chunk: int | None
    exact: bool = False
    top: TopK | None = None

    @torch.no_grad()
    def read(self, rows: Rows, output_of: Callable[[TrainModel, Rows], Output]) -> list[Heard]:
        """One forward through each teacher that has a sample here; experts are the teacher's own choice."""
        rows = replace(rows, replay_TLk=None)
        wanted = rows.teachers or (0,) * len(rows.lengths)
        heard: list[Heard] = []
        for number in sorted(set(wanted)):
            own, at_R = rows, None
            if len(set(wanted)) > 1:
                own, at_R = samples_of(rows, [i for i, w in enumerate(wanted) if w == number])
            heard.append(Heard(teacher=output_of(self.models[number], own), at_R=at_R))
        return heard

    def lesson(self, heard: Sequence[Heard], policy: Output, target_R: Tensor) -> Lesson:
        """What is to be learnt, given the policy's own output at all of the micro-batch's tokens."""
        how = {"temperature": self.temperature, "chunk": self.chunk}
        said: list[Tensor] = []
        kls: list[Tensor] = []
        for one in heard:
            drawn_R = target_R if one.at_R is None else target_R[one.at_R]
            # A vocabulary padded beyond the policy's is cut to that: the policy never draws what lies there.
            teacher = replace(one.teacher, head_VD=one.teacher.head_VD[: len(policy.head_VD)])
            if self.exact:
                own = policy
                if one.at_R is not None:
                    own = replace(policy, hidden_RD=policy.hidden_RD.index_select(0, one.at_R))
                kl_R, said_R = reverse_kl(own, teacher, drawn_R, top=self.top, **how)
                kls.append(kl_R)
            else:
                said_R, _ = logprobs(teacher.hidden_RD, teacher.head_VD, drawn_R, softcap=teacher.softcap, **how)
            said.append(said_R.detach())
        return Lesson(said_R=_joined(said, heard), kl_R=_joined(kls, heard) if kls else None, coef=self.coef)


def _joined(parts: Sequence[Tensor], heard: Sequence[Heard]) -> Tensor:
    """What the teachers' parts are, in the order of the micro-batch's tokens."""
    places = [one.at_R for one in heard if one.at_R is not None]
    return torch.cat(list(parts))[torch.cat(places).argsort()] if places else parts[0]


def teachers_of(
    config: AlgoConfig, models: Sequence[TrainModel], *, temperature: float, chunk: int | None
) -> Teachers | None:
    """How a run's teachers teach; None where it has none."""
    if not distils(config):
        return None
    assert models, "a teacher was loaded where the run was wired"
    k = config.opd_log_prob_top_k
    top = TopK(k=k, tokens=TOKEN_SETS[config.opd_top_k_strategy]) if k > 0 else None
    how = {"temperature": temperature, "chunk": chunk}
    return Teachers(models=models, coef=config.opd_kl_coef, exact=k != 0, top=top, **how)
