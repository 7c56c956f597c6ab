"""Log-probabilities and entropies from hidden states, a chunk of tokens at a time.

The logits of all tokens at once would be the largest tensor of a training step. Here only one chunk
of them exists: forward keeps two numbers per token, and backward recomputes each chunk.
If one chunk holds everything, its log-probabilities are kept and nothing is recomputed.

On a GPU forward keeps what backward needs of all logits in half precision, up to ``MAX_KEPT_LOGIT_GRADS`` of them: the
gradient of each log-prob by its logits, one-hot minus probability. Backward scales the rows by the gradients of the
log-probs, on the side of the hidden states. A gradient of entropies needs the logits again.

With a vocabulary split over tensor-parallel ranks each rank has the logits of its own rows, and a chunk costs two small
reductions: the maximum logit of each token, then the sums relative to it. Backward reduces only the gradient of the
hidden states.

A LoRA adapter of the head, merged into it or beside it, gets its gradients from the same chunks.

``_R`` trained tokens, ``_r`` those of this rank, ``_C`` tokens of a chunk, ``D`` hidden size, ``V`` vocabulary or this
rank's rows of it, ``X`` the rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.fused.grad_sum import add_grad
from miles.kernels.fused.lm_head import HeadLora
from miles.kernels.numerics import FAST, Numerics
from miles.kernels.runtime.triton_compat import use_triton_training
from miles.models.accounting import activations
from miles.models.lora.adapters import WHOLE, LoraAdapters, PartOf
from miles.train import vocab_parallel_logprobs
from miles.train.vocab_parallel_logprobs import (
    LogitParams,
    TruncatedVocabShard,
    VocabPartition,
    compute_local_logits,
    dense_log_softmax,
    write_unit_grads,
)

_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}


class ContextShard(Protocol):
    """A micro-batch split over context-parallel ranks: ``mine_r`` are the trained tokens that this rank predicts."""

    @property
    def mine_r(self) -> Tensor: ...

    def join(self, x_r: Tensor) -> Tensor:
        """Gather the ranks' token values as one [R, ...] on each; backward returns the own part of the gradient."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFeatures:
    """What a draft model reads of a policy: features of all input tokens, detached, whole embedding and head."""

    features_TF: Tensor
    embedding_VD: Tensor
    head_VD: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedHeadLora:
    """The float32 factors of a LoRA adapter of the head, which get gradients; ``b_VX`` are this rank's rows.

    ``merged``: the head has their product already.
    """

    a_XD: Tensor
    b_VX: Tensor
    scale: float
    merged: bool

    def truncate(self, size: int) -> TrainedHeadLora:
        """Restrict it to the first ``size`` rows."""
        return replace(self, b_VX=self.b_VX[:size])

    def detach(self) -> TrainedHeadLora:
        """Return the same factors without gradients."""
        return replace(self, a_XD=self.a_XD.detach(), b_VX=self.b_VX.detach())

    def build_adapter(self, dtype: torch.dtype, numerics: Numerics) -> HeadLora | None:
        """Return what adds its products to logits; None if they are in the head."""
        if self.merged:
            return None
        a_XD, b_VX = (factor.detach().to(dtype) for factor in (self.a_XD, self.b_VX))
        return HeadLora(a_rD=a_XD, b_Vr=b_VX, scale=self.scale, numerics=numerics)


def build_head_lora(
    adapters: LoraAdapters, *, merged: bool, part_of: PartOf = lambda name: WHOLE
) -> TrainedHeadLora | None:
    """Return the adapter of the output layer for a forward; None if it has none, or this rank no rows of it."""
    factors = adapters.head_factors(part_of)
    if factors is None:
        return None
    return TrainedHeadLora(a_XD=factors[0], b_VX=factors[1], scale=adapters.lora.scale, merged=merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutput:
    """Inputs of the LM head: hidden states, head weight and softcap, and the numerics of the log-probs.

    With a split over ranks (context or vocabulary parallel) these are the rank's own. ``flips`` counts the replayed
    experts that the model's own router would not have chosen, out of ``replayed``, over the whole micro-batch; both
    None without replay; ``indexer_flips`` and ``indexer_replayed`` are the same of entries that indexers of sparse
    attention select. ``load_LE`` is how often each expert of each layer was chosen, if counted. ``features`` are
    those of a draft model, if one is trained. ``lora`` is the adapter of the head, if it has one.
    """

    hidden_RD: Tensor
    head_VD: Tensor
    softcap: float | None = None
    vocabulary: VocabPartition | None = None
    tokens: ContextShard | None = None
    flips: Tensor | None = None
    replayed: Tensor | None = None
    indexer_flips: Tensor | None = None
    indexer_replayed: Tensor | None = None
    load_LE: Tensor | None = None
    numerics: Numerics = FAST
    features: PolicyFeatures | None = None
    lora: TrainedHeadLora | None = None

    def build_adapter(self) -> HeadLora | None:
        """Return what adds an adapter of the head to its logits."""
        return None if self.lora is None else self.lora.build_adapter(self.head_VD.dtype, self.numerics)

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the factors of the head's adapter, or None twice."""
        return (None, None) if self.lora is None else (self.lora.a_XD, self.lora.b_VX)


def compute_logprobs(
    output: HeadOutput,
    target_R: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    max_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and the entropy of each distribution, both differentiable.

    Logits are soft-capped by ``softcap`` if set, divided by ``temperature`` and computed in float32 (float64
    for float64 inputs), ``chunk`` tokens at a time. Targets and results are those of the whole micro-batch, also
    with context parallelism. Without a ``chunk``, logits are computed once if there is room for the gradients of
    ``max_tokens``, the most that a micro-batch has; None: entropies have a gradient, which needs them again.
    """
    tokens = output.tokens
    target_r = target_R if tokens is None else target_R.index_select(0, tokens.mine_r)
    params = LogitParams(
        temperature=temperature,
        softcap=output.softcap,
        # The fused kernel needs no second tensor of the logits' size, so chunks may be twice as large.
        chunk_size=chunk or default_chunk_size(output.head_VD) * (2 if use_triton_training(output.hidden_RD) else 1),
        vocabulary=output.vocabulary,
        numerics=output.numerics,
        adapter=output.build_adapter(),
        keeps_grads=max_tokens is not None
        and chunk is None
        and _can_keep_grads(output, max(max_tokens, len(target_r))),
    )
    tensors = (output.hidden_RD, output.head_VD, *output.factors())
    lora = None if output.lora is None else output.lora.detach()
    logp_r, entropy_r = _ChunkedLogprobs.apply(*tensors, target_r, params, lora)  # pyright: ignore[reportGeneralTypeIssues]
    if tokens is None:
        return logp_r, entropy_r
    logp_R, entropy_R = tokens.join(torch.stack((logp_r, entropy_r), -1)).unbind(-1)
    return logp_R, entropy_R


def _can_keep_grads(output: HeadOutput, count: int) -> bool:
    """Whether forward keeps the gradients of all logits, of which there are those of so many tokens at most.

    Where the head is not trained they would save one matmul of three; memory is dearer there.
    """
    is_plain = output.lora is None and output.head_VD.requires_grad and not output.numerics.batch_invariant
    fits = count * len(output.head_VD) <= activations.MAX_KEPT_LOGIT_GRADS
    return is_plain and fits and torch.is_grad_enabled() and use_triton_training(output.hidden_RD)


def default_chunk_size(head_VD: Tensor, vocabulary: int | None = None) -> int:
    """Return how many tokens' logits fit a buffer that is small compared with a training step's activations.

    A token has as many logits as the head has rows, or ``vocabulary`` if those of all ranks are gathered.
    """
    return max(1, _CHUNK_ELEMENTS.get(head_VD.device.type, _CHUNK_ELEMENTS["cpu"]) // (vocabulary or head_VD.shape[0]))


def get_vocab_size(output: HeadOutput) -> int:
    """Return the vocabulary size over all ranks; synchronises the device if it is split."""
    partition = output.vocabulary
    if partition is None:
        return len(output.head_VD)
    return int(partition.max(torch.tensor(partition.first + partition.size, device=output.head_VD.device)))


def truncate_vocab(output: HeadOutput, size: int) -> HeadOutput:
    """Restrict the output to the first ``size`` tokens of the vocabulary."""
    partition = output.vocabulary
    if partition is None:
        lora = None if output.lora is None else output.lora.truncate(size)
        return replace(output, head_VD=output.head_VD[:size], lora=lora)
    local_size = max(0, min(partition.size, size - partition.first))
    truncated = TruncatedVocabShard(first=partition.first, size=local_size, full=partition)
    return replace(output, vocabulary=truncated)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        a_XD: Tensor | None,
        b_VX: Tensor | None,
        target_R: Tensor,
        params: LogitParams,
        lora: TrainedHeadLora | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.params, ctx.lora = params, lora
        ctx.set_materialize_grads(False)
        parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
        last_CV: Tensor | None = None
        ctx.fused = use_triton_training(hidden_RD)
        forward = vocab_parallel_logprobs.forward_fused if ctx.fused else vocab_parallel_logprobs.forward
        if params.numerics.batch_invariant:
            forward = partial(vocab_parallel_logprobs.forward_exact, fused=ctx.fused)
        unit_RV = head_VD.new_empty(len(hidden_RD), len(head_VD)) if params.keeps_grads else None
        for start in range(0, max(len(hidden_RD), 1), params.chunk_size):
            part = slice(start, start + params.chunk_size)
            results, last_CV = forward(hidden_RD[part], head_VD, target_R[part], params)
            parts.append(results)
            if unit_RV is not None:
                assert results[2] is not None, "only the fused forward keeps gradients"
                write_unit_grads(last_CV, head_VD, target_R[part], results[2], params, unit_RV[part])
        logp_R, entropy_R = torch.cat([a for a, _, _ in parts]), torch.cat([b for _, b, _ in parts])
        lse_R = None if parts[0][2] is None else torch.cat([c for _, _, c in parts if c is not None])
        # The gradient of a soft-capped logit needs the logit itself, not the log-probs.
        is_kept = len(parts) == 1 and (ctx.fused or params.softcap is None) and unit_RV is None
        kept = last_CV if is_kept else None
        ctx.save_for_backward(hidden_RD, head_VD, target_R, entropy_R, lse_R, kept, unit_RV)
        return logp_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logp_R: Tensor | None, grad_entropy_R: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_logp_R is None and grad_entropy_R is None:
            return (None,) * 7
        hidden_RD, head_VD, target_R, entropy_R, lse_R, kept, unit_RV = ctx.saved_tensors
        params: LogitParams = ctx.params
        if unit_RV is not None and grad_logp_R is not None and grad_entropy_R is None:
            grads = _scale_unit_grads(unit_RV, hidden_RD, head_VD, grad_logp_R, params, ctx.needs_input_grad[:2])
            return *grads, None, None, None, None, None
        chunks = range(0, max(len(hidden_RD), 1), params.chunk_size)
        accumulator = ChunkedBackward(
            head_VD,
            chunks=len(chunks),
            accumulation_dtype=entropy_R.dtype,
            needs=ctx.needs_input_grad[:4],
            vocabulary=params.vocabulary,
            lora=ctx.lora,
        )
        for start in chunks:
            part = slice(start, start + params.chunk_size)
            backward = vocab_parallel_logprobs.backward_fused if ctx.fused else vocab_parallel_logprobs.backward
            grad_CV = backward(
                hidden_RD[part],
                head_VD,
                target_R[part],
                entropy_R[part],
                _slice(lse_R, part),
                kept,
                _slice(grad_logp_R, part),
                _slice(grad_entropy_R, part),
                params,
            )
            accumulator.add(grad_CV, hidden_RD[part])
        return *accumulator.finish(), None, None, None


def _scale_unit_grads(
    unit_RV: Tensor,
    hidden_RD: Tensor,
    head_VD: Tensor,
    grad_logp_R: Tensor,
    params: LogitParams,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of hidden states and head from kept gradients of the logits."""
    grad_R1, dtype = grad_logp_R.float().unsqueeze(1), head_VD.dtype
    hidden = ((unit_RV @ head_VD) * grad_R1).to(dtype) if needs[0] else None
    if hidden is not None and params.vocabulary is not None:
        hidden = params.vocabulary.sum(hidden)
    return hidden, unit_RV.T @ (hidden_RD * grad_R1).to(dtype) if needs[1] else None


class ChunkedBackward:
    """Accumulates gradients from chunks of logit gradients: of hidden states, head and both factors of its ``lora``.

    ``needs`` says of which. With a ``vocabulary`` split over ranks the gradient of the hidden states is summed over
    them; those of the factors are this rank's part of the sum.
    """

    def __init__(
        self,
        head_VD: Tensor,
        *,
        chunks: int,
        accumulation_dtype: torch.dtype,
        needs: Sequence[bool],
        vocabulary: VocabPartition | None = None,
        lora: TrainedHeadLora | None = None,
    ) -> None:
        self._head_VD = head_VD
        self._chunks = chunks
        self._accumulation_dtype = accumulation_dtype
        self._vocabulary = vocabulary
        self._needs_hidden, self._needs_head = needs[:2]
        self._lora = lora
        self._needs_factors = any(needs[2:])
        self._grad_a_XD: Tensor | None = None
        self._grad_b_VX: Tensor | None = None
        self._grad_hidden: list[Tensor] = []
        self._grad_head_VD: Tensor | None = None

    def add(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """Add the next chunk's logit gradient, rounded to the head's dtype."""
        grad_CV = grad_CV.to(self._head_VD.dtype)
        if self._needs_hidden:
            self._grad_hidden.append(grad_CV @ self._head_VD)
        if self._needs_head:
            # Summed over chunks in the accumulation dtype, rounded to the parameter's dtype once at the end.
            part_VD = grad_CV.T @ hidden_CD
            if self._chunks == 1:
                self._grad_head_VD = part_VD
            elif self._accumulation_dtype == torch.float32:
                self._grad_head_VD = add_grad(self._grad_head_VD, part_VD)
            else:
                wide_VD = part_VD.to(self._accumulation_dtype)
                self._grad_head_VD = wide_VD if self._grad_head_VD is None else self._grad_head_VD.add_(wide_VD)
        if self._lora is not None:
            self._add_lora(self._lora, grad_CV[:, : len(self._lora.b_VX)], hidden_CD)

    def _add_lora(self, lora: TrainedHeadLora, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """Add what the adapter of the head contributes to a chunk's gradients."""
        a_XD, b_VX = lora.a_XD.to(grad_CV.dtype), lora.b_VX.to(grad_CV.dtype)
        back_CX = (grad_CV @ b_VX).mul_(lora.scale)
        if self._needs_hidden and not lora.merged:
            self._grad_hidden[-1].add_(back_CX @ a_XD)
        if not self._needs_factors:
            return
        low_CX = (hidden_CD @ a_XD.T).mul_(lora.scale)
        grad_a_XD, grad_b_VX = (back_CX.T @ hidden_CD).to(lora.a_XD.dtype), (grad_CV.T @ low_CX).to(lora.b_VX.dtype)
        self._grad_a_XD = grad_a_XD if self._grad_a_XD is None else self._grad_a_XD.add_(grad_a_XD)
        self._grad_b_VX = grad_b_VX if self._grad_b_VX is None else self._grad_b_VX.add_(grad_b_VX)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of the hidden states, of the head, and of its factors."""
        head_VD = None if self._grad_head_VD is None else self._grad_head_VD.to(self._head_VD.dtype)
        others = head_VD, self._grad_a_XD, self._grad_b_VX
        if not self._needs_hidden:
            return None, *others
        hidden_RD = torch.cat(self._grad_hidden)
        return hidden_RD if self._vocabulary is None else self._vocabulary.sum(hidden_RD), *others


def _slice(x_R: Tensor | None, part: slice) -> Tensor | None:
    return None if x_R is None else x_R[part]


def compute_log_softmax(output: HeadOutput, part: slice, temperature: float, size: int) -> tuple[Tensor, Tensor | None]:
    """Return the full log-probabilities of some of an output's tokens over the first ``size`` of the vocabulary.

    With a split vocabulary the columns of all ranks are gathered. Also returns the gradient of the softcap, for this
    rank's rows only.
    """
    hidden_CD, partition = output.hidden_RD[part], output.vocabulary
    options: dict[str, Any] = {"numerics": output.numerics, "adapter": output.build_adapter()}
    if partition is None:
        return dense_log_softmax(hidden_CD, output.head_VD[:size], temperature, output.softcap, **options)
    local_Cv, slope_Cv = compute_local_logits(
        hidden_CD, output.head_VD, temperature, output.softcap, partition, **options
    )
    full_CV = local_Cv.new_zeros(len(local_Cv), size)
    own_Cv = full_CV[:, partition.first : partition.first + partition.size]
    own_Cv.copy_(local_Cv[:, : own_Cv.shape[1]])
    return torch.log_softmax(partition.sum(full_CV), dim=-1), slope_Cv
