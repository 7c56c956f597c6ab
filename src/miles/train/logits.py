"""Log-probabilities and entropies from hidden states, a chunk of tokens at a time.

The logits of all tokens at once would be the largest tensor of a training step. Here only one chunk
of them exists: the forward keeps two numbers a token, and the backward computes each chunk again.
When one chunk holds everything its log-probabilities are kept instead, and nothing is computed twice.

``_R`` trained tokens, ``_C`` tokens of a chunk, ``D`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.head import logits_of

_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Hidden states on their way to a distribution: the weight they are multiplied with, and what bounds the logits."""

    hidden_RD: Tensor
    head_VD: Tensor
    softcap: float | None = None


def logprobs(
    hidden_RD: Tensor,
    head_VD: Tensor,
    target_R: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The log-probability of each target and the entropy of each distribution, both differentiable.

    Logits are bounded by ``softcap`` where there is one, divided by ``temperature`` and reckoned in float32 (float64
    for float64 inputs), ``chunk`` tokens at a time.
    """
    rows = chunk or chunk_rows(head_VD)
    return _Chunked.apply(hidden_RD, head_VD, target_R, temperature, softcap, rows)  # pyright: ignore[reportReturnType]


def chunk_rows(head_VD: Tensor) -> int:
    """How many tokens' logits fit a scratch space that is small against a training step's activations."""
    return max(1, _ELEMENTS.get(head_VD.device.type, _ELEMENTS["cpu"]) // head_VD.shape[0])


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        target_R: Tensor,
        temperature: float,
        softcap: float | None,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.softcap, ctx.rows = temperature, softcap, rows
        ctx.set_materialize_grads(False)
        parts: list[tuple[Tensor, Tensor]] = []
        logp_CV = hidden_RD.new_empty(0)
        for start in range(0, max(len(hidden_RD), 1), rows):
            part = slice(start, start + rows)
            logp_CV, _ = log_softmax_of(hidden_RD[part], head_VD, temperature, softcap)
            parts.append((logp_CV.gather(1, target_R[part, None]).squeeze(1), _entropy(logp_CV)))
        logp_R = torch.cat([a for a, _ in parts])
        entropy_R = torch.cat([b for _, b in parts])
        # A bounded logit's slope follows from the logit itself, which is not kept.
        kept = logp_CV if len(parts) == 1 and softcap is None else None
        ctx.save_for_backward(hidden_RD, head_VD, target_R, entropy_R, kept)
        return logp_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logp_R: Tensor | None, grad_entropy_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        if grad_logp_R is None and grad_entropy_R is None:
            return None, None, None, None, None, None
        hidden_RD, head_VD, target_R, entropy_R, kept = ctx.saved_tensors
        chunks = range(0, max(len(hidden_RD), 1), ctx.rows)
        back = Backward(head_VD, chunks=len(chunks), wide=entropy_R.dtype, needs=ctx.needs_input_grad[:2])
        for start in chunks:
            part = slice(start, start + ctx.rows)
            hidden_CD = hidden_RD[part]
            slope_CV = None
            if kept is None:
                logp_CV, slope_CV = log_softmax_of(hidden_CD, head_VD, ctx.temperature, ctx.softcap)
            else:
                logp_CV = kept
            grad_C, grad_entropy_C = _cut(grad_logp_R, part), _cut(grad_entropy_R, part)
            grad_CV = _grad_logits(logp_CV, target_R[part], entropy_R[part], grad_C, grad_entropy_C)
            grad_CV = grad_CV.div_(ctx.temperature)
            back.add(grad_CV if slope_CV is None else grad_CV.mul_(slope_CV), hidden_CD)
        return *back.done(), None, None, None, None


class Backward:
    """Carries the gradients of chunks of logits back to the hidden states and to the head, where these ``needs``."""

    def __init__(self, head_VD: Tensor, *, chunks: int, wide: torch.dtype, needs: Sequence[bool]) -> None:
        self._head_VD, self._chunks, self._wide = head_VD, chunks, wide
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
        return torch.cat(self._grad_hidden) if self._needs_hidden else None, head_VD


def _cut(grad_R: Tensor | None, part: slice) -> Tensor | None:
    return None if grad_R is None else grad_R[part]


def log_softmax_of(
    hidden_CD: Tensor, head_VD: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities, and how steeply bounded logits follow unbounded ones."""
    logits_CV = logits_of(hidden_CD, head_VD, softcap)
    slope_CV = None if softcap is None else 1 - (logits_CV / softcap).square()
    return torch.log_softmax(logits_CV if temperature == 1.0 else logits_CV.div_(temperature), dim=-1), slope_CV


def _entropy(logp_CV: Tensor) -> Tensor:
    return -torch.linalg.vecdot(logp_CV.exp(), logp_CV)


def _grad_logits(
    logp_CV: Tensor, target_C: Tensor, entropy_C: Tensor, grad_logp_C: Tensor | None, grad_entropy_C: Tensor | None
) -> Tensor:
    """d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)."""
    p_CV = logp_CV.exp()
    if grad_entropy_C is None:
        assert grad_logp_C is not None, "a backward pass without a gradient"
        out_CV = p_CV.mul_(-grad_logp_C[:, None])
    else:
        weight_CV = (logp_CV + entropy_C[:, None]).mul_(-grad_entropy_C[:, None])
        out_CV = p_CV.mul_(weight_CV if grad_logp_C is None else weight_CV.sub_(grad_logp_C[:, None]))
    return out_CV if grad_logp_C is None else out_CV.scatter_add_(1, target_C[:, None], grad_logp_C[:, None])
