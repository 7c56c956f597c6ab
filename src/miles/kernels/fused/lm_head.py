"""LM head logits: the one matmul engine and trainer end in, so that neither rounds what the other does not.

A LoRA adapter of the head is added to the logits before the softcap:

    logits += round(round(h A^T) * scale) B^T        in float32, without rounding the last product

Shapes: R rows, D hidden, V vocabulary, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.kernels.batch_invariant import logprob
from miles.kernels.fused.gemv import can_use_gemv, gemv_fp32, linear
from miles.kernels.numerics import Numerics

LogitAdapter = Callable[[Tensor, Tensor], Tensor]
"""Adds adapters to logits [R, V], which it may change, from hidden states [R, D]; without gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLora:
    """The LoRA factors of the head in the dtype of hidden states; further rows of a padded head have no adapter."""

    a_rD: Tensor
    b_Vr: Tensor
    scale: float
    numerics: Numerics

    def __call__(self, logits_RV: Tensor, hidden_RD: Tensor) -> Tensor:
        low_Rr = linear(hidden_RD, self.a_rD, numerics=self.numerics) * self.scale
        delta_RV = compute_logits(low_Rr, self.b_Vr[: logits_RV.shape[1]], numerics=self.numerics)
        logits_RV[:, : delta_RV.shape[1]].add_(delta_RV)
        return logits_RV


def compute_logits(
    hidden_RD: Tensor,
    head_VD: Tensor,
    softcap: float | None = None,
    *,
    numerics: Numerics,
    adapter: LogitAdapter | None = None,
) -> Tensor:
    """Logits in float32 (float64 for float64 inputs), without rounding to a lower precision on the way.

    The products of ``adapter`` are added to them; with ``softcap`` they are bounded by it then.
    """
    if numerics.batch_invariant:
        if adapter is None:
            return logprob.compute_logits(hidden_RD, head_VD, softcap)
        logits_RV = adapter(logprob.compute_logits(hidden_RD, head_VD), hidden_RD)
        return logits_RV if softcap is None else logprob.apply_softcap(logits_RV, softcap)
    if hidden_RD.dtype in (torch.float32, torch.float64):
        logits_RV = hidden_RD @ head_VD.T
    elif can_use_gemv(hidden_RD, head_VD):
        logits_RV = gemv_fp32(hidden_RD, head_VD)
    elif hidden_RD.is_cuda:
        logits_RV = torch.mm(hidden_RD, head_VD.T, out_dtype=torch.float32)
    else:
        logits_RV = hidden_RD.float() @ head_VD.float().T
    if adapter is not None:
        logits_RV = adapter(logits_RV, hidden_RD)
    if softcap is None:
        return logits_RV
    tanh_RV = logits_RV.div_(softcap).tanh_()
    # Backward needs the output of tanh.
    return tanh_RV * softcap if tanh_RV.requires_grad else tanh_RV.mul_(softcap)
