"""From hidden states to log-probs: logits in float32, and their log-sum by chunks of the vocabulary, for both planes.

Shapes: R rows, D hidden, V vocabulary, C chunks of it, B logits of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from miles.kernels.exact.elements import each, summed, wide_of
from miles.kernels.exact.head_code import find_targets, join_chunks, sum_chunks
from miles.kernels.exact.product import product
from miles.kernels.exact.product_code import on_card

# Logits that are summed as one, and drawn from as one. Where ranks share the vocabulary, each has chunks of its own.
CHUNK = 4096

_NOTHING = float("-inf")


class Chunks(NamedTuple):
    """Of each chunk of a row: its largest logit x, the sum of e^(x - top), and that of (x - top) e^(x - top).

    Those of several ranks are put side by side in the order of the ranks.
    """

    tops_RC: Tensor
    sums_RC: Tensor
    means_RC: Tensor


class Scores(NamedTuple):
    """Of each row: the log-prob of its target, the entropy, and the log-sum of all."""

    logp_R: Tensor
    entropy_R: Tensor
    lse_R: Tensor


def logits_of(hidden_RD: Tensor, head_VD: Tensor, softcap: float | None = None) -> Tensor:
    """Logits in float32 (float64 for float64 inputs), without rounding them to a low precision on the way.

    With ``softcap`` they lie between minus that and that. Gradients flow through them.
    """
    if torch.is_grad_enabled():
        logits_RV: Tensor = _Head.apply(hidden_RD, head_VD)  # pyright: ignore[reportAssignmentType]
    else:
        logits_RV = product(hidden_RD, head_VD, None, wide_of(hidden_RD.dtype))
    return logits_RV if softcap is None else bounded(logits_RV, softcap)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, head_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_RD, head_VD)
        return product(hidden_RD, head_VD, None, wide_of(hidden_RD.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RV: Tensor) -> tuple[Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_RD, head_VD = ctx.saved_tensors
        grad_RV = grad_RV.to(head_VD.dtype)
        hidden, head = ctx.needs_input_grad
        return grad_RV @ head_VD if hidden else None, grad_RV.T @ hidden_RD if head else None


def bounded(logits_RV: Tensor, softcap: float) -> Tensor:
    """Logits between minus ``softcap`` and that; in place where no gradient will be asked for."""
    if logits_RV.requires_grad:
        return _Bounded.apply(logits_RV, softcap)  # pyright: ignore[reportReturnType]
    if logits_RV.is_cuda:
        return logits_RV.div_(softcap).tanh_().mul_(softcap)
    return each(torch.tanh, logits_RV.div_(softcap)).mul_(softcap)


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, softcap: float) -> Tensor:
        tanh_RV = each(torch.tanh, logits_RV / softcap)
        ctx.save_for_backward(tanh_RV)
        return tanh_RV * softcap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RV: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (tanh_RV,) = ctx.saved_tensors
        return grad_RV * (1 - tanh_RV.square()), None


def logsumexp(logits_RV: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """The log-sum of each row of logits over its temperature (1 where it is 0)."""
    return joined(chunks_of(logits_RV, temperature))[0]


def scores_of(
    logits_RV: Tensor, target_R: Tensor, temperature: float | Tensor = 1.0, *, size: int | None = None
) -> Scores:
    """Log-probs of the targets, entropies and log-sums; columns from ``size`` on are none. No gradient flows."""
    lse_R, entropy_R = joined(chunks_of(logits_RV, temperature, size=size))
    return Scores(logp_of(logits_RV, target_R, temperature, lse_R), entropy_R, lse_R)


def logp_of(
    logits_RV: Tensor, target_R: Tensor, temperature: float | Tensor, lse_R: Tensor, out_R: Tensor | None = None
) -> Tensor:
    """The log-probs of the targets, given the log-sums; a negative target is elsewhere, and its logit counts as 0."""
    heat_R = _heat(temperature, logits_RV)
    out_R = torch.empty_like(lse_R) if out_R is None else out_R
    if on_card(logits_RV):
        find_targets(logits_RV, heat_R, target_R, lse_R, out_R)
        return out_R
    chosen_R = logits_RV.gather(1, target_R.clamp(min=0)[:, None]).squeeze(1)
    return out_R.copy_(torch.where(target_R < 0, 0, chosen_R) * _sharpness(heat_R) - lse_R)


def chunks_of(logits_RV: Tensor, temperature: float | Tensor = 1.0, *, size: int | None = None) -> Chunks:
    """What a row's log-sum and entropy are made of; columns from ``size`` on are none."""
    size = logits_RV.shape[1] if size is None else size
    heat_R = _heat(temperature, logits_RV)
    if on_card(logits_RV):
        return Chunks(*sum_chunks(logits_RV, heat_R, size, CHUNK))
    scaled_RV = logits_RV[:, :size] * _sharpness(heat_R)[:, None]
    # Halves are summed onto halves, so that a small vocabulary needs no more filling than to a power of two.
    chunk = min(CHUNK, 1 << (size - 1).bit_length())
    x_RCB = F.pad(scaled_RV, (0, -size % chunk), value=_NOTHING).unflatten(1, (-1, chunk))
    tops_RC1 = x_RCB.amax(-1, keepdim=True)
    low_RCB = x_RCB - torch.where(tops_RC1 == _NOTHING, 0, tops_RC1)
    power_RCB = each(torch.exp, low_RCB)
    slope_RCB = torch.where(power_RCB == 0, 0, low_RCB) * power_RCB
    return Chunks(tops_RC1.squeeze(-1), summed(power_RCB).squeeze(-1), summed(slope_RCB).squeeze(-1))


def joined(chunks: Chunks) -> tuple[Tensor, Tensor]:
    """The log-sum of each row and its entropy, from all its chunks."""
    tops_RC, sums_RC, means_RC = chunks
    if on_card(tops_RC):
        return join_chunks(*chunks)
    top_R1 = tops_RC.amax(1, keepdim=True)
    shift_RC = tops_RC - torch.where(top_R1 == _NOTHING, 0, top_R1)
    fade_RC = each(torch.exp, shift_RC)
    mass_RC = fade_RC * sums_RC
    # A chunk without any weight has nothing to be shifted.
    mean_RC = fade_RC * (means_RC + torch.where(mass_RC == 0, 0, shift_RC) * sums_RC)
    total_R, mean_R = summed(mass_RC).squeeze(1), summed(mean_RC).squeeze(1)
    log_R = each(torch.log, total_R)
    return top_R1.squeeze(1) + log_R, log_R - mean_R / total_R


def _heat(temperature: float | Tensor, logits_RV: Tensor) -> Tensor:
    """Temperatures in the logits' dtype, of each row or one for all; no wait for the device."""
    if isinstance(temperature, Tensor):
        return temperature.to(logits_RV.dtype).reshape(-1)
    return torch.full((1,), temperature, dtype=logits_RV.dtype, device=logits_RV.device)


def _sharpness(heat_R: Tensor) -> Tensor:
    """What logits are multiplied by."""
    heat_R = torch.where(heat_R == 0, 1, heat_R)
    return torch.ones_like(heat_R) / heat_R
