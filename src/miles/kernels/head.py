"""Hidden states to logits: the one product both planes end in, so that neither rounds what the other does not.

Shapes: R rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.arithmetic import exact
from miles.kernels.exact import head
from miles.kernels.slim import alone, wide_linear


def logits_of(hidden_RD: Tensor, head_VD: Tensor, softcap: float | None = None) -> Tensor:
    """Logits in float32 (float64 for float64 inputs), without rounding them to a low precision on the way.

    With ``softcap`` they lie between minus that and that.
    """
    if exact():
        return head.logits_of(hidden_RD, head_VD, softcap)
    if hidden_RD.dtype in (torch.float32, torch.float64):
        logits_RV = hidden_RD @ head_VD.T
    elif alone(hidden_RD, head_VD):
        logits_RV = wide_linear(hidden_RD, head_VD)
    elif hidden_RD.is_cuda:
        logits_RV = torch.mm(hidden_RD, head_VD.T, out_dtype=torch.float32)
    else:
        logits_RV = hidden_RD.float() @ head_VD.float().T
    if softcap is None:
        return logits_RV
    bounded_RV = logits_RV.div_(softcap).tanh_()
    # Backward needs what tanh gave.
    return bounded_RV * softcap if bounded_RV.requires_grad else bounded_RV.mul_(softcap)
