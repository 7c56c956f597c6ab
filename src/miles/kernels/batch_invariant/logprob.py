"""Batch-invariant log-probs: logits in float32, and their log-sum-exp by fixed chunks of the vocabulary.

Shapes: R rows, D hidden, V vocabulary, C chunks of it, B logits of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from miles.kernels.batch_invariant.elementwise import accumulation_dtype, map_elements, tree_sum
from miles.kernels.batch_invariant.linear import linear_forward
from miles.kernels.batch_invariant.logprob_triton import (
    launch_merge_chunks,
    launch_reduce_chunks,
    launch_target_logprobs,
)
from miles.kernels.runtime.triton_compat import use_triton

# Logits of a chunk, for sums and for sampling. With a sharded vocabulary, each rank has chunks of its own.
CHUNK = 4096

_NEG_INF = float("-inf")


class LogitChunks(NamedTuple):
    """Per chunk of a row: its largest logit x, the sum of e^(x - max), and that of (x - max) e^(x - max).

    Those of several ranks are concatenated in rank order.
    """

    max_RC: Tensor
    sums_RC: Tensor
    means_RC: Tensor


class LogprobStats(NamedTuple):
    """Per row: the log-prob of its target, the entropy, and the log-sum-exp."""

    logp_R: Tensor
    entropy_R: Tensor
    lse_R: Tensor


def compute_logits(hidden_RD: Tensor, head_VD: Tensor, softcap: float | None = None) -> Tensor:
    """Logits in float32 (float64 for float64 inputs), without rounding to a lower precision on the way.

    With ``softcap`` they are bounded by it. Differentiable.
    """
    if torch.is_grad_enabled():
        logits_RV: Tensor = _LMHead.apply(hidden_RD, head_VD)  # pyright: ignore[reportAssignmentType]
    else:
        logits_RV = linear_forward(hidden_RD, head_VD, None, accumulation_dtype(hidden_RD.dtype))
    return logits_RV if softcap is None else apply_softcap(logits_RV, softcap)


class _LMHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, head_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_RD, head_VD)
        return linear_forward(hidden_RD, head_VD, None, accumulation_dtype(hidden_RD.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RV: Tensor) -> tuple[Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_RD, head_VD = ctx.saved_tensors
        grad_RV = grad_RV.to(head_VD.dtype)
        needs_hidden, needs_head = ctx.needs_input_grad
        return grad_RV @ head_VD if needs_hidden else None, grad_RV.T @ hidden_RD if needs_head else None


def apply_softcap(logits_RV: Tensor, softcap: float) -> Tensor:
    """Logits bounded by ``softcap``; in place if no gradient is needed."""
    if logits_RV.requires_grad:
        return _Softcap.apply(logits_RV, softcap)  # pyright: ignore[reportReturnType]
    if logits_RV.is_cuda:
        return logits_RV.div_(softcap).tanh_().mul_(softcap)
    return map_elements(torch.tanh, logits_RV.div_(softcap)).mul_(softcap)


class _Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, softcap: float) -> Tensor:
        tanh_RV = map_elements(torch.tanh, logits_RV / softcap)
        ctx.save_for_backward(tanh_RV)
        return tanh_RV * softcap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RV: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (tanh_RV,) = ctx.saved_tensors
        return grad_RV * (1 - tanh_RV.square()), None


def logsumexp(logits_RV: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """The log-sum-exp of each row of logits over its temperature (1 if it is 0)."""
    return merge_chunks(reduce_chunks(logits_RV, temperature))[0]


def compute_logprob_stats(
    logits_RV: Tensor, target_R: Tensor, temperature: float | Tensor = 1.0, *, size: int | None = None
) -> LogprobStats:
    """Log-probs of the targets, entropies and log-sum-exps; columns from ``size`` on are padding. No gradient."""
    lse_R, entropy_R = merge_chunks(reduce_chunks(logits_RV, temperature, size=size))
    return LogprobStats(compute_target_logprobs(logits_RV, target_R, temperature, lse_R), entropy_R, lse_R)


def compute_target_logprobs(
    logits_RV: Tensor, target_R: Tensor, temperature: float | Tensor, lse_R: Tensor, out_R: Tensor | None = None
) -> Tensor:
    """Log-probs of the targets, given the log-sum-exps; a negative target is on another rank (logit 0)."""
    temperature_R = _temperature_tensor(temperature, logits_RV)
    out_R = torch.empty_like(lse_R) if out_R is None else out_R
    if use_triton(logits_RV):
        launch_target_logprobs(logits_RV, temperature_R, target_R, lse_R, out_R)
        return out_R
    target_logit_R = logits_RV.gather(1, target_R.clamp(min=0)[:, None]).squeeze(1)
    return out_R.copy_(torch.where(target_R < 0, 0, target_logit_R) * _inverse_temperature(temperature_R) - lse_R)


def reduce_chunks(logits_RV: Tensor, temperature: float | Tensor = 1.0, *, size: int | None = None) -> LogitChunks:
    """Maxima and sums of each chunk; columns from ``size`` on are padding."""
    size = logits_RV.shape[1] if size is None else size
    temperature_R = _temperature_tensor(temperature, logits_RV)
    if use_triton(logits_RV):
        return LogitChunks(*launch_reduce_chunks(logits_RV, temperature_R, size, CHUNK))
    scaled_RV = logits_RV[:, :size] * _inverse_temperature(temperature_R)[:, None]
    # Halves are added to halves, so that a small vocabulary is only padded to a power of two.
    chunk = min(CHUNK, 1 << (size - 1).bit_length())
    x_RCB = F.pad(scaled_RV, (0, -size % chunk), value=_NEG_INF).unflatten(1, (-1, chunk))
    max_RC1 = x_RCB.amax(-1, keepdim=True)
    shifted_RCB = x_RCB - torch.where(max_RC1 == _NEG_INF, 0, max_RC1)
    exp_RCB = map_elements(torch.exp, shifted_RCB)
    weighted_RCB = torch.where(exp_RCB == 0, 0, shifted_RCB) * exp_RCB
    return LogitChunks(max_RC1.squeeze(-1), tree_sum(exp_RCB).squeeze(-1), tree_sum(weighted_RCB).squeeze(-1))


def merge_chunks(chunks: LogitChunks) -> tuple[Tensor, Tensor]:
    """The log-sum-exp and the entropy of each row, from all its chunks."""
    max_RC, sums_RC, means_RC = chunks
    if use_triton(max_RC):
        return launch_merge_chunks(*chunks)
    max_R1 = max_RC.amax(1, keepdim=True)
    shift_RC = max_RC - torch.where(max_R1 == _NEG_INF, 0, max_R1)
    rescale_RC = map_elements(torch.exp, shift_RC)
    mass_RC = rescale_RC * sums_RC
    # A chunk without any weight has nothing to shift.
    mean_RC = rescale_RC * (means_RC + torch.where(mass_RC == 0, 0, shift_RC) * sums_RC)
    total_R, mean_R = tree_sum(mass_RC).squeeze(1), tree_sum(mean_RC).squeeze(1)
    log_R = map_elements(torch.log, total_R)
    return max_R1.squeeze(1) + log_R, log_R - mean_R / total_R


def _temperature_tensor(temperature: float | Tensor, logits_RV: Tensor) -> Tensor:
    """Temperatures in the logits' dtype, per row or one for all; without a device sync."""
    if isinstance(temperature, Tensor):
        return temperature.to(logits_RV.dtype).reshape(-1)
    return torch.full((1,), temperature, dtype=logits_RV.dtype, device=logits_RV.device)


def _inverse_temperature(temperature_R: Tensor) -> Tensor:
    """The factor that logits are multiplied by."""
    temperature_R = torch.where(temperature_R == 0, 1, temperature_R)
    return torch.ones_like(temperature_R) / temperature_R
