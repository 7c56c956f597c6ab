"""FP8 KV cache in Triton: the KV write, E4M3 encoding and decoding, power-of-two scales and their addresses.

Shapes: N rows (tokens or heads), D channels; T tokens, G key-value heads of d channels, S slots, P pages of p slots.
The reference is ``precision.kv_cache``; the bits are the same.

The cache holds E4M3 bytes (``float8_e4m3fn``) on every device. They are encoded with integer operations, and decoded
with them unless NATIVE: GPUs that convert this format (``has_native_e4m3``) do so in hardware. So A100 and MI300, whose
own FP8 format is another one (``e4m3fnuz``), use the same bytes.
"""

# pyright: reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from miles.kernels.runtime.triton_compat import (
    device_guard,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
)


@cache
def has_native_e4m3(device: torch.device) -> bool:
    """Whether Triton converts ``float8e4nv`` in hardware on this device: NVIDIA GPUs from compute capability 8.9 on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def quantize_and_write(
    codes_SGd: Tensor, scales_PGp: Tensor, slots_T: Tensor, x_TGd: Tensor, parts: tuple[int, ...]
) -> None:
    """Quantize tokens and write their E4M3 bytes and scales to their slots, unless negative, in one launch.

    ``parts`` of the channels, two with one head (MLA), have scales of their own.
    """
    tokens, heads, width = x_TGd.shape
    assert len(parts) == 1 or (len(parts) == 2 and heads == 1), "two parts of the channels need a single head"
    assert sum(parts) == width and codes_SGd.stride()[1:] == (width, 1) and scales_PGp.is_contiguous()
    x_TGd = x_TGd if x_TGd.stride()[1:] == (width, 1) else x_TGd.contiguous()
    second = parts[1] if len(parts) == 2 else 0
    if tokens:
        with device_guard(x_TGd):
            _write_kernel[(tokens,)](
                x_TGd,
                slots_T,
                codes_SGd,
                scales_PGp,
                x_TGd.stride(0),
                codes_SGd.stride(0),
                HEADS=heads,
                FIRST=parts[0],
                SECOND=second,
                PAGE=scales_PGp.shape[-1],
                BLOCK_N=triton.next_power_of_2(heads),
                BLOCK_FIRST=triton.next_power_of_2(parts[0]),
                BLOCK_SECOND=triton.next_power_of_2(max(second, 1)),
                num_warps=4,
                **pdl_options(x_TGd.device),
            )


@jit
def _write_kernel(
    x_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_stride: tl.tensor,
    code_stride: tl.tensor,
    HEADS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_FIRST: tl.constexpr,
    BLOCK_SECOND: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """All heads of one token."""
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if PDL:
        gdc_wait()
    PARTS: tl.constexpr = 2 if SECOND > 0 else 1
    x_ptr += token * x_stride
    codes_ptr += slot * code_stride
    scales_ptr += scale_offset(slot, PAGE, HEADS * PARTS)
    _write_part(x_ptr, codes_ptr, scales_ptr, slot, HEADS, FIRST + SECOND, FIRST, PAGE, BLOCK_N, BLOCK_FIRST)
    if SECOND > 0:
        at = (x_ptr + FIRST, codes_ptr + FIRST, scales_ptr + PAGE, slot)
        _write_part(*at, HEADS, FIRST + SECOND, SECOND, PAGE, BLOCK_N, BLOCK_SECOND)


@jit
def _write_part(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    slot: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    d: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """``d`` channels of every head of a token, of which a head has WIDTH."""
    head_N1, channel_1D = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_D)[None, :]
    at_ND, valid_ND = head_N1 * WIDTH + channel_1D, (head_N1 < HEADS) & (channel_1D < d)
    code_ND, scale_N1, _ = quantize_rows(tl.load(x_ptr + at_ND, valid_ND, other=0.0))
    tl.store(codes_ptr + at_ND, code_ND, valid_ND & (slot >= 0))
    tl.store(scales_ptr + head_N1 * PAGE, scale_N1, (head_N1 < HEADS) & (slot >= 0))


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
