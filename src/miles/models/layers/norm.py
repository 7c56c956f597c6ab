"""RMSNorm and LayerNorm: statistics and scaling in float32, rounded once to the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels.batch_invariant import rms_norm as invariant_norm
from miles.kernels.fused.layer_norm import add_layer_norm
from miles.kernels.fused.rms_norm import add_rms_norm, rms_norm
from miles.kernels.numerics import Numerics
from miles.kernels.quantized.activation_quant import has_fp8, rms_norm_fp8
from miles.kernels.runtime.triton_compat import use_triton_inference
from miles.precision.formats import WeightFormat
from miles.precision.quantized_tensor import QuantizedActivation


class RMSNorm(nn.Module):
    """Scale the last dimension to unit mean square, then by a learned weight plus ``offset``.

    With ``quantize_to`` an engine's kernel also quantizes the result for the layer that reads it; ``keep_wide``: some
    other layer reads it unquantized.
    """

    quantize_to: WeightFormat | None = None
    keep_wide: bool = False

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

    def add_norm_quantized(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | QuantizedActivation]:
        """``add_norm``, with the result quantized where ``quantize_to`` says so and a fused kernel does it."""
        is_fused = not self.numerics.batch_invariant and use_triton_inference(x) and has_fp8(x.device)
        if self.quantize_to is None or not is_fused:
            return self.add_norm(x, residual)
        total, quantized, wide = rms_norm_fp8(
            x, residual, self.weight, self.eps, self.quantize_to, offset=self.offset, keep=self.keep_wide
        )
        return total, quantized._replace(wide=wide)

    def scale(self) -> Tensor:
        """Return the factor of the normalized input."""
        if not self.offset:
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + self.offset


def unit_rms_norm(x: Tensor, eps: float, numerics: Numerics) -> Tensor:
    """Scale the last dimension to unit mean square, without a weight."""
    if numerics.batch_invariant:
        return invariant_norm.rms_norm(x, None, eps)
    return F.rms_norm(x, x.shape[-1:], None, eps)


class LayerNorm(nn.Module):
    """Scale the last dimension to zero mean and unit variance, then by a learned weight, plus a learned bias.

    Every row is computed by itself in the same order, so that these are the batch-invariant numerics too.
    """

    def __init__(
        self, size: int, eps: float, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.shape = (size,)
        self.eps = eps
        self.numerics = numerics

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``x + residual`` and its norm, in one fused kernel."""
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, numerics=self.numerics)
