"""LM head logits: the one matmul engine and trainer end in, so that neither rounds what the other does not.

Shapes: R rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.batch_invariant import logprob
from miles.kernels.fused.gemv import can_use_gemv, gemv_fp32
from miles.kernels.numerics import Numerics


def compute_logits(hidden_RD: Tensor, head_VD: Tensor, softcap: float | None = None, *, numerics: Numerics) -> Tensor:
    """Logits in float32 (float64 for float64 inputs), without rounding to a lower precision on the way.

    With ``softcap`` they are bounded by it.
    """
    if numerics.batch_invariant:
        return logprob.compute_logits(hidden_RD, head_VD, softcap)
    if hidden_RD.dtype in (torch.float32, torch.float64):
        logits_RV = hidden_RD @ head_VD.T
    elif can_use_gemv(hidden_RD, head_VD):
        logits_RV = gemv_fp32(hidden_RD, head_VD)
    elif hidden_RD.is_cuda:
        logits_RV = torch.mm(hidden_RD, head_VD.T, out_dtype=torch.float32)
    else:
        logits_RV = hidden_RD.float() @ head_VD.float().T
    if softcap is None:
        return logits_RV
    tanh_RV = logits_RV.div_(softcap).tanh_()
    # Backward needs the output of tanh.
    return tanh_RV * softcap if tanh_RV.requires_grad else tanh_RV.mul_(softcap)
