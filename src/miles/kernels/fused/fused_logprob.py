"""Fused log-prob and entropy of a chunk of logits in one pass, and the gradient of the logits in another.

Shapes: C tokens, V rows of the vocabulary shard.

Logits come from the LM head in float32. Softcap, temperature and padding are applied on the way, so nothing of their
size is written but the gradient, in the precision of the LM head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton

_BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """What is applied to a logit: ``softcap``, then division by ``temperature``; rows from ``size`` on are padding."""

    temperature: float
    softcap: float | None
    size: int


class LogitSums(NamedTuple):
    """Per token, relative to its largest logit: the sum of e^logit, that of logit e^logit, and the target's logit."""

    max_C: Tensor
    total_C: Tensor
    mean_C: Tensor
    target_logit_C: Tensor


def reduce_logits(logits_CV: Tensor, target_C: Tensor, scale: LogitTransform) -> LogitSums:
    """Targets are rows of this shard; a negative target is on another rank, and its logit is 0."""
    sums = LogitSums(*(torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device) for _ in range(4)))
    assert logits_CV.dtype == torch.float32 and logits_CV.is_contiguous()
    if len(logits_CV):
        with device_guard(logits_CV):
            _reduce_kernel[(len(logits_CV),)](
                logits_CV,
                target_C,
                *sums,
                logits_CV.shape[1],
                scale.size,
                scale.softcap or 1.0,
                1 / scale.temperature,
                SOFTCAP=scale.softcap is not None,
                BLOCK=min(_BLOCK, triton.next_power_of_2(logits_CV.shape[1])),
                num_warps=8,
            )
    return sums


def compute_logit_grads(
    logits_CV: Tensor,
    target_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    scale: LogitTransform,
    dtype: torch.dtype,
    *,
    out_CV: Tensor | None = None,
) -> Tensor:
    """Gradient of the untransformed logits, from those of log-probs and entropies; into ``out_CV`` if it is given."""
    if out_CV is None:
        out_CV = torch.empty(logits_CV.shape, dtype=dtype, device=logits_CV.device)
    columns = logits_CV.shape[1]
    block = min(_BLOCK, 1 << (columns - 1).bit_length())
    if len(logits_CV):
        with device_guard(logits_CV):
            tensors = (logits_CV, target_C, lse_C, entropy_C, grad_logp_C, grad_entropy_C, out_CV)
            scalars = (columns, scale.size, scale.softcap or 1.0, 1 / scale.temperature)
            _grad_kernel[(len(logits_CV), triton.cdiv(columns, block))](
                *tensors,
                *scalars,
                SOFTCAP=scale.softcap is not None,
                LOGP=grad_logp_C is not None,
                ENTROPY=grad_entropy_C is not None,
                BLOCK=block,
                num_warps=8,
            )
    return out_CV


@jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """From the exponential, which is available on every vendor."""
    return 2 * tl.sigmoid(2 * x) - 1


@jit
def _reduce_kernel(
    logits_ptr: tl.tensor,
    target_ptr: tl.tensor,
    max_ptr: tl.tensor,
    total_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    target_logit_ptr: tl.tensor,
    columns: tl.tensor,
    size: tl.tensor,
    softcap: tl.tensor,
    inverse_temperature: tl.tensor,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each lane keeps the largest logit it has seen and its sums relative to that; they are merged at the end."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * columns
    max_B = tl.full((BLOCK,), -1e30, tl.float32)
    total_B, mean_B = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column_B = start + tl.arange(0, BLOCK)
        logit_B = tl.load(logits_ptr + column_B, column_B < size, other=-1e30)
        if SOFTCAP:
            logit_B = tl.where(column_B < size, softcap * _tanh(logit_B / softcap), -1e30)
        logit_B = logit_B * inverse_temperature
        new_max_B = tl.maximum(max_B, logit_B)
        rescale_B = tl.exp(max_B - new_max_B)
        weight_B = tl.where(column_B < size, tl.exp(logit_B - new_max_B), 0.0)
        mean_B = rescale_B * (mean_B + total_B * (max_B - new_max_B)) + weight_B * (logit_B - new_max_B)
        total_B = rescale_B * total_B + weight_B
        max_B = new_max_B
    max_logit = tl.max(max_B, 0)
    shift_B = max_B - max_logit
    rescale_B = tl.exp(shift_B)
    total = tl.sum(rescale_B * total_B, 0)
    mean = tl.sum(rescale_B * (mean_B + total_B * tl.maximum(shift_B, -1e4)), 0)
    target = tl.load(target_ptr + row)
    target_logit = tl.load(logits_ptr + target, target >= 0, other=0.0)
    if SOFTCAP:
        target_logit = softcap * _tanh(target_logit / softcap)
    tl.store(max_ptr + row, max_logit)
    tl.store(total_ptr + row, total)
    tl.store(mean_ptr + row, mean)
    tl.store(target_logit_ptr + row, tl.where(target >= 0, target_logit * inverse_temperature - max_logit, 0.0))


@jit
def _grad_kernel(
    logits_ptr: tl.tensor,
    target_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    grad_logp_ptr: tl.tensor,
    grad_entropy_ptr: tl.tensor,
    out_ptr: tl.tensor,
    columns: tl.tensor,
    size: tl.tensor,
    softcap: tl.tensor,
    inverse_temperature: tl.tensor,
    SOFTCAP: tl.constexpr,
    LOGP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid_B = column_B < size
    logit_B = tl.load(logits_ptr + row * columns + column_B, valid_B, other=0.0)
    softcap_grad_B = 1.0
    if SOFTCAP:
        tanh_B = _tanh(logit_B / softcap)
        softcap_grad_B = 1 - tanh_B * tanh_B
        logit_B = softcap * tanh_B
    logp_B = logit_B * inverse_temperature - tl.load(lse_ptr + row)
    p_B = tl.exp(logp_B)
    grad_B = tl.zeros((BLOCK,), tl.float32)
    if LOGP:
        grad = tl.load(grad_logp_ptr + row).to(tl.float32)
        target = tl.load(target_ptr + row)
        grad_B += grad * (tl.where(column_B == target, 1.0, 0.0) - p_B)
    if ENTROPY:
        entropy = tl.load(entropy_ptr + row)
        grad_B -= tl.load(grad_entropy_ptr + row).to(tl.float32) * p_B * (logp_B + entropy)
    grad_B = tl.where(valid_B, grad_B * softcap_grad_B * inverse_temperature, 0.0)
    tl.store(out_ptr + row * columns + column_B, grad_B, column_B < columns)
