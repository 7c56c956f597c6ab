"""Vocabulary-parallel log-probs: log-probs, entropies and logit gradients of one chunk of tokens.

``_C`` tokens of the chunk, ``D`` hidden size, ``V`` vocabulary or this rank's rows of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from miles.kernels.batch_invariant import logprob as exact_head
from miles.kernels.fused.fused_logprob import LogitTransform, compute_logit_grads, reduce_logits
from miles.kernels.fused.lm_head import LogitAdapter, compute_logits
from miles.kernels.numerics import Numerics

# Logit of a padding row: probability 0 in any comparison, yet finite, so that 0 times it is 0.
_PADDING_LOGIT = -1e30


class VocabPartition(Protocol):
    """One rank's part of an LM head split over ranks by vocabulary.

    Its rows are ``size`` tokens from ``first`` on; further rows are padding.
    """

    @property
    def first(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, bitwise equal on each; without gradient."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedVocabShard:
    """A partition without the last tokens of the vocabulary."""

    first: int
    size: int
    full: VocabPartition

    def sum(self, x: Tensor) -> Tensor:
        return self.full.sum(x)

    def max(self, x: Tensor) -> Tensor:
        return self.full.max(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitParams:
    """Temperature, softcap, partition and numerics of the logits; those of ``chunk_size`` tokens exist at a time.

    ``adapter`` adds the LoRA adapter of the head to them, if it is not merged into the head. With ``keeps_grads``
    forward keeps the logits' gradients for unit gradients of the log-probs, so that backward computes no logits.
    """

    temperature: float
    softcap: float | None
    chunk_size: int
    vocabulary: VocabPartition | None
    numerics: Numerics
    adapter: LogitAdapter | None = None
    keeps_grads: bool = False

    def compute_logits(self, hidden_CD: Tensor, head_VD: Tensor) -> Tensor:
        """Return the logits without softcap."""
        return compute_logits(hidden_CD, head_VD, numerics=self.numerics, adapter=self.adapter)

    def scale(self, head_VD: Tensor) -> LogitTransform:
        size = len(head_VD) if self.vocabulary is None else self.vocabulary.size
        return LogitTransform(temperature=self.temperature, softcap=self.softcap, size=size)


def forward(
    hidden_CD: Tensor, head_VD: Tensor, target_C: Tensor, params: LogitParams
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]:
    """Return a chunk's target log-probs, entropies and log-sum-exps (if split), and this rank's log-probs."""
    vocabulary = params.vocabulary
    if vocabulary is None:
        logp_CV, _ = dense_log_softmax(
            hidden_CD,
            head_VD,
            params.temperature,
            params.softcap,
            numerics=params.numerics,
            adapter=params.adapter,
        )
        logp_C = logp_CV.gather(1, target_C[:, None]).squeeze(1)
        return (logp_C, _entropy(logp_CV), None), logp_CV
    logits_CV, _ = compute_local_logits(
        hidden_CD,
        head_VD,
        params.temperature,
        params.softcap,
        vocabulary,
        numerics=params.numerics,
        adapter=params.adapter,
    )
    max_C = vocabulary.max(logits_CV.amax(-1))
    logits_CV.sub_(max_C[:, None])
    p_CV = logits_CV.exp()
    local_C, is_local_C = _local(target_C, vocabulary)
    chosen_C = logits_CV.gather(1, local_C[:, None]).squeeze(1).masked_fill(~is_local_C, 0)
    sums_3C = torch.stack((p_CV.sum(-1), torch.linalg.vecdot(p_CV, logits_CV), chosen_C))
    total_C, mean_C, chosen_C = vocabulary.sum(sums_3C).unbind()
    log_C = total_C.log()
    results = (chosen_C - log_C, log_C - mean_C / total_C, max_C + log_C)
    return results, logits_CV.sub_(log_C[:, None])


def backward(
    hidden_CD: Tensor,
    head_VD: Tensor,
    target_C: Tensor,
    entropy_C: Tensor,
    lse_C: Tensor | None,
    logp_CV: Tensor | None,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    params: LogitParams,
) -> Tensor:
    """Return the gradient of a chunk's logits; its log-probs are recomputed if they were not kept."""
    softcap_grad_CV: Tensor | None = None
    if logp_CV is None and lse_C is not None and params.vocabulary is not None:
        logits_CV, softcap_grad_CV = compute_local_logits(
            hidden_CD,
            head_VD,
            params.temperature,
            params.softcap,
            params.vocabulary,
            numerics=params.numerics,
            adapter=params.adapter,
        )
        logp_CV = logits_CV.sub_(lse_C[:, None])
    elif logp_CV is None:
        logp_CV, softcap_grad_CV = dense_log_softmax(
            hidden_CD,
            head_VD,
            params.temperature,
            params.softcap,
            numerics=params.numerics,
            adapter=params.adapter,
        )
    grad_CV = _grad_logits(logp_CV, target_C, entropy_C, grad_logp_C, grad_entropy_C, params.vocabulary)
    grad_CV = grad_CV.div_(params.temperature)
    return grad_CV if softcap_grad_CV is None else grad_CV.mul_(softcap_grad_CV)


def forward_fused(
    hidden_CD: Tensor, head_VD: Tensor, target_C: Tensor, params: LogitParams
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]:
    """``forward`` in one pass over the logits, which are also returned, without softcap."""
    logits_CV, vocabulary = params.compute_logits(hidden_CD, head_VD), params.vocabulary
    max_C, total_C, mean_C, chosen_C = reduce_logits(
        logits_CV, _local_or_missing(target_C, vocabulary), params.scale(head_VD)
    )
    if vocabulary is not None:
        # Sums relative to this rank's maximum logit become relative to the global maximum.
        global_max_C = vocabulary.max(max_C.clone())
        shift_C = max_C - global_max_C
        scale_C = shift_C.exp()
        mean_C = scale_C * (mean_C + total_C * shift_C)
        chosen_C = torch.where(_local_or_missing(target_C, vocabulary) >= 0, chosen_C + shift_C, 0)
        total_C, mean_C, chosen_C = vocabulary.sum(torch.stack((scale_C * total_C, mean_C, chosen_C))).unbind()
        max_C = global_max_C
    log_C = total_C.log()
    return (chosen_C - log_C, log_C - mean_C / total_C, max_C + log_C), logits_CV


def backward_fused(
    hidden_CD: Tensor,
    head_VD: Tensor,
    target_C: Tensor,
    entropy_C: Tensor,
    lse_C: Tensor | None,
    logits_CV: Tensor | None,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    params: LogitParams,
) -> Tensor:
    """``backward`` in one pass over the logits."""
    assert lse_C is not None
    if logits_CV is None:
        logits_CV = params.compute_logits(hidden_CD, head_VD)
    grad_logp_C, grad_entropy_C = (None if g is None else g.contiguous() for g in (grad_logp_C, grad_entropy_C))
    grads, target_C = (grad_logp_C, grad_entropy_C), _local_or_missing(target_C, params.vocabulary)
    return compute_logit_grads(logits_CV, target_C, lse_C, entropy_C, *grads, params.scale(head_VD), head_VD.dtype)


def write_unit_grads(
    logits_CV: Tensor, head_VD: Tensor, target_C: Tensor, lse_C: Tensor, params: LogitParams, out_CV: Tensor
) -> None:
    """Write the gradient of a chunk's logits where that of each log-prob is 1, of the logits of ``forward_fused``."""
    ones_C = torch.ones_like(lse_C)
    target_C = _local_or_missing(target_C, params.vocabulary)
    scale = params.scale(head_VD)
    compute_logit_grads(logits_CV, target_C, lse_C, lse_C, ones_C, None, scale, head_VD.dtype, out_CV=out_CV)


def forward_exact(
    hidden_CD: Tensor, head_VD: Tensor, target_C: Tensor, params: LogitParams, *, fused: bool
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]:
    """``forward`` bitwise equal to the engine; also returns what ``backward`` (or the ``fused`` one) keeps.

    With a split vocabulary the logits are gathered, because a sum of partial sums would round differently.
    """
    logits_CV, partition = params.compute_logits(hidden_CD, head_VD), params.vocabulary
    capped_CV = logits_CV if params.softcap is None else exact_head.apply_softcap(logits_CV.clone(), params.softcap)
    full_CV = capped_CV
    if partition is not None:
        vocab_size = partition.max(torch.tensor(partition.first + partition.size, device=logits_CV.device))
        full_CV = logits_CV.new_zeros(len(logits_CV), int(vocab_size))
        full_CV[:, partition.first : partition.first + partition.size] = capped_CV[:, : partition.size]
        full_CV = partition.sum(full_CV)
    scores = exact_head.compute_logprob_stats(full_CV, target_C, params.temperature)
    kept_CV = logits_CV
    if not fused:
        kept_CV = capped_CV / params.temperature - scores.lse_R[:, None]
        if partition is not None:
            kept_CV[:, partition.size :] = _PADDING_LOGIT
    return (scores.logp_R, scores.entropy_R, scores.lse_R), kept_CV


def dense_log_softmax(
    hidden_CD: Tensor,
    head_VD: Tensor,
    temperature: float,
    softcap: float | None,
    *,
    numerics: Numerics,
    adapter: LogitAdapter | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities, and the gradient of the softcap."""
    logits_CV = compute_logits(hidden_CD, head_VD, softcap, numerics=numerics, adapter=adapter)
    softcap_grad_CV = None if softcap is None else 1 - (logits_CV / softcap).square()
    return torch.log_softmax(logits_CV if temperature == 1.0 else logits_CV.div_(temperature), dim=-1), softcap_grad_CV


def compute_local_logits(
    hidden_CD: Tensor,
    head_VD: Tensor,
    temperature: float,
    softcap: float | None,
    vocabulary: VocabPartition,
    *,
    numerics: Numerics,
    adapter: LogitAdapter | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the logits of this rank's rows, very negative for padding, and the gradient of the softcap."""
    logits_CV = compute_logits(hidden_CD, head_VD, softcap, numerics=numerics, adapter=adapter)
    softcap_grad_CV = None if softcap is None else 1 - (logits_CV / softcap).square()
    if temperature != 1.0:
        logits_CV.div_(temperature)
    if vocabulary.size < len(head_VD):
        logits_CV[:, vocabulary.size :] = _PADDING_LOGIT
    return logits_CV, softcap_grad_CV


def _local(target_C: Tensor, vocabulary: VocabPartition) -> tuple[Tensor, Tensor]:
    """Return the local row of each target, and whether it is on this rank."""
    local_C = target_C - vocabulary.first
    is_local_C = (local_C >= 0) & (local_C < vocabulary.size)
    return local_C.masked_fill(~is_local_C, 0), is_local_C


def _local_or_missing(target_C: Tensor, vocabulary: VocabPartition | None) -> Tensor:
    """Return the local row of each target; -1 if it is on another rank."""
    if vocabulary is None:
        return target_C
    local_C, is_local_C = _local(target_C, vocabulary)
    return torch.where(is_local_C, local_C, -1)


def _entropy(logp_CV: Tensor) -> Tensor:
    return -torch.linalg.vecdot(logp_CV.exp(), logp_CV)


def _grad_logits(
    logp_CV: Tensor,
    target_C: Tensor,
    entropy_C: Tensor,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    vocabulary: VocabPartition | None,
) -> Tensor:
    """d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)."""
    p_CV = logp_CV.exp()
    if grad_entropy_C is None:
        assert grad_logp_C is not None, "backward without a gradient"
        out_CV = p_CV.mul_(-grad_logp_C[:, None])
    else:
        weight_CV = (logp_CV + entropy_C[:, None]).mul_(-grad_entropy_C[:, None])
        out_CV = p_CV.mul_(weight_CV if grad_logp_C is None else weight_CV.sub_(grad_logp_C[:, None]))
    if grad_logp_C is None:
        return out_CV
    if vocabulary is not None:
        target_C, is_local_C = _local(target_C, vocabulary)
        grad_logp_C = grad_logp_C * is_local_C
    return out_CV.scatter_add_(1, target_C[:, None], grad_logp_C[:, None])
