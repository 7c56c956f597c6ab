"""Root-mean-square normalisation: statistics and scaling in float32, rounded once to the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Scale the last dimension to unit mean square, then by a learned weight to which ``offset`` is added."""

    def __init__(
        self, size: int, eps: float, *, offset: float = 0.0, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.shape = (size,)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        if not self.offset:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.shape, self.scale(), self.eps).to(x.dtype)

    def scale(self) -> Tensor:
        """What the normalised input is multiplied by."""
        if not self.offset:
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + self.offset
