"""Triton functions of the FP8 KV cache: E4M3 encoding and decoding, power-of-two scales and their addresses.

Shapes: N rows (tokens or heads), D channels. The reference is ``precision.kv_cache``; the bits are the same.

The cache holds E4M3 bytes (``float8_e4m3fn``) on every device. They are encoded with integer operations, and decoded
with them unless NATIVE: GPUs that convert this format (``has_native_e4m3``) do so in hardware. So A100 and MI300, whose
own FP8 format is another one (``e4m3fnuz``), use the same bytes.
"""

# pyright: reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from miles.kernels.runtime.triton_compat import jit, tl


@cache
def has_native_e4m3(device: torch.device) -> bool:
    """Whether Triton converts ``float8e4nv`` in hardware on this device: NVIDIA GPUs from compute capability 8.9 on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@jit
def quantize_rows(x_ND: tl.tensor) -> Any:
    """E4M3 bytes of rows, their scales [N, 1], and the rows as dequantized, in float32."""
    wide_ND = x_ND.to(tl.float32)
    bits_N1 = tl.max(tl.abs(wide_ND), 1, keep_dims=True).to(tl.int32, bitcast=True)
    # 448 is 1.75 * 2**8: a larger mantissa than 1.75 needs the next scale. The smallest is 2**-64.
    biased_N1 = tl.maximum(((bits_N1 + 0x1FFFFF) >> 23) - 8, 63)
    scale_N1 = (biased_N1 << 23).to(tl.float32, bitcast=True)
    inverse_N1 = ((254 - biased_N1) << 23).to(tl.float32, bitcast=True)
    code_ND = encode_e4m3(wide_ND * inverse_N1)
    return code_ND, scale_N1, decode_e4m3(code_ND, tl.float32, False) * scale_N1


@jit
def encode_e4m3(x_ND: tl.tensor) -> Any:
    """Bytes of float32 numbers of magnitude at most 448, rounded to nearest, ties to even; anything else is NaN."""
    magnitude_ND = tl.abs(x_ND)
    bits_ND = magnitude_ND.to(tl.int32, bitcast=True)
    normal_ND = ((bits_ND + 0x7FFFF + ((bits_ND >> 20) & 1)) >> 20) - (120 << 3)
    # Numbers below 2**-6 are multiples of 2**-9, which is the spacing of float32 numbers from 2**14 on.
    subnormal_ND = (magnitude_ND + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code_ND = tl.where(magnitude_ND < 0.015625, subnormal_ND, normal_ND)
    code_ND = tl.where(magnitude_ND <= 448.0, code_ND, 0x7F)
    return (code_ND | ((x_ND.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@jit
def decode_e4m3(code_ND: tl.tensor, DTYPE: tl.constexpr, NATIVE: tl.constexpr) -> Any:
    """Numbers of E4M3 bytes, without their scale; exact in every DTYPE of 16 or more bits."""
    if NATIVE:
        return code_ND.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    if DTYPE == tl.float16:  # noqa: SIM300  (constexpr)
        # The exponent is 8 too small after the shift; the product restores subnormal numbers too.
        short_ND = code_ND.to(tl.int16)
        bits_ND = ((short_ND & 0x80) << 8) | ((short_ND & 0x7F) << 7)
        x_ND = bits_ND.to(tl.float16, bitcast=True) * tl.full([], 256.0, tl.float16)
        return tl.where((short_ND & 0x7F) == 0x7F, float("nan"), x_ND)
    wide_ND = code_ND.to(tl.int32)
    # The exponent is 120 too small after the shift; the product restores subnormal numbers too.
    bits_ND = ((wide_ND & 0x80) << 24) | ((wide_ND & 0x7F) << 20)
    x_ND = bits_ND.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((wide_ND & 0x7F) == 0x7F, float("nan"), x_ND).to(DTYPE)


@jit
def dequantize_rows(code_ND: tl.tensor, scale_N: tl.tensor, DTYPE: tl.constexpr, NATIVE: tl.constexpr) -> Any:
    """Rows of E4M3 bytes times their scales, rounded once: exact unless DTYPE is float16."""
    if DTYPE == tl.float16:  # noqa: SIM300  (too narrow for some scales)
        rows_ND = (decode_e4m3(code_ND, tl.float32, NATIVE) * scale_N[:, None]).to(DTYPE)
    else:
        rows_ND = decode_e4m3(code_ND, DTYPE, NATIVE) * scale_N.to(DTYPE)[:, None]
    return rows_ND


@jit
def scale_offset(slot_N: tl.tensor, page_size: tl.constexpr, HEADS: tl.constexpr) -> Any:
    """Where the first head's scales of these slots are: scales are [pages, HEADS, page_size]."""
    slot_N = slot_N.to(tl.int64)
    return slot_N // page_size * (page_size * HEADS) + slot_N % page_size
