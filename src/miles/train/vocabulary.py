"""One chunk of tokens: log-probs, entropies and the gradient of the logits, where one rank or several have them.

``_C`` tokens of the chunk, ``D`` hidden size, ``V`` vocabulary or this rank's rows of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from miles.kernels.exact import head as exact_head
from miles.kernels.head import logits_of
from miles.kernels.train_head import Scale, slopes_of, sums_of

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewer:
    """A vocabulary without its last tokens."""

    first: int
    size: int
    of: Vocabulary

    def sum(self, x: Tensor) -> Tensor:
        return self.of.sum(x)

    def most(self, x: Tensor) -> Tensor:
        return self.of.most(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What becomes of logits, and who else has some; ``rows`` tokens' exist at a time."""

    temperature: float
    softcap: float | None
    rows: int
    vocabulary: Vocabulary | None

    def scale(self, head_VD: Tensor) -> Scale:
        size = len(head_VD) if self.vocabulary is None else self.vocabulary.size
        return Scale(temperature=self.temperature, softcap=self.softcap, size=size)


def forward(
    hidden_CD: Tensor, head_VD: Tensor, target_C: Tensor, how: How
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


def backward(
    hidden_CD: Tensor,
    head_VD: Tensor,
    target_C: Tensor,
    entropy_C: Tensor,
    lse_C: Tensor | None,
    logp_CV: Tensor | None,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    how: How,
) -> Tensor:
    """The gradient of a chunk's logits; its log-probs are made once more where they were not kept."""
    slope_CV: Tensor | None = None
    if logp_CV is None and lse_C is not None and how.vocabulary is not None:
        logits_CV, slope_CV = own_logits_of(hidden_CD, head_VD, how.temperature, how.softcap, how.vocabulary)
        logp_CV = logits_CV.sub_(lse_C[:, None])
    elif logp_CV is None:
        logp_CV, slope_CV = log_softmax_of(hidden_CD, head_VD, how.temperature, how.softcap)
    grad_CV = _grad_logits(logp_CV, target_C, entropy_C, grad_logp_C, grad_entropy_C, how.vocabulary)
    grad_CV = grad_CV.div_(how.temperature)
    return grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)


def forward_fused(
    hidden_CD: Tensor, head_VD: Tensor, target_C: Tensor, how: How
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]:
    """``forward`` in one pass over the logits, which are what is given beside: unbounded, of all rows."""
    logits_CV, vocabulary = logits_of(hidden_CD, head_VD), how.vocabulary
    most_C, total_C, mean_C, chosen_C = sums_of(logits_CV, _here(target_C, vocabulary), how.scale(head_VD))
    if vocabulary is not None:
        # What was counted from this rank's largest logit is counted from that of all.
        high_C = vocabulary.most(most_C.clone())
        shift_C = most_C - high_C
        fade_C = shift_C.exp()
        mean_C = fade_C * (mean_C + total_C * shift_C)
        chosen_C = torch.where(_here(target_C, vocabulary) >= 0, chosen_C + shift_C, 0)
        total_C, mean_C, chosen_C = vocabulary.sum(torch.stack((fade_C * total_C, mean_C, chosen_C))).unbind()
        most_C = high_C
    log_C = total_C.log()
    return (chosen_C - log_C, log_C - mean_C / total_C, most_C + log_C), logits_CV


def backward_fused(
    hidden_CD: Tensor,
    head_VD: Tensor,
    target_C: Tensor,
    entropy_C: Tensor,
    lse_C: Tensor | None,
    logits_CV: Tensor | None,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    how: How,
) -> Tensor:
    """``backward`` in one pass over the logits."""
    assert lse_C is not None
    logits_CV = logits_of(hidden_CD, head_VD) if logits_CV is None else logits_CV
    grad_logp_C, grad_entropy_C = (None if g is None else g.contiguous() for g in (grad_logp_C, grad_entropy_C))
    grads, target_C = (grad_logp_C, grad_entropy_C), _here(target_C, how.vocabulary)
    return slopes_of(logits_CV, target_C, lse_C, entropy_C, *grads, how.scale(head_VD), head_VD.dtype)


def forward_exact(
    hidden_CD: Tensor, head_VD: Tensor, target_C: Tensor, how: How, *, fused: bool
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]:
    """``forward`` to the last bit as the engine finds it; beside it what ``backward``, or the ``fused`` one, keeps.

    Ranks that share the vocabulary bring their logits together: a sum by parts would be another one.
    """
    logits_CV, shared = logits_of(hidden_CD, head_VD), how.vocabulary
    bound_CV = logits_CV if how.softcap is None else exact_head.bounded(logits_CV.clone(), how.softcap)
    whole_CV = bound_CV
    if shared is not None:
        most = shared.most(torch.tensor(shared.first + shared.size, device=logits_CV.device))
        whole_CV = logits_CV.new_zeros(len(logits_CV), int(most))
        whole_CV[:, shared.first : shared.first + shared.size] = bound_CV[:, : shared.size]
        whole_CV = shared.sum(whole_CV)
    found = exact_head.scores_of(whole_CV, target_C, how.temperature)
    kept_CV = logits_CV
    if not fused:
        kept_CV = bound_CV / how.temperature - found.lse_R[:, None]
        if shared is not None:
            kept_CV[:, shared.size :] = _NOWHERE
    return (found.logp_R, found.entropy_R, found.lse_R), kept_CV


def log_softmax_of(
    hidden_CD: Tensor, head_VD: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities, and how steeply bounded logits follow unbounded ones."""
    logits_CV = logits_of(hidden_CD, head_VD, softcap)
    slope_CV = None if softcap is None else 1 - (logits_CV / softcap).square()
    return torch.log_softmax(logits_CV if temperature == 1.0 else logits_CV.div_(temperature), dim=-1), slope_CV


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


def _here(target_C: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """Which of this rank's rows each target is; -1 for none."""
    if vocabulary is None:
        return target_C
    local_C, here_C = _local(target_C, vocabulary)
    return torch.where(here_C, local_C, -1)


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
