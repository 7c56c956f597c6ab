"""Log-probabilities and entropies from hidden states, a chunk of tokens at a time.

The logits of all tokens at once would be the largest tensor of a training step. Here only one chunk
of them exists: the forward keeps two numbers a token, and the backward computes each chunk again.
When one chunk holds everything its log-probabilities are kept instead, and nothing is computed twice.

Where ranks share the vocabulary each has the logits of its own rows alone, and a chunk costs two small sums over the
ranks: the largest logit of each token, then what follows from it. The backward needs none but that of the hidden
states' gradient.

``_R`` trained tokens, ``_r`` those of this rank, ``_C`` tokens of a chunk, ``D`` hidden size, ``V`` vocabulary or this
rank's rows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.arithmetic import exact
from miles.kernels.device_code import trained
from miles.train import vocabulary
from miles.train.vocabulary import Fewer, How, Vocabulary, log_softmax_of, own_logits_of

__all__ = [
    "Backward",
    "Output",
    "Tokens",
    "Vocabulary",
    "chunk_rows",
    "cut_to",
    "distribution_of",
    "logprobs",
    "vocabulary_of",
]

_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}


class Tokens(Protocol):
    """A micro-batch whose tokens are cut over ranks: ``mine_r`` are the trained ones that this rank predicts."""

    @property
    def mine_r(self) -> Tensor: ...

    def join(self, x_r: Tensor) -> Tensor:
        """What the ranks have of their tokens as one [R, ...], on each; of a gradient the own part comes back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Hidden states on their way to a distribution: the weight they are multiplied with, and what bounds the logits.

    Where tokens or the vocabulary are cut over ranks, these are a rank's own. ``flips`` counts the replayed experts
    that the model's own router would not have chosen, out of ``replayed``, over the whole micro-batch; both None where
    nothing was replayed. ``load_LE`` is how often each expert of each layer was chosen, where that was counted.
    """

    hidden_RD: Tensor
    head_VD: Tensor
    softcap: float | None = None
    vocabulary: Vocabulary | None = None
    tokens: Tokens | None = None
    flips: Tensor | None = None
    replayed: Tensor | None = None
    load_LE: Tensor | None = None


def logprobs(
    output: Output, target_R: Tensor, *, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """The log-probability of each target and the entropy of each distribution, both differentiable.

    Logits are bounded by ``softcap`` where there is one, divided by ``temperature`` and reckoned in float32 (float64
    for float64 inputs), ``chunk`` tokens at a time. Targets and results are those of the whole micro-batch, also where
    its tokens are cut over ranks.
    """
    tokens = output.tokens
    target_r = target_R if tokens is None else target_R.index_select(0, tokens.mine_r)
    how = How(
        temperature=temperature,
        softcap=output.softcap,
        # What writes no second tensor of the logits' size has room for twice as many.
        rows=chunk or chunk_rows(output.head_VD) * (2 if trained(output.hidden_RD) else 1),
        vocabulary=output.vocabulary,
    )
    logp_r, entropy_r = _Chunked.apply(output.hidden_RD, output.head_VD, target_r, how)  # pyright: ignore[reportGeneralTypeIssues]
    if tokens is None:
        return logp_r, entropy_r
    logp_R, entropy_R = tokens.join(torch.stack((logp_r, entropy_r), -1)).unbind(-1)
    return logp_R, entropy_R


def chunk_rows(head_VD: Tensor, vocabulary: int | None = None) -> int:
    """How many tokens' logits fit a scratch space that is small against a training step's activations.

    A token has as many as the head has rows, or ``vocabulary`` where those of all ranks are brought together.
    """
    return max(1, _ELEMENTS.get(head_VD.device.type, _ELEMENTS["cpu"]) // (vocabulary or head_VD.shape[0]))


def vocabulary_of(output: Output) -> int:
    """How many tokens there are, of all ranks together; waits for the device where ranks share them."""
    shared = output.vocabulary
    if shared is None:
        return len(output.head_VD)
    return int(shared.most(torch.tensor(shared.first + shared.size, device=output.head_VD.device)))


def cut_to(output: Output, size: int) -> Output:
    """The same with the first ``size`` tokens of the vocabulary alone."""
    shared = output.vocabulary
    if shared is None:
        return replace(output, head_VD=output.head_VD[:size])
    own = max(0, min(shared.size, size - shared.first))
    return replace(output, vocabulary=Fewer(first=shared.first, size=own, of=shared))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, head_VD: Tensor, target_R: Tensor, how: How) -> tuple[Tensor, Tensor]:
        ctx.how = how
        ctx.set_materialize_grads(False)
        parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
        last_CV: Tensor | None = None
        ctx.fused = trained(hidden_RD)
        forward = vocabulary.forward_fused if ctx.fused else vocabulary.forward
        if exact():
            forward = partial(vocabulary.forward_exact, fused=ctx.fused)
        for start in range(0, max(len(hidden_RD), 1), how.rows):
            part = slice(start, start + how.rows)
            found, last_CV = forward(hidden_RD[part], head_VD, target_R[part], how)
            parts.append(found)
        logp_R, entropy_R = torch.cat([a for a, _, _ in parts]), torch.cat([b for _, b, _ in parts])
        lse_R = None if parts[0][2] is None else torch.cat([c for _, _, c in parts if c is not None])
        # A bounded logit's slope follows from the logit itself, which the log-probs are not.
        kept = last_CV if len(parts) == 1 and (ctx.fused or how.softcap is None) else None
        ctx.save_for_backward(hidden_RD, head_VD, target_R, entropy_R, lse_R, kept)
        return logp_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logp_R: Tensor | None, grad_entropy_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        if grad_logp_R is None and grad_entropy_R is None:
            return None, None, None, None
        hidden_RD, head_VD, target_R, entropy_R, lse_R, kept = ctx.saved_tensors
        how: How = ctx.how
        chunks = range(0, max(len(hidden_RD), 1), how.rows)
        needs = ctx.needs_input_grad[:2]
        back = Backward(head_VD, chunks=len(chunks), wide=entropy_R.dtype, needs=needs, vocabulary=how.vocabulary)
        for start in chunks:
            part = slice(start, start + how.rows)
            grads = _cut(grad_logp_R, part), _cut(grad_entropy_R, part)
            backward = vocabulary.backward_fused if ctx.fused else vocabulary.backward
            known = (hidden_RD[part], head_VD, target_R[part], entropy_R[part], _cut(lse_R, part), kept)
            back.add(backward(*known, *grads, how), hidden_RD[part])
        return *back.done(), None, None


class Backward:
    """Carries the gradients of chunks of logits back to the hidden states and to the head, where these ``needs``.

    Where ranks share the ``vocabulary`` a hidden state's gradient is the sum over all of them.
    """

    def __init__(
        self,
        head_VD: Tensor,
        *,
        chunks: int,
        wide: torch.dtype,
        needs: Sequence[bool],
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._head_VD, self._chunks, self._wide, self._vocabulary = head_VD, chunks, wide, vocabulary
        self._needs_hidden, self._needs_head = needs
        self._grad_hidden: list[Tensor] = []
        self._grad_head_VD: Tensor | None = None

    def add(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """The next chunk's; rounded to the head's own type."""
        grad_CV = grad_CV.to(self._head_VD.dtype)
        if self._needs_hidden:
            self._grad_hidden.append(grad_CV @ self._head_VD)
        if self._needs_head:
            # Summed over chunks in the wide type, rounded to the parameter's own once at the end.
            part_VD = grad_CV.T @ hidden_CD
            if self._grad_head_VD is None:
                self._grad_head_VD = part_VD if self._chunks == 1 else part_VD.to(self._wide)
            else:
                self._grad_head_VD += part_VD

    def done(self) -> tuple[Tensor | None, Tensor | None]:
        """What came of all chunks, of the hidden states and of the head."""
        head_VD = None if self._grad_head_VD is None else self._grad_head_VD.to(self._head_VD.dtype)
        if not self._needs_hidden:
            return None, head_VD
        hidden_RD = torch.cat(self._grad_hidden)
        return hidden_RD if self._vocabulary is None else self._vocabulary.sum(hidden_RD), head_VD


def _cut(grad_R: Tensor | None, part: slice) -> Tensor | None:
    return None if grad_R is None else grad_R[part]


def distribution_of(output: Output, part: slice, temperature: float, size: int) -> tuple[Tensor, Tensor | None]:
    """The whole log-probabilities of some of an output's tokens over the first ``size`` of the vocabulary.

    Where ranks share that, each brings its columns together with the others'. Beside it, the slope of bounded logits,
    of this rank's rows alone.
    """
    hidden_CD, shared = output.hidden_RD[part], output.vocabulary
    if shared is None:
        return log_softmax_of(hidden_CD, output.head_VD[:size], temperature, output.softcap)
    own_Cv, slope_Cv = own_logits_of(hidden_CD, output.head_VD, temperature, output.softcap, shared)
    whole_CV = own_Cv.new_zeros(len(own_Cv), size)
    here_Cv = whole_CV[:, shared.first : shared.first + shared.size]
    here_Cv.copy_(own_Cv[:, : here_Cv.shape[1]])
    return torch.log_softmax(shared.sum(whole_CV), dim=-1), slope_Cv
