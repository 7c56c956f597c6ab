"""FP8 KV cache in torch: quantization of keys and values, the reference that kernels and trainer are held to.

Shapes: T tokens, G key-value heads, d channels of a head; the functions take vectors of any leading shape.

The vector of a token and head is stored as E4M3 values with one float32 scale: its largest magnitude over 448, rounded
up to a power of two. E4M3 rounds relative to each value, so that costs little (3 % more rounding error on normal
vectors); and because of it a dequantized value is exact in bfloat16 and float32, scaling commutes with every later
rounding, and rounding twice is rounding once. So a trainer that attends to ``round_kv`` of its keys and values computes
what an engine computes from its cache, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["dequantize_kv", "quantize_kv", "round_kv"]

# 448, the largest E4M3 value, is 1.75 * 2**8: a larger mantissa than 1.75 (bits 0x600000) needs the next scale.
_MAX_EXPONENT, _CARRY = 8, 0x7FFFFF - 0x600000
# Biased exponent of the smallest scale, 2**-64: products of scaled numbers stay within the normal numbers.
_MIN_BIASED = 127 - 64


def quantize_kv(x_TGd: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each vector by itself: E4M3 values [T, G, d], and their scales [T, G] in float32.

    >>> data, scale = quantize_kv(torch.tensor([[0.5, -7.0, 0.01]]))
    >>> scale.item() == 2.0**-6, (data.float() * scale.unsqueeze(-1)).tolist()
    (True, [[0.5, -7.0, 0.009765625]])
    """
    wide_TGd = x_TGd.float()
    bits_TG = wide_TGd.abs().amax(-1).view(torch.int32)
    biased_TG = (((bits_TG + _CARRY) >> 23) - _MAX_EXPONENT).clamp_min(_MIN_BIASED)
    scale_TG, inverse_TG = (biased_TG << 23).view(torch.float32), ((254 - biased_TG) << 23).view(torch.float32)
    return (wide_TGd * inverse_TG.unsqueeze(-1)).to(torch.float8_e4m3fn), scale_TG


def dequantize_kv(data_TGd: Tensor, scale_TG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the vectors in ``dtype``: exact in bfloat16, float32 and wider."""
    return (data_TGd.float() * scale_TG.unsqueeze(-1)).to(dtype)


class _RoundKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TGd: Tensor) -> Tensor:
        return dequantize_kv(*quantize_kv(x_TGd), x_TGd.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TGd: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_TGd


def round_kv(x_TGd: Tensor) -> Tensor:
    """Round to what an FP8 KV cache returns; the gradient passes unchanged (straight-through estimator)."""
    return _RoundKV.apply(x_TGd)  # pyright: ignore[reportReturnType]
