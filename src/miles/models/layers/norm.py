"""RMSNorm: statistics and scaling in float32, rounded once to the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miles.kernels.fused.rms_norm import add_rms_norm, rms_norm
from miles.kernels.numerics import Numerics


class RMSNorm(nn.Module):
    """Scale the last dimension to unit mean square, then by a learned weight plus ``offset``."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        offset: float = 0.0,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.shape = (size,)
        self.eps = eps
        self.offset = offset
        self.numerics = numerics

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset, numerics=self.numerics)

    def add_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``x + residual`` and its norm, in one fused kernel."""
        if residual is None:
            return x, self(x)
        return add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset, numerics=self.numerics)

    def scale(self) -> Tensor:
        """Return the factor of the normalized input."""
        if not self.offset:
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + self.offset
