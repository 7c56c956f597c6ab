"""What log-probs and entropies need of a chunk of logits, in one pass; and the gradient of the logits, in another.

Shapes: C tokens, V rows of the vocabulary that are here.

Logits come as the product gives them, in float32. Bounding them, dividing them by the temperature and leaving out
padding happens on the way, so nothing of their size is written but the gradient, and that in the head's own precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from miles.kernels.device_code import jit, on, tl, triton

_BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What becomes of a logit: bounded by ``softcap``, divided by ``temperature``; rows from ``size`` on are none."""

    temperature: float
    softcap: float | None
    size: int


class Sums(NamedTuple):
    """Of each token, counted from its largest logit: the sum of e^logit, that of logit e^logit, the target's logit."""

    most_C: Tensor
    total_C: Tensor
    mean_C: Tensor
    chosen_C: Tensor


def sums_of(logits_CV: Tensor, target_C: Tensor, scale: Scale) -> Sums:
    """Targets are rows that are here; a negative one is elsewhere, and its logit 0."""
    found = Sums(*(torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device) for _ in range(4)))
    assert logits_CV.dtype == torch.float32 and logits_CV.is_contiguous()
    if len(logits_CV):
        with on(logits_CV):
            _sum_rows[(len(logits_CV),)](
                *(logits_CV, target_C, *found),
                *(logits_CV.shape[1], scale.size, scale.softcap or 1.0, 1 / scale.temperature),
                BOUND=scale.softcap is not None,
                BLOCK=min(_BLOCK, triton.next_power_of_2(logits_CV.shape[1])),
                num_warps=8,
            )
    return found


def slopes_of(
    logits_CV: Tensor,
    target_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    scale: Scale,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient by the logits as the product gave them, given those of log-probs and entropies."""
    out_CV = torch.empty(logits_CV.shape, dtype=dtype, device=logits_CV.device)
    columns = logits_CV.shape[1]
    block = min(_BLOCK, 1 << (columns - 1).bit_length())
    if len(logits_CV):
        with on(logits_CV):
            _slope_rows[(len(logits_CV), triton.cdiv(columns, block))](
                *(logits_CV, target_C, lse_C, entropy_C, grad_logp_C, grad_entropy_C, out_CV),
                *(columns, scale.size, scale.softcap or 1.0, 1 / scale.temperature),
                BOUND=scale.softcap is not None,
                LOGP=grad_logp_C is not None,
                ENTROPY=grad_entropy_C is not None,
                BLOCK=block,
                num_warps=8,
            )
    return out_CV


@jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """From the exponential alone, which every vendor has."""
    return 2 * tl.sigmoid(2 * x) - 1


@jit
def _sum_rows(
    logits_ptr: tl.tensor,
    target_ptr: tl.tensor,
    most_ptr: tl.tensor,
    total_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    columns: tl.tensor,
    size: tl.tensor,
    softcap: tl.tensor,
    sharpness: tl.tensor,
    BOUND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each lane keeps the largest of what it has seen and its sums relative to that; they are joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * columns
    most_B = tl.full((BLOCK,), -1e30, tl.float32)
    total_B, mean_B = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column_B = start + tl.arange(0, BLOCK)
        logit_B = tl.load(logits_ptr + column_B, column_B < size, other=-1e30)
        if BOUND:
            logit_B = tl.where(column_B < size, softcap * _tanh(logit_B / softcap), -1e30)
        logit_B = logit_B * sharpness
        higher_B = tl.maximum(most_B, logit_B)
        fade_B = tl.exp(most_B - higher_B)
        weight_B = tl.where(column_B < size, tl.exp(logit_B - higher_B), 0.0)
        mean_B = fade_B * (mean_B + total_B * (most_B - higher_B)) + weight_B * (logit_B - higher_B)
        total_B = fade_B * total_B + weight_B
        most_B = higher_B
    most = tl.max(most_B, 0)
    shift_B = most_B - most
    fade_B = tl.exp(shift_B)
    total = tl.sum(fade_B * total_B, 0)
    mean = tl.sum(fade_B * (mean_B + total_B * tl.maximum(shift_B, -1e4)), 0)
    target = tl.load(target_ptr + row)
    chosen = tl.load(logits_ptr + target, target >= 0, other=0.0)
    if BOUND:
        chosen = softcap * _tanh(chosen / softcap)
    tl.store(most_ptr + row, most)
    tl.store(total_ptr + row, total)
    tl.store(mean_ptr + row, mean)
    tl.store(chosen_ptr + row, tl.where(target >= 0, chosen * sharpness - most, 0.0))


@jit
def _slope_rows(
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
    sharpness: tl.tensor,
    BOUND: tl.constexpr,
    LOGP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here_B = column_B < size
    logit_B = tl.load(logits_ptr + row * columns + column_B, here_B, other=0.0)
    bend_B = 1.0
    if BOUND:
        bound_B = _tanh(logit_B / softcap)
        bend_B = 1 - bound_B * bound_B
        logit_B = softcap * bound_B
    logp_B = logit_B * sharpness - tl.load(lse_ptr + row)
    p_B = tl.exp(logp_B)
    slope_B = tl.zeros((BLOCK,), tl.float32)
    if LOGP:
        grad = tl.load(grad_logp_ptr + row).to(tl.float32)
        target = tl.load(target_ptr + row)
        slope_B += grad * (tl.where(column_B == target, 1.0, 0.0) - p_B)
    if ENTROPY:
        entropy = tl.load(entropy_ptr + row)
        slope_B -= tl.load(grad_entropy_ptr + row).to(tl.float32) * p_B * (logp_B + entropy)
    slope_B = tl.where(here_B, slope_B * bend_B * sharpness, 0.0)
    tl.store(out_ptr + row * columns + column_B, slope_B, column_B < columns)
