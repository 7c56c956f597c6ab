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
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.head import logits_of

_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
# A padding row's logit: no probability whatever it is compared with, and yet finite, so that nothing times it is 0.
_NOWHERE = -1e30


class Vocabulary(Protocol):
    """A head whose rows are cut over ranks, seen from one of them.

    Its rows are the tokens from ``first`` on, ``size`` of them; rows behind these are padding and no tokens.
    """

    @property
    def first(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks that share the vocabulary, the same bits on each; no gradient flows."""
        ...

    def most(self, x: Tensor) -> Tensor:
        """The largest over these ranks, element by element."""
        ...


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
    nothing was replayed.
    """

    hidden_RD: Tensor
    head_VD: Tensor
    softcap: float | None = None
    vocabulary: Vocabulary | None = None
    tokens: Tokens | None = None
    flips: Tensor | None = None
    replayed: Tensor | None = None


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
    how = _How(
        temperature=temperature,
        softcap=output.softcap,
        rows=chunk or chunk_rows(output.head_VD),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fewer:
    """A vocabulary without its last tokens."""

    first: int
    size: int
    of: Vocabulary

    def sum(self, x: Tensor) -> Tensor:
        return self.of.sum(x)

    def most(self, x: Tensor) -> Tensor:
        return self.of.most(x)


def cut_to(output: Output, size: int) -> Output:
    """The same with the first ``size`` tokens of the vocabulary alone."""
    shared = output.vocabulary
    if shared is None:
        return replace(output, head_VD=output.head_VD[:size])
    own = max(0, min(shared.size, size - shared.first))
    return replace(output, vocabulary=_Fewer(first=shared.first, size=own, of=shared))


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    temperature: float
    softcap: float | None
    rows: int
    vocabulary: Vocabulary | None


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, head_VD: Tensor, target_R: Tensor, how: _How) -> tuple[Tensor, Tensor]:
        ctx.how = how
        ctx.set_materialize_grads(False)
        parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
        logp_CV: Tensor | None = None
        for start in range(0, max(len(hidden_RD), 1), how.rows):
            part = slice(start, start + how.rows)
            found, logp_CV = _forward(hidden_RD[part], head_VD, target_R[part], how)
            parts.append(found)
        logp_R, entropy_R = torch.cat([a for a, _, _ in parts]), torch.cat([b for _, b, _ in parts])
        lse_R = None if how.vocabulary is None else torch.cat([c for _, _, c in parts if c is not None])
        # A bounded logit's slope follows from the logit itself, which is not kept.
        kept = logp_CV if len(parts) == 1 and how.softcap is None else None
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
        how: _How = ctx.how
        chunks = range(0, max(len(hidden_RD), 1), how.rows)
        needs = ctx.needs_input_grad[:2]
        back = Backward(head_VD, chunks=len(chunks), wide=entropy_R.dtype, needs=needs, vocabulary=how.vocabulary)
        for start in chunks:
            part = slice(start, start + how.rows)
            slope_CV, logp_CV = None, kept
            if logp_CV is None:
                logp_CV, slope_CV = _again(hidden_RD[part], head_VD, _cut(lse_R, part), how)
            grad_C, grad_entropy_C = _cut(grad_logp_R, part), _cut(grad_entropy_R, part)
            grad_CV = _grad_logits(logp_CV, target_R[part], entropy_R[part], grad_C, grad_entropy_C, how.vocabulary)
            grad_CV = grad_CV.div_(how.temperature)
            back.add(grad_CV if slope_CV is None else grad_CV.mul_(slope_CV), hidden_RD[part])
        return *back.done(), None, None


def _forward(
    hidden_CD: Tensor, head_VD: Tensor, target_C: Tensor, how: _How
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]:
    """A chunk's log-probs of its targets, entropies and, of ranks, log-sums; and the log-probs of this rank's rows."""
    vocabulary = how.vocabulary
    if vocabulary is None:
        logp_CV, _ = log_softmax_of(hidden_CD, head_VD, how.temperature, how.softcap)
        logp_C = logp_CV.gather(1, target_C[:, None]).squeeze(1)
        return (logp_C, _entropy(logp_CV), None), logp_CV
    logits_CV, _ = own_logits_of(hidden_CD, head_VD, how.temperature, how.softcap, vocabulary)
    most_C = vocabulary.most(logits_CV.amax(-1))
    logits_CV.sub_(most_C[:, None])
    p_CV = logits_CV.exp()
    local_C, here_C = _local(target_C, vocabulary)
    chosen_C = logits_CV.gather(1, local_C[:, None]).squeeze(1).masked_fill(~here_C, 0)
    sums_3C = torch.stack((p_CV.sum(-1), torch.linalg.vecdot(p_CV, logits_CV), chosen_C))
    total_C, mean_C, chosen_C = vocabulary.sum(sums_3C).unbind()
    log_C = total_C.log()
    found = (chosen_C - log_C, log_C - mean_C / total_C, most_C + log_C)
    return found, logits_CV.sub_(log_C[:, None])


def _again(hidden_CD: Tensor, head_VD: Tensor, lse_C: Tensor | None, how: _How) -> tuple[Tensor, Tensor | None]:
    """The log-probs of this rank's rows once more, and how steeply bounded logits follow unbounded ones."""
    if how.vocabulary is None or lse_C is None:
        return log_softmax_of(hidden_CD, head_VD, how.temperature, how.softcap)
    logits_CV, slope_CV = own_logits_of(hidden_CD, head_VD, how.temperature, how.softcap, how.vocabulary)
    return logits_CV.sub_(lse_C[:, None]), slope_CV


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


def log_softmax_of(
    hidden_CD: Tensor, head_VD: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities, and how steeply bounded logits follow unbounded ones."""
    logits_CV = logits_of(hidden_CD, head_VD, softcap)
    slope_CV = None if softcap is None else 1 - (logits_CV / softcap).square()
    return torch.log_softmax(logits_CV if temperature == 1.0 else logits_CV.div_(temperature), dim=-1), slope_CV


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


def own_logits_of(
    hidden_CD: Tensor, head_VD: Tensor, temperature: float, softcap: float | None, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor | None]:
    """The logits of this rank's rows, hopelessly small where a row is padding, and the slope of bounded ones."""
    logits_CV = logits_of(hidden_CD, head_VD, softcap)
    slope_CV = None if softcap is None else 1 - (logits_CV / softcap).square()
    if temperature != 1.0:
        logits_CV.div_(temperature)
    if vocabulary.size < len(head_VD):
        logits_CV[:, vocabulary.size :] = _NOWHERE
    return logits_CV, slope_CV


def _local(target_C: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Which of this rank's rows each target is, and whether it is any."""
    local_C = target_C - vocabulary.first
    here_C = (local_C >= 0) & (local_C < vocabulary.size)
    return local_C.masked_fill(~here_C, 0), here_C


def _entropy(logp_CV: Tensor) -> Tensor:
    return -torch.linalg.vecdot(logp_CV.exp(), logp_CV)


def _grad_logits(
    logp_CV: Tensor,
    target_C: Tensor,
    entropy_C: Tensor,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    vocabulary: Vocabulary | None,
) -> Tensor:
    """d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)."""
    p_CV = logp_CV.exp()
    if grad_entropy_C is None:
        assert grad_logp_C is not None, "a backward pass without a gradient"
        out_CV = p_CV.mul_(-grad_logp_C[:, None])
    else:
        weight_CV = (logp_CV + entropy_C[:, None]).mul_(-grad_entropy_C[:, None])
        out_CV = p_CV.mul_(weight_CV if grad_logp_C is None else weight_CV.sub_(grad_logp_C[:, None]))
    if grad_logp_C is None:
        return out_CV
    if vocabulary is not None:
        target_C, here_C = _local(target_C, vocabulary)
        grad_logp_C = grad_logp_C * here_C
    return out_CV.scatter_add_(1, target_C[:, None], grad_logp_C[:, None])
