"""Root-mean-square normalisation: statistics and scaling in float32, rounded once to the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miles.kernels.norm import add_rms_norm, rms_norm


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
        return rms_norm(x, self.weight, self.eps, offset=self.offset)

    def after(self, x: Tensor, late: Tensor | None) -> tuple[Tensor, Tensor]:
        """``x`` with ``late`` added to it, and the norm of that."""
        if late is None:
            return x, self(x)
        return add_rms_norm(x, late, self.weight, self.eps, offset=self.offset)

    def scale(self) -> Tensor:
        """What the normalised input is multiplied by."""
        if not self.offset:
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + self.offset
