"""Hidden states to logits: the one product both planes end in, so that neither rounds what the other does not.

Shapes: R rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def logits_of(hidden_RD: Tensor, head_VD: Tensor) -> Tensor:
    """Logits in float32 (float64 for float64 inputs), without rounding them to a low precision on the way."""
    if hidden_RD.dtype in (torch.float32, torch.float64):
        return hidden_RD @ head_VD.T
    if hidden_RD.is_cuda:
        return torch.mm(hidden_RD, head_VD.T, out_dtype=torch.float32)
    return hidden_RD.float() @ head_VD.float().T
