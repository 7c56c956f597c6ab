"""Teachers: frozen models that score the tokens the policy drew, here or elsewhere.

The logits of all tokens at once would be the largest tensors of a training step, twice. Here only one chunk of the
policy's and of the teacher's exists; the forward keeps one number a token, and the backward computes each chunk again.
Where ranks share the vocabulary a chunk's logits are brought together on each, since what is looked at one by one may
lie on any of them; where they share the tokens, each compares the distributions of its own.

``_R`` trained tokens, ``_r`` those of this rank, ``_n`` those of one teacher on this rank, ``_C`` tokens of a chunk,
``D`` hidden size of the policy and ``E`` of the teacher, ``V`` vocabulary, ``v`` this rank's rows of it, ``S`` tokens
of a set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from miles.algo.config import AlgoConfig, distils
from miles.algo.distill import TOKEN_SETS, WEIGHTS, TopK, Weigh, log_ratios, sampled_signal, set_ratios
from miles.algo.objective import Terms
from miles.algo.reduce import Layout
from miles.core.errors import MilesError
from miles.train.logits import Backward, Output, chunk_rows, cut_to, distribution_of, logprobs, vocabulary_of
from miles.train.peers import ALONE, Peers
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
        # A vocabulary padded beyond the policy's is cut to that: the policy never draws what lies there.
        taught_CV, _ = distribution_of(self.teacher, part, self.temperature, logp_CV.shape[-1])
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

    ``chunk`` tokens' logits exist at a time. Where tokens are cut over ranks, they are this rank's own.
    """
    size = vocabulary_of(policy)
    rows = chunk or max(1, chunk_rows(policy.head_VD, size) // 2)
    fixed = replace(policy, hidden_RD=policy.hidden_RD.detach(), head_VD=policy.head_VD.detach())
    how = _How(temperature=temperature, judge=judge, weigh=weigh, rows=rows, policy=fixed, size=size)
    return _Divergence.apply(policy.hidden_RD, policy.head_VD, how)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """How chunks are compared; ``size`` is the whole vocabulary's, and ``policy`` takes no gradient."""

    temperature: float
    judge: Judge
    weigh: Weigh
    rows: int
    policy: Output
    size: int

    def own(self, grad_CV: Tensor) -> Tensor:
        """The columns of this rank's rows of the head; those of padding are zeros."""
        shared = self.policy.vocabulary
        if shared is None:
            return grad_CV
        own_Cv = grad_CV[:, shared.first : shared.first + shared.size]
        return F.pad(own_Cv, (0, len(self.policy.head_VD) - own_Cv.shape[1]))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, head_vD: Tensor, how: _How) -> tuple[Tensor, Tensor]:
        ctx.how = how
        ctx.set_materialize_grads(False)
        parts: list[tuple[Tensor, Tensor]] = []
        for start in range(0, max(len(hidden_RD), 1), how.rows):
            part = slice(start, start + how.rows)
            logp_CV, _ = distribution_of(how.policy, part, how.temperature, how.size)
            ratio_CV, said_C = how.judge(part, logp_CV)
            parts.append((how.weigh.mean(logp_CV, ratio_CV), said_C))
        kl_R, said_R = torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])
        ctx.save_for_backward(hidden_RD, head_vD, kl_R)
        ctx.mark_non_differentiable(said_R)
        return kl_R, said_R

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_R: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        if grad_R is None:
            return None, None, None
        hidden_RD, head_vD, kl_R = ctx.saved_tensors
        how: _How = ctx.how
        chunks = range(0, max(len(hidden_RD), 1), how.rows)
        needs, shared = ctx.needs_input_grad[:2], how.policy.vocabulary
        back = Backward(head_vD, chunks=len(chunks), wide=kl_R.dtype, needs=needs, vocabulary=shared)
        for start in chunks:
            part = slice(start, start + how.rows)
            logp_CV, bend_Cv = distribution_of(how.policy, part, how.temperature, how.size)
            ratio_CV, _ = how.judge(part, logp_CV)
            grad_CV = how.weigh.slope(logp_CV, ratio_CV, kl_R[part])
            grad_Cv = how.own(grad_CV.mul_(grad_R[part, None]).div_(how.temperature))
            back.add(grad_Cv if bend_Cv is None else grad_Cv.mul_(bend_Cv), hidden_RD[part])
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
    tokens by the reverse KL. Logits are divided by ``temperature``; ``chunk`` tokens' exist at a time. ``in_step``:
    other ranks hold parts of the models and other samples, so each model is read in each micro-batch, if for nothing.
    """

    models: Sequence[TrainModel]
    coef: float
    temperature: float
    chunk: int | None
    exact: bool = False
    top: TopK | None = None
    weigh: Weigh = WEIGHTS["student_p"]
    in_step: bool = False

    @torch.no_grad()
    def read(self, rows: Rows, output_of: Callable[[TrainModel, Rows], Output]) -> list[Heard]:
        """One forward through each teacher that has a sample here; experts are the teacher's own choice."""
        rows = rows.unrouted()
        wanted = rows.teachers or (0,) * len(rows.lengths)
        assert max(wanted) < len(self.models), f"a sample's teacher is number {max(wanted)} of {len(self.models)}"
        heard: list[Heard] = []
        for number, teacher in enumerate(self.models):
            if number in wanted:
                own, at_R = rows, None
                if len(set(wanted)) > 1:
                    own, at_R = samples_of(rows, [i for i, w in enumerate(wanted) if w == number])
                heard.append(Heard(teacher=output_of(teacher, own), at_R=at_R))
            elif self.in_step:
                shortest = min(range(len(rows.lengths)), key=lambda i: rows.lengths[i])
                output_of(teacher, samples_of(rows, [shortest])[0])
        return heard

    def lesson(self, heard: Sequence[Heard], policy: Output, rows: Rows) -> Lesson:
        how = {"temperature": self.temperature, "chunk": self.chunk}
        if not self.exact:
            size = vocabulary_of(policy)
            said: list[Tensor] = []
            for one in heard:
                drawn_R = rows.target_R if one.at_R is None else rows.target_R[one.at_R]
                said.append(logprobs(cut_to(one.teacher, size), drawn_R, **how)[0].detach())
            return Lesson(said_R=_ordered(said, [one.at_R for one in heard]), kl_R=None, coef=self.coef)
        drawn_r = rows.target_R if policy.tokens is None else rows.target_R[policy.tokens.mine_r]
        found: list[tuple[Tensor, Tensor]] = []
        places: list[Tensor | None] = []
        for one in heard:
            own, teacher, at_n = _face_to_face(one, policy, len(rows.target_R))
            drawn_n = drawn_r if at_n is None else drawn_r[at_n]
            judge = Here(teacher=teacher, target_R=drawn_n, temperature=self.temperature, top=self.top)
            found.append(divergence(own, judge, weigh=self.weigh, **how))
            places.append(at_n)
        kl_r, said_r = (_ordered(parts, places) for parts in zip(*found, strict=True))
        kl_R, said_R = _whole(policy, kl_r, said_r)
        return Lesson(said_R=said_R, kl_R=kl_R, coef=self.coef)


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
        own = told if policy.tokens is None else told.of(policy.tokens.mine_r)
        kl_R, said_R = _whole(policy, *divergence(policy, Elsewhere(told=own), weigh=self.weigh, **how))
        return Lesson(said_R=said_R, kl_R=kl_R, coef=self.coef)


def _face_to_face(one: Heard, policy: Output, tokens: int) -> tuple[Output, Output, Tensor | None]:
    """Policy and teacher at the tokens that are the teacher's and this rank's, row by row.

    Beside them, which of the policy's rows these are; None for all. ``tokens`` are in the micro-batch.
    """
    teacher, at_R, cut = one.teacher, one.at_R, policy.tokens
    assert (teacher.tokens is None) == (cut is None), "policy and teacher are cut alike"
    if at_R is None:  # the same rows are cut the same way
        return policy, teacher, None
    at_n = at_R
    if cut is not None and teacher.tokens is not None:
        # A part of the rows is cut elsewhere than they are with the others.
        hidden_RE = teacher.tokens.join(teacher.hidden_RD)
        among_R = torch.full((tokens,), -1, device=at_R.device).index_copy_(0, at_R, torch.arange(len(at_R)).to(at_R))
        found_r = among_R[cut.mine_r]
        at_n = (found_r >= 0).nonzero()[:, 0]
        teacher = replace(teacher, hidden_RD=hidden_RE[found_r[at_n]], tokens=None)
    return replace(policy, hidden_RD=policy.hidden_RD.index_select(0, at_n)), teacher, at_n


def _whole(policy: Output, kl_r: Tensor, said_r: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank's tokens came to, together with those of the others."""
    if policy.tokens is None:
        return kl_r, said_r
    kl_R, said_R = policy.tokens.join(torch.stack((kl_r, said_r), -1)).unbind(-1)
    return kl_R, said_R.detach()


def _ordered(parts: Sequence[Tensor], places: Sequence[Tensor | None]) -> Tensor:
    """What the teachers' parts are, in the order of the tokens they are taken from."""
    given = [at for at in places if at is not None]
    return torch.cat(list(parts))[torch.cat(given).argsort()] if given else parts[0]


def teachers_of(
    config: AlgoConfig,
    models: Sequence[TrainModel],
    *,
    temperature: float,
    chunk: int | None,
    peers: Peers = ALONE,
) -> Teaching | None:
    """How a run's teachers teach, who are elsewhere where no ``models`` are here; None where it has none."""
    if not distils(config):
        return None
    k = config.opd_log_prob_top_k
    top = TopK(k=k, tokens=TOKEN_SETS[config.opd_top_k_strategy]) if k > 0 else None
    how = {"coef": config.opd_kl_coef, "temperature": temperature, "chunk": chunk, "exact": k != 0}
    weigh = WEIGHTS[config.opd_reward_weight_mode]
    if not models:
        return Served(weigh=weigh, **how)
    return Teachers(models=models, top=top, weigh=weigh, in_step=peers.parts > 1, **how)
