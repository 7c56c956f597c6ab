"""On-policy distillation in the trainer: teachers are frozen local models or remote servers.

The logits of all tokens at once would be the largest tensors of a training step, twice. Here only one chunk of the
policy's and of the teacher's logits exists; the forward pass keeps one number per token, and backward recomputes each
chunk. With a vocabulary split over ranks a chunk's logits are gathered on each rank, because the token set may be on
any of them; with context parallelism each rank compares the distributions of its own tokens.

``_R`` trained tokens, ``_r`` those of this rank, ``_n`` those of one teacher on this rank, ``_C`` tokens of a chunk,
``D`` hidden size of the policy and ``E`` of the teacher, ``V`` vocabulary, ``v`` this rank's rows of it, ``S`` tokens
of a set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from miles.algo.config import AlgoConfig, uses_distillation
from miles.algo.distillation_loss import (
    KL_DIRECTIONS,
    TOKEN_SETS,
    KLDirection,
    TopKTokens,
    compute_log_ratios,
    compute_log_ratios_from_topk,
    distillation_advantage,
)
from miles.algo.loss_aggregation import LossAggregator
from miles.algo.policy_loss import LossOutput
from miles.core.errors import MilesError
from miles.train.batch_tensors import MicroBatch, TeacherLogprobs, select_samples
from miles.train.dp_group import SINGLE_RANK, DataParallelGroup
from miles.train.logprobs import (
    ChunkedBackward,
    HeadOutput,
    compute_log_softmax,
    compute_logprobs,
    default_chunk_size,
    get_vocab_size,
    truncate_vocab,
)
from miles.train.model_protocols import TrainModel


class TeacherComparison(Protocol):
    """Compares the policy's distributions with a teacher's; ``part`` are the tokens of the chunk."""

    def __call__(self, part: slice, logp_CV: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p/q as ``compute_log_ratios`` does, and the teacher's log-prob of each target."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalComparison:
    """Comparison with a local teacher; with ``top``, tokens outside the token set form one bucket."""

    teacher: HeadOutput
    target_R: Tensor
    temperature: float = 1.0
    top: TopKTokens | None = None

    def __call__(self, part: slice, logp_CV: Tensor) -> tuple[Tensor, Tensor]:
        # A teacher vocabulary padded beyond the policy's is truncated: the policy never samples those tokens.
        teacher_CV, _ = compute_log_softmax(self.teacher, part, self.temperature, logp_CV.shape[-1])
        target_logp_C = teacher_CV.gather(1, self.target_R[part, None]).squeeze(1)
        return compute_log_ratios(logp_CV, teacher_CV, self.top), target_logp_C


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedComparison:
    """Comparison with a served teacher, of which only the log-probs of a token set are known."""

    logprobs: TeacherLogprobs

    def __call__(self, part: slice, logp_CV: Tensor) -> tuple[Tensor, Tensor]:
        assert self.logprobs.set_RS is not None and self.logprobs.set_logp_RS is not None
        set_CS, set_logp_CS = self.logprobs.set_RS[part], self.logprobs.set_logp_RS[part]
        ratio_CV = compute_log_ratios_from_topk(logp_CV, set_CS, set_logp_CS)
        return ratio_CV, self.logprobs.logp_R[part].to(logp_CV.dtype)


def compute_teacher_kl(
    policy: HeadOutput,
    comparison: TeacherComparison,
    *,
    temperature: float = 1.0,
    direction: KLDirection = KL_DIRECTIONS["student_p"],
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the KL of policy and teacher at each token, differentiable, and the teacher's log-probs of the targets.

    The logits of ``chunk`` tokens exist at a time. With context parallelism the tokens are this rank's own.
    """
    vocab_size = get_vocab_size(policy)
    chunk_size = chunk or max(1, default_chunk_size(policy.head_VD, vocab_size) // 2)
    lora = None if policy.lora is None else policy.lora.detach()
    detached = replace(policy, hidden_RD=policy.hidden_RD.detach(), head_VD=policy.head_VD.detach(), lora=lora)
    params = _KLParams(
        temperature=temperature,
        comparison=comparison,
        direction=direction,
        chunk_size=chunk_size,
        policy=detached,
        vocab_size=vocab_size,
    )
    return _ChunkedKL.apply(policy.hidden_RD, policy.head_VD, *policy.factors(), params)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True, kw_only=True)
class _KLParams:
    """Parameters of the chunked comparison; ``vocab_size`` is the full vocabulary's, and ``policy`` is detached."""

    temperature: float
    comparison: TeacherComparison
    direction: KLDirection
    chunk_size: int
    policy: HeadOutput
    vocab_size: int

    def local_columns(self, grad_CV: Tensor) -> Tensor:
        """Return the columns of this rank's rows of the head, with zeros for padding."""
        partition = self.policy.vocabulary
        if partition is None:
            return grad_CV
        local_Cv = grad_CV[:, partition.first : partition.first + partition.size]
        return F.pad(local_Cv, (0, len(self.policy.head_VD) - local_Cv.shape[1]))


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_vD: Tensor,
        a_XD: Tensor | None,
        b_vX: Tensor | None,
        params: _KLParams,
    ) -> tuple[Tensor, Tensor]:
        ctx.params = params
        ctx.set_materialize_grads(False)
        parts: list[tuple[Tensor, Tensor]] = []
        for start in range(0, max(len(hidden_RD), 1), params.chunk_size):
            part = slice(start, start + params.chunk_size)
            logp_CV, _ = compute_log_softmax(params.policy, part, params.temperature, params.vocab_size)
            ratio_CV, target_logp_C = params.comparison(part, logp_CV)
            parts.append((params.direction.kl(logp_CV, ratio_CV), target_logp_C))
        kl_R, target_logp_R = torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])
        ctx.save_for_backward(hidden_RD, head_vD, kl_R)
        ctx.mark_non_differentiable(target_logp_R)
        return kl_R, target_logp_R

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_R: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_R is None:
            return (None,) * 5
        hidden_RD, head_vD, kl_R = ctx.saved_tensors
        params: _KLParams = ctx.params
        chunks = range(0, max(len(hidden_RD), 1), params.chunk_size)
        accumulator = ChunkedBackward(
            head_vD,
            chunks=len(chunks),
            accumulation_dtype=kl_R.dtype,
            needs=ctx.needs_input_grad[:4],
            vocabulary=params.policy.vocabulary,
            lora=params.policy.lora,
        )
        for start in chunks:
            part = slice(start, start + params.chunk_size)
            logp_CV, softcap_grad_Cv = compute_log_softmax(params.policy, part, params.temperature, params.vocab_size)
            ratio_CV, _ = params.comparison(part, logp_CV)
            grad_CV = params.direction.grad(logp_CV, ratio_CV, kl_R[part])
            grad_Cv = params.local_columns(grad_CV.mul_(grad_R[part, None]).div_(params.temperature))
            accumulator.add(grad_Cv if softcap_grad_Cv is None else grad_Cv.mul_(softcap_grad_Cv), hidden_RD[part])
        return *accumulator.finish(), None


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherOutput:
    """The output of one teacher for its samples; ``index_R`` are their tokens in the micro-batch, None for all."""

    teacher: HeadOutput
    index_R: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillTerms:
    """The teachers' log-probs of the sampled tokens and, in exact mode, the differentiable KL."""

    teacher_logp_R: Tensor
    kl_R: Tensor | None
    coef: float

    def add_to_advantages(self, advantage_R: Tensor, old_logp_R: Tensor) -> Tensor:
        """Add the teacher's term to the advantages, unless the KL itself is in the loss."""
        if self.kl_R is not None:
            return advantage_R
        return advantage_R + self.coef * distillation_advantage(self.teacher_logp_R, old_logp_R)

    def add_to_loss(self, output: LossOutput, old_logp_R: Tensor, aggregator: LossAggregator) -> LossOutput:
        """Add the KL, if exact, and the distillation metrics to a micro-batch's loss."""
        loss, metrics = output.loss, dict(output.metrics)
        kl_R = -distillation_advantage(self.teacher_logp_R, old_logp_R) if self.kl_R is None else self.kl_R.detach()
        metrics |= {"distill_kl": aggregator.mean(kl_R), "teacher_logp": aggregator.mean(self.teacher_logp_R)}
        if self.kl_R is not None:
            loss = loss + self.coef * aggregator.reduce(self.kl_R)
            metrics["loss"] = loss.detach()
        return LossOutput(loss=loss, metrics=metrics)


RunModel = Callable[[TrainModel, Sequence[MicroBatch]], Mapping[int, HeadOutput]]
"""Maps a model and micro-batches to the output of each; empty on the stages of a pipeline that are not its last."""


class Distillation(Protocol):
    """Source of distillation terms."""

    def forward(self, micro_batches: Sequence[MicroBatch], run_model: RunModel) -> list[list[TeacherOutput]]:
        """Run the teachers on micro-batches, before the policy's own forward pass of them."""
        ...

    def compute_terms(self, outputs: Sequence[TeacherOutput], policy: HeadOutput, rows: MicroBatch) -> DistillTerms:
        """Compute the terms from the teachers' and the policy's outputs at the micro-batch's tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _TeacherRows:
    """The samples that a teacher runs on, and their tokens in the micro-batch; ``used`` says that they are its own."""

    rows: MicroBatch
    index_R: Tensor | None
    used: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTeachers:
    """Scores every sample by its own one of the frozen ``models``; by the first if a sample names none.

    ``exact``: minimise the KL itself, over the token set of ``top`` if given; else the reverse KL of the sampled
    tokens is added to their advantages. Logits are divided by ``temperature``; those of ``chunk`` tokens exist at a
    time. ``in_step``: the models are sharded over ranks with other samples, so each model runs in each micro-batch.
    """

    models: Sequence[TrainModel]
    coef: float
    temperature: float
    chunk: int | None
    exact: bool = False
    top: TopKTokens | None = None
    direction: KLDirection = KL_DIRECTIONS["student_p"]
    in_step: bool = False

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[MicroBatch], run_model: RunModel) -> list[list[TeacherOutput]]:
        """Run each teacher on its samples of the micro-batches; its own router chooses experts."""
        outputs: list[list[TeacherOutput]] = [[] for _ in micro_batches]
        for index, teacher in enumerate(self.models):
            selected = [self._select(rows.without_replay(), index) for rows in micro_batches]
            numbers = [number for number, each in enumerate(selected) if each is not None]
            if not numbers:
                continue
            found = run_model(teacher, [each.rows for each in selected if each is not None])
            for place, output in found.items():
                each = selected[numbers[place]]
                assert each is not None
                if each.used:
                    outputs[numbers[place]].append(TeacherOutput(teacher=output, index_R=each.index_R))
        return outputs

    def _select(self, rows: MicroBatch, index: int) -> _TeacherRows | None:
        """Return the samples of one teacher in a micro-batch; None if it does not run on it."""
        teacher_by_sample = rows.teacher_indices or (0,) * len(rows.lengths)
        assert max(teacher_by_sample) < len(self.models), (
            f"a sample names teacher {max(teacher_by_sample)} of {len(self.models)}"
        )
        if index in teacher_by_sample:
            if len(set(teacher_by_sample)) == 1:
                return _TeacherRows(rows=rows, index_R=None)
            samples = [i for i, t in enumerate(teacher_by_sample) if t == index]
            chosen, index_R = select_samples(rows, samples)
            return _TeacherRows(rows=chosen, index_R=index_R)
        if not self.in_step:
            return None
        shortest = min(range(len(rows.lengths)), key=lambda i: rows.lengths[i])
        return _TeacherRows(rows=select_samples(rows, [shortest])[0], index_R=None, used=False)

    def compute_terms(self, outputs: Sequence[TeacherOutput], policy: HeadOutput, rows: MicroBatch) -> DistillTerms:
        if not self.exact:
            vocab_size = get_vocab_size(policy)
            parts: list[Tensor] = []
            for output in outputs:
                target_R = rows.target_R if output.index_R is None else rows.target_R[output.index_R]
                teacher = truncate_vocab(output.teacher, vocab_size)
                logp_R, _ = compute_logprobs(teacher, target_R, temperature=self.temperature, chunk=self.chunk)
                parts.append(logp_R.detach())
            teacher_logp_R = _restore_order(parts, [output.index_R for output in outputs])
            return DistillTerms(teacher_logp_R=teacher_logp_R, kl_R=None, coef=self.coef)
        target_r = rows.target_R if policy.tokens is None else rows.target_R[policy.tokens.mine_r]
        results: list[tuple[Tensor, Tensor]] = []
        indices: list[Tensor | None] = []
        for output in outputs:
            aligned, teacher, index_n = _align(output, policy, len(rows.target_R))
            target_n = target_r if index_n is None else target_r[index_n]
            comparison = LocalComparison(teacher=teacher, target_R=target_n, temperature=self.temperature, top=self.top)
            results.append(
                compute_teacher_kl(
                    aligned, comparison, temperature=self.temperature, direction=self.direction, chunk=self.chunk
                )
            )
            indices.append(index_n)
        kl_r, teacher_logp_r = (_restore_order(parts, indices) for parts in zip(*results, strict=True))
        kl_R, teacher_logp_R = _gather_tokens(policy, kl_r, teacher_logp_r)
        return DistillTerms(teacher_logp_R=teacher_logp_R, kl_R=kl_R, coef=self.coef)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTeachers:
    """Served teachers, whose log-probs came with the samples. The fields are those of ``LocalTeachers``."""

    coef: float
    temperature: float
    chunk: int | None
    exact: bool = False
    direction: KLDirection = KL_DIRECTIONS["student_p"]

    def forward(self, micro_batches: Sequence[MicroBatch], run_model: RunModel) -> list[list[TeacherOutput]]:
        return [[] for _ in micro_batches]

    def compute_terms(self, outputs: Sequence[TeacherOutput], policy: HeadOutput, rows: MicroBatch) -> DistillTerms:
        logprobs = rows.teacher_logprobs
        if logprobs is None or (self.exact and logprobs.set_RS is None):
            raise MilesError(
                "the samples have no teacher log-probs; custom generate and advantage functions must keep the extras "
                "of spans."
            )
        if not self.exact:
            return DistillTerms(teacher_logp_R=logprobs.logp_R, kl_R=None, coef=self.coef)
        local = logprobs if policy.tokens is None else logprobs.select(policy.tokens.mine_r)
        kl_r, teacher_logp_r = compute_teacher_kl(
            policy,
            ServedComparison(logprobs=local),
            temperature=self.temperature,
            direction=self.direction,
            chunk=self.chunk,
        )
        kl_R, teacher_logp_R = _gather_tokens(policy, kl_r, teacher_logp_r)
        return DistillTerms(teacher_logp_R=teacher_logp_R, kl_R=kl_R, coef=self.coef)


def _align(output: TeacherOutput, policy: HeadOutput, num_tokens: int) -> tuple[HeadOutput, HeadOutput, Tensor | None]:
    """Return policy and teacher at the tokens that are both the teacher's and this rank's, aligned.

    Also returns the indices of these tokens in the policy's; None for all. The micro-batch has ``num_tokens``.
    """
    teacher = output.teacher
    index_R = output.index_R
    shard = policy.tokens
    assert (teacher.tokens is None) == (shard is None), "policy and teacher are sharded alike"
    if index_R is None:  # the same samples are sharded the same way
        return policy, teacher, None
    index_n = index_R
    if shard is not None and teacher.tokens is not None:
        # Some of the samples alone are sharded differently than together with the others.
        hidden_RE = teacher.tokens.join(teacher.hidden_RD)
        order = torch.arange(len(index_R)).to(index_R)
        position_R = torch.full((num_tokens,), -1, device=index_R.device).index_copy_(0, index_R, order)
        position_r = position_R[shard.mine_r]
        index_n = (position_r >= 0).nonzero()[:, 0]
        teacher = replace(teacher, hidden_RD=hidden_RE[position_r[index_n]], tokens=None)
    return replace(policy, hidden_RD=policy.hidden_RD.index_select(0, index_n)), teacher, index_n


def _gather_tokens(policy: HeadOutput, kl_r: Tensor, teacher_logp_r: Tensor) -> tuple[Tensor, Tensor]:
    """Gather the results of all context-parallel ranks' tokens."""
    if policy.tokens is None:
        return kl_r, teacher_logp_r
    kl_R, teacher_logp_R = policy.tokens.join(torch.stack((kl_r, teacher_logp_r), -1)).unbind(-1)
    return kl_R, teacher_logp_R.detach()


def _restore_order(parts: Sequence[Tensor], indices: Sequence[Tensor | None]) -> Tensor:
    """Concatenate the teachers' parts in the order of the micro-batch's tokens."""
    present = [index for index in indices if index is not None]
    return torch.cat(list(parts))[torch.cat(present).argsort()] if present else parts[0]


def build_teachers(
    config: AlgoConfig,
    models: Sequence[TrainModel],
    *,
    temperature: float,
    chunk: int | None,
    dp_group: DataParallelGroup = SINGLE_RANK,
) -> Distillation | None:
    """Build the distillation of a run, from served teachers if there are no ``models``; None without distillation."""
    if not uses_distillation(config):
        return None
    k = config.opd_log_prob_top_k
    top = TopKTokens(k=k, tokens=TOKEN_SETS[config.opd_top_k_strategy]) if k > 0 else None
    direction = KL_DIRECTIONS[config.opd_reward_weight_mode]
    if not models:
        return ServedTeachers(
            coef=config.opd_kl_coef, temperature=temperature, chunk=chunk, exact=k != 0, direction=direction
        )
    return LocalTeachers(
        models=models,
        coef=config.opd_kl_coef,
        temperature=temperature,
        chunk=chunk,
        exact=k != 0,
        top=top,
        direction=direction,
        in_step=dp_group.dp_size > 1,
    )
