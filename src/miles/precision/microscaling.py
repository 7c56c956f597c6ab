"""Microscaling formats: MXFP8 and MXFP4 (OCP, E8M0 scales of 32 values) and NVFP4 (E4M3 scales of 16 values).

Shapes: E stacked matrices (may be absent), N rows, K columns; G groups of a row, g values of a group.

E8M0 scales are the largest magnitude over the largest element (448 or 6), rounded up to a power of two (see
``e8m0.py``). The scale of a group of zeros is byte 0, and a group with byte 0 holds nothing but zeros.

NVFP4 as NVIDIA publishes it: a matrix has a float32 global scale, its largest magnitude over 6 * 448; the scale of a
group is its magnitude over 6 and over the global scale, in E4M3. Scales are kept in E4M3's normal range (from 2**-6)
and values are multiplied by the reciprocal, as torchao and NVIDIA's kernels do. Weights that are fused share a global
scale, as in checkpoints of ModelOpt and llm-compressor, and as SGLang and vLLM need it.

A value that is not finite is not hidden: NaN makes the scale NaN (byte 255 of E8M0), an infinity dequantizes to an
infinity or NaN.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from miles.precision.e8m0 import decode_e8m0, encode_e8m0
from miles.precision.fp8 import E4M3_MAX, divide, round_e4m3
from miles.precision.integer import pack_nibbles

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "NVFP4_GROUP",
    "decode_e2m1",
    "encode_e2m1",
    "nvfp4_global_scale",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
]

MX_GROUP = 32
NVFP4_GROUP = 16
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the sixteen codes: a sign, two bits of exponent, one of mantissa."""

# Smallest normal number of E4M3, and the smallest global scale whose reciprocal stays finite with it.
_E4M3_TINY = 2.0**-6
_GLOBAL_TINY = 2.0**-100


def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 values and the bytes of the scales, [.., K / 32]."""
    scaled, byte = _scale_mx(x, E4M3_MAX)
    return round_e4m3(scaled), byte


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed E2M1 values, [.., K / 2], and the bytes of the scales, [.., K / 32]."""
    scaled, byte = _scale_mx(x, E2M1_MAX)
    return pack_nibbles(encode_e2m1(scaled)), byte


def quantize_nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed E2M1 values, [.., K / 2], and E4M3 scales, [.., K / 16]; ``global_scale`` broadcasts to rows."""
    x_Gg = x.float().unflatten(-1, (-1, NVFP4_GROUP))
    scale_G = divide(x_Gg.abs().amax(-1), E2M1_MAX) / global_scale
    scale_G = scale_G.clamp(_E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
    reciprocal_G = (torch.ones_like(global_scale) / global_scale) / scale_G.float()
    return pack_nibbles(encode_e2m1((x_Gg * reciprocal_G.unsqueeze(-1)).flatten(-2))), scale_G


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """Return the global scale of matrices with this largest magnitude: amax / (6 * 448), 1 where there is nothing."""
    scale = divide(amax.float(), E4M3_MAX * E2M1_MAX)
    return torch.where(scale < _GLOBAL_TINY, torch.ones_like(scale), scale)


def encode_e2m1(x: Tensor) -> Tensor:
    """Return the code of the nearest E2M1 value, ties to even, saturating at 6 (there is no NaN: its code is 0)."""
    magnitude = x.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    # The middles between one value and the next: a tie goes to the value whose mantissa is 0.
    code += magnitude >= 0.75
    code += magnitude > 1.25
    code += magnitude >= 1.75
    code += magnitude > 2.5
    code += magnitude >= 3.5
    code += magnitude > 5.0
    return code + (x.signbit().to(torch.uint8) << 3)


def decode_e2m1(code: Tensor) -> Tensor:
    """Return the values of codes in float32."""
    return torch.index_select(_value_table(code.device), 0, code.flatten().int()).view(code.shape)


def _scale_mx(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """The values over their group's scale, and the bytes of the scales."""
    x_Gg = x.float().unflatten(-1, (-1, MX_GROUP))
    byte_G = encode_e8m0(divide(x_Gg.abs().amax(-1), largest))
    # Byte 0: numbers this small are divided by 1, which makes them zeros.
    scale_G = torch.where(byte_G == 0, 1.0, decode_e8m0(byte_G))
    return (x_Gg / scale_G.unsqueeze(-1)).flatten(-2), byte_G


@cache
def _value_table(device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.tensor(E2M1_VALUES, device=device)
