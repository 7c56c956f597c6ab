"""Dequantization of packed weights inside Triton kernels: scales, and tiles of a weight in the model's dtype.

Shapes: N rows, K columns, C stored bytes and G groups of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton
from miles.precision.formats import WeightFormat
from miles.precision.quantized_tensor import QuantizedTensor

__all__ = ["decode_scale", "dequantize_weight", "is_weight_only", "kernel_scale", "load_weight_pairs"]


# Rows and columns that a program dequantizes.
_ROWS = 8
_COLUMNS = 1024


def is_weight_only(format: WeightFormat) -> bool:
    """Whether the weight-only kernels apply: the weight is dequantized, the input keeps its dtype."""
    return not format.quantizes_activations and format.element in ("int8", "int4", "e2m1")


def kernel_scale(weight: QuantizedTensor) -> Tensor:
    """The scales as kernels read them: E4M3 as bytes, since not every GPU converts it."""
    return weight.scale.view(torch.uint8) if weight.format.scale == "e4m3" else weight.scale


def dequantize_weight(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """``precision.quantize.dequantize`` of a weight-only format, or of a stack, in one kernel."""
    assert weight.data.is_contiguous() and weight.row_block == 1
    *_, rows, columns = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.data.device)
    count = out.numel() // columns
    width = max(16, min(_COLUMNS, 1 << (columns - 1).bit_length()))
    if count:
        with device_guard(weight.data):
            _dequantize_kernel[(triton.cdiv(columns, width), triton.cdiv(rows, _ROWS), count // rows)](
                weight.data,
                kernel_scale(weight),
                weight.zero,
                weight.global_scale,
                out,
                rows,
                columns,
                weight.scale.shape[-1],
                ELEMENT=weight.format.element,
                SCALE=weight.format.scale,
                ZERO=weight.zero is not None,
                GLOBAL=weight.global_scale is not None,
                GROUP=weight.column_block if weight.column_block < columns else 0,
                N=_ROWS,
                K=width,
                num_warps=4,
            )
    return out


@jit
def _dequantize_kernel(
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    global_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    groups: tl.tensor,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    GLOBAL: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """A tile of one matrix of the stack."""
    matrix = tl.program_id(2).to(tl.int64)
    n_N, start = tl.program_id(1) * N + tl.arange(0, N), tl.program_id(0) * K
    row_N = matrix * rows + n_N
    valid_N = n_N < rows
    factor = tl.load(global_ptr + matrix) if GLOBAL else 1.0
    dtype: tl.constexpr = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    tensors = (data_ptr, scale_ptr, zero_ptr, factor)
    value_NK = load_weight_tile(
        *tensors, row_N, valid_N, start, columns, groups, ELEMENT, SCALE, ZERO, GLOBAL, GROUP, dtype, N, K
    )
    k_K = start + tl.arange(0, K)
    tl.store(out_ptr + row_N[:, None] * columns + k_K[None, :], value_NK, valid_N[:, None] & (k_K < columns)[None, :])


@jit
def decode_scale(scale: tl.tensor, SCALE: tl.constexpr) -> tl.tensor:
    """Scales in float32; from bytes by their bits, NaN included."""
    if SCALE == "bfloat16":
        return scale.to(tl.float32)
    else:
        byte = scale.to(tl.int32)
        if SCALE == "e8m0":
            # Byte 0 is 2**-127, a subnormal number; 255 is NaN.
            bits = tl.where(byte == 0, 0x00400000, byte << 23)
            return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
        else:
            # Exponent and mantissa where float32 has them, which is the value times 2**-120; 127 is NaN.
            wide = (byte << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
            return tl.where(byte == 127, float("nan"), wide)


@jit
def load_weight_tile(
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    factor: tl.tensor,
    row_N: tl.tensor,
    valid_N: tl.tensor,
    start: tl.tensor,
    inputs: tl.tensor,
    groups: tl.tensor,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    GLOBAL: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> Any:
    """The columns from ``start`` on, [N, K], bitwise as ``precision.quantize.dequantize`` rounds them to ``DTYPE``.

    ``GROUP`` is 0 if a row has one scale. Columns past the last are finite numbers.
    """
    low_NC, high_NC = load_weight_pairs(
        data_ptr,
        scale_ptr,
        zero_ptr,
        factor,
        row_N,
        valid_N,
        start,
        inputs,
        groups,
        ELEMENT,
        SCALE,
        ZERO,
        GLOBAL,
        GROUP,
        DTYPE,
        N,
        K,
    )
    if ELEMENT == "int8":
        return low_NC
    else:
        return tl.reshape(tl.join(low_NC, high_NC), (N, K))


@jit
def load_weight_pairs(
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    factor: tl.tensor,
    row_N: tl.tensor,
    valid_N: tl.tensor,
    start: tl.tensor,
    inputs: tl.tensor,
    groups: tl.tensor,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    GLOBAL: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> Any:
    """``load_weight_tile`` as its even and its odd columns, [N, K / 2] each; INT8 as all columns, twice."""
    PER_BYTE: tl.constexpr = 1 if ELEMENT == "int8" else 2  # pyright: ignore[reportAssignmentType]
    C: tl.constexpr = K // PER_BYTE
    G: tl.constexpr = 1 if GROUP == 0 or GROUP >= K else K // GROUP  # pyright: ignore[reportAssignmentType]
    stored = inputs // PER_BYTE
    at_C = start // PER_BYTE + tl.arange(0, C)
    valid_NC = valid_N[:, None] & (at_C < stored)[None, :]
    data_NC = tl.load(data_ptr + row_N[:, None] * stored + at_C[None, :], valid_NC, other=0).to(tl.int32)
    group_G = tl.arange(0, G)
    if GROUP > 0:
        group_G += start // GROUP
    at_NG = row_N[:, None] * groups + group_G[None, :]
    valid_NG = valid_N[:, None] & (group_G < groups)[None, :]
    scale_NC = _expand(decode_scale(tl.load(scale_ptr + at_NG, valid_NG, other=0), SCALE), N, G, C)
    if ELEMENT == "int8":
        value_NC = (data_NC.to(tl.float32) * scale_NC).to(DTYPE)
        return value_NC, value_NC
    else:
        low_NC, high_NC = _decode_pairs(data_NC, ELEMENT)
        if ZERO:
            zero_NG = tl.load(zero_ptr + at_NG, valid_NG, other=0).to(tl.float32)
            zero_NC = _expand(zero_NG, N, G, C)
            low_NC, high_NC = low_NC - zero_NC, high_NC - zero_NC
        elif ELEMENT == "int4":
            low_NC, high_NC = low_NC - 8.0, high_NC - 8.0
        low_NC, high_NC = low_NC * scale_NC, high_NC * scale_NC
        if GLOBAL:
            low_NC, high_NC = low_NC * factor, high_NC * factor
        return low_NC.to(DTYPE), high_NC.to(DTYPE)


@jit
def _decode_pairs(data_NC: tl.tensor, ELEMENT: tl.constexpr) -> Any:
    """The elements of the even and of the odd columns in float32."""
    if ELEMENT == "int4":
        low_NC = ((data_NC & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        high_NC = ((data_NC >> 4) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        return low_NC, high_NC
    else:
        # Exponent and mantissa where float32 has them: the value times 2**-126.
        factor = 85070591730234615865843651857942052864.0  # 2**126
        low_NC = (((data_NC << 28) >> 6) & -0x7E400000).to(tl.float32, bitcast=True) * factor
        high_NC = (((data_NC << 24) >> 6) & -0x7E400000).to(tl.float32, bitcast=True) * factor
        return low_NC, high_NC


@jit
def _expand(scale_NG: tl.tensor, N: tl.constexpr, G: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """One scale for each stored byte."""
    if G == 1:
        return tl.broadcast_to(scale_NG, (N, C))
    else:
        return tl.reshape(tl.broadcast_to(scale_NG[:, :, None], (N, G, C // G)), (N, C))
