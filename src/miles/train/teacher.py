"""Teachers: frozen models that score the tokens the policy drew, here or elsewhere.

The logits of all tokens at once would be the largest tensors of a training step, twice. Here only one chunk of the
policy's and of the teacher's exists; the forward keeps one number a token, and the backward computes each chunk again.

``_R`` trained tokens, ``_C`` tokens of a chunk, ``D`` hidden size of the policy and ``E`` of the teacher,
``V`` vocabulary, ``S`` tokens of a set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.algo.config import AlgoConfig, distils
from miles.algo.distill import TOKEN_SETS, WEIGHTS, TopK, Weigh, log_ratios, sampled_signal, set_ratios
from miles.algo.objective import Terms
from miles.algo.reduce import Layout
from miles.core.errors import MilesError
from miles.train.logits import Backward, Output, chunk_rows, log_softmax_of, logprobs
from miles.train.roles import TrainModel
from miles.train.rows import Rows, Told, samples_of


class Judge(Protocol):
    """Holds the policy's distributions against a teacher's; ``part`` says which of the tokens a chunk has."""

    def __call__(self, part: slice, logp_CV: Tensor) -> tuple[Tensor, Tensor]:
        """log p/q as ``log_ratios`` gives it, and the teacher's log-prob of each token's target."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """A teacher whose output is at hand; with ``top``, tokens outside its set count as one."""

    teacher: Output
    target_R: Tensor
    temperature: float = 1.0
    top: TopK | None = None

    def __call__(self, part: slice, logp_CV: Tensor) -> tuple[Tensor, Tensor]:
        hidden_CE, head_VE = self.teacher.hidden_RD[part].detach(), self.teacher.head_VD.detach()
        taught_CV, _ = log_softmax_of(hidden_CE, head_VE, self.temperature, self.teacher.softcap)
        said_C = taught_CV.gather(1, self.target_R[part, None]).squeeze(1)
        return log_ratios(logp_CV, taught_CV, self.top), said_C


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A teacher of whom only what it said of some tokens is known, those of a set at each place."""

    told: Told

    def __call__(self, part: slice, logp_CV: Tensor) -> tuple[Tensor, Tensor]:
        assert self.told.set_RS is not None and self.told.said_RS is not None
        set_CS, said_CS = self.told.set_RS[part], self.told.said_RS[part]
        return set_ratios(logp_CV, set_CS, said_CS), self.told.said_R[part].to(logp_CV.dtype)


def divergence(
    policy: Output,
    judge: Judge,
    *,
    temperature: float = 1.0,
    weigh: Weigh = WEIGHTS["student_p"],
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The divergence of policy and teacher at each token, differentiable by the policy, and what the judge said.

    ``chunk`` tokens' logits exist at a time.
    """
    rows = chunk or max(1, chunk_rows(policy.head_VD) // 2)
    how = _How(temperature=temperature, judge=judge, weigh=weigh, rows=rows, softcap=policy.softcap)
    return _Divergence.apply(policy.hidden_RD, policy.head_VD, how)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    temperature: float
    judge: Judge
    weigh: Weigh
    rows: int
    softcap: float | None


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, head_VD: Tensor, how: _How) -> tuple[Tensor, Tensor]:
        ctx.how = how
        ctx.set_materialize_grads(False)
        parts: list[tuple[Tensor, Tensor]] = []
        for start in range(0, max(len(hidden_RD), 1), how.rows):
            part = slice(start, start + how.rows)
            logp_CV, _ = log_softmax_of(hidden_RD[part], head_VD, how.temperature, how.softcap)
            ratio_CV, said_C = how.judge(part, logp_CV)
            parts.append((how.weigh.mean(logp_CV, ratio_CV), said_C))
        kl_R, said_R = torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])
        ctx.save_for_backward(hidden_RD, head_VD, kl_R)
        ctx.mark_non_differentiable(said_R)
        return kl_R, said_R

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_R: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        if grad_R is None:
            return None, None, None
        hidden_RD, head_VD, kl_R = ctx.saved_tensors
        how: _How = ctx.how
        chunks = range(0, max(len(hidden_RD), 1), how.rows)
        back = Backward(head_VD, chunks=len(chunks), wide=kl_R.dtype, needs=ctx.needs_input_grad[:2])
        for start in chunks:
            part = slice(start, start + how.rows)
            logp_CV, bend_CV = log_softmax_of(hidden_RD[part], head_VD, how.temperature, how.softcap)
            ratio_CV, _ = how.judge(part, logp_CV)
            grad_CV = how.weigh.slope(logp_CV, ratio_CV, kl_R[part])
            grad_CV = grad_CV.mul_(grad_R[part, None]).div_(how.temperature)
            back.add(grad_CV if bend_CV is None else grad_CV.mul_(bend_CV), hidden_RD[part])
        return *back.done(), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one teacher made of its samples; ``at_R`` are their tokens among those of the micro-batch, None for all."""

    teacher: Output
    at_R: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """The teachers' log-probs of the drawn tokens and, where it is exact, the divergence with its gradient."""

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


class Teaching(Protocol):
    """Where lessons come from."""

    def read(self, rows: Rows, output_of: Callable[[TrainModel, Rows], Output]) -> list[Heard]:
        """What must be computed before the policy's own forward."""
        ...

    def lesson(self, heard: Sequence[Heard], policy: Output, rows: Rows) -> Lesson:
        """What is to be learnt, given the policy's own output at all of the micro-batch's tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Teachers:
    """Scores every sample by its own one of the frozen ``models``; the first one where a sample names none.

    ``exact``: minimise the divergence itself, over the tokens of ``top`` where that is given; else reward the drawn
    tokens by the reverse KL. Logits are divided by ``temperature``; ``chunk`` tokens' exist at a time.
    """

    models: Sequence[TrainModel]
    coef: float
    temperature: float
    chunk: int | None
    exact: bool = False
    top: TopK | None = None
    weigh: Weigh = WEIGHTS["student_p"]

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

    def lesson(self, heard: Sequence[Heard], policy: Output, rows: Rows) -> Lesson:
        how = {"temperature": self.temperature, "chunk": self.chunk}
        said: list[Tensor] = []
        kls: list[Tensor] = []
        for one in heard:
            drawn_R = rows.target_R if one.at_R is None else rows.target_R[one.at_R]
            # A vocabulary padded beyond the policy's is cut to that: the policy never draws what lies there.
            teacher = replace(one.teacher, head_VD=one.teacher.head_VD[: len(policy.head_VD)])
            if self.exact:
                own = policy
                if one.at_R is not None:
                    own = replace(policy, hidden_RD=policy.hidden_RD.index_select(0, one.at_R))
                judge = Here(teacher=teacher, target_R=drawn_R, temperature=self.temperature, top=self.top)
                kl_R, said_R = divergence(own, judge, weigh=self.weigh, **how)
                kls.append(kl_R)
            else:
                said_R, _ = logprobs(teacher.hidden_RD, teacher.head_VD, drawn_R, softcap=teacher.softcap, **how)
            said.append(said_R.detach())
        return Lesson(said_R=_joined(said, heard), kl_R=_joined(kls, heard) if kls else None, coef=self.coef)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Teachers elsewhere: what they said came with the samples. The fields are those of ``Teachers``."""

    coef: float
    temperature: float
    chunk: int | None
    exact: bool = False
    weigh: Weigh = WEIGHTS["student_p"]

    def read(self, rows: Rows, output_of: Callable[[TrainModel, Rows], Output]) -> list[Heard]:
        return []

    def lesson(self, heard: Sequence[Heard], policy: Output, rows: Rows) -> Lesson:
        told = rows.told
        if told is None or (self.exact and told.set_RS is None):
            raise MilesError(
                "the samples bring no log-probs of a teacher; a generate or credit function of your own must keep what "
                "spans carry in extras."
            )
        if not self.exact:
            return Lesson(said_R=told.said_R, kl_R=None, coef=self.coef)
        how = {"temperature": self.temperature, "chunk": self.chunk}
        kl_R, said_R = divergence(policy, Elsewhere(told=told), weigh=self.weigh, **how)
        return Lesson(said_R=said_R, kl_R=kl_R, coef=self.coef)


def _joined(parts: Sequence[Tensor], heard: Sequence[Heard]) -> Tensor:
    """What the teachers' parts are, in the order of the micro-batch's tokens."""
    places = [one.at_R for one in heard if one.at_R is not None]
    return torch.cat(list(parts))[torch.cat(places).argsort()] if places else parts[0]


def teachers_of(
    config: AlgoConfig, models: Sequence[TrainModel], *, temperature: float, chunk: int | None
) -> Teaching | None:
    """How a run's teachers teach, who are elsewhere where no ``models`` are here; None where it has none."""
    if not distils(config):
        return None
    k = config.opd_log_prob_top_k
    top = TopK(k=k, tokens=TOKEN_SETS[config.opd_top_k_strategy]) if k > 0 else None
    how = {"coef": config.opd_kl_coef, "temperature": temperature, "chunk": chunk, "exact": k != 0}
    weigh = WEIGHTS[config.opd_reward_weight_mode]
    return Teachers(models=models, top=top, weigh=weigh, **how) if models else Served(weigh=weigh, **how)
