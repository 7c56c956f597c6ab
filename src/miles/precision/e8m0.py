"""E8M0: scales that are a power of two, one byte with a bias of 127, where 255 is NaN (OCP microscaling)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decode_e8m0", "encode_e8m0"]


def encode_e8m0(scale: Tensor) -> Tensor:
    """Round positive float32 numbers up to a power of two and return its byte; 0 for zero, 254 for infinity.

    Rounding up is what cuBLAS, TransformerEngine, DeepGEMM and the Triton kernels of gpt-oss do (RCEIL): the largest
    value of a block never saturates. The OCP specification rounds down, compressed-tensors' MXFP4 to the nearest. The
    exponent is taken from the bits, so that it is exact on every device.
    """
    bits = scale.contiguous().view(torch.int32)
    # Half of the smallest normal number is 2**-127, byte 0; a number between the two takes byte 1.
    exponent = torch.where(bits <= 1 << 22, 0, (bits + 0x7FFFFF) >> 23).clamp(max=254)
    return torch.where(scale.isnan(), 255, exponent).to(torch.uint8)


def decode_e8m0(byte: Tensor) -> Tensor:
    """Return the power of two of each byte in float32."""
    return byte.view(torch.float8_e8m0fnu).float()
