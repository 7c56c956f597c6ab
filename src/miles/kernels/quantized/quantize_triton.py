"""Quantization in Triton: weights to FP8 blocks or channels, and rows to MXFP8.

Shapes: E stacked matrices (may be absent), N rows, K columns; T rows of an activation; B = 128 or 32 values of a block.

Results are bitwise those of ``precision.quantize``: divisions are rounded correctly, powers of two come from the bits
of a float, and NaN makes the scale of its block NaN. FP8 activations are quantized in ``activation_quant``.
"""

from __future__ import annotations

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
from miles.precision.formats import FORMATS, WeightFormat
from miles.precision.quantize import row_block
from miles.precision.quantized_tensor import QuantizedTensor

__all__ = ["quantize_rows_mxfp8", "quantize_weight", "supports_quantize_weight"]

_BLOCK = 128
# The most columns of a row that one program has in its registers, and rows of MXFP8 of a program.
_MAX_COLUMNS = 16384
_MX_COLUMNS = 1024


def supports_quantize_weight(weight: Tensor, format: WeightFormat, segments: tuple[int, ...] | None = None) -> bool:
    """Whether the kernels write this format: blocks of 128 x 128 that end with their segment, or channels."""
    if format.element != "e4m3" or format.scale != "float32":
        return False
    if format.rows == 1:
        return weight.shape[-1] <= _MAX_COLUMNS
    return format.rows == format.columns == _BLOCK == row_block(format, weight.shape[-2], segments)


def quantize_weight(weight: Tensor, format: WeightFormat) -> QuantizedTensor:
    """Quantize a weight [N, K] or a stack."""
    assert supports_quantize_weight(weight, format)
    weight = weight.contiguous()
    *stack, rows, columns = weight.shape
    count = stack[0] if stack else 1
    data = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty((*stack, *format.scale_shape(rows, columns)), dtype=torch.float32, device=weight.device)
    with device_guard(weight):
        if format.rows == 1:
            _quantize_rows_kernel[(count * rows,)](
                weight, data, scale, columns, K=triton.next_power_of_2(columns), num_warps=8
            )
        else:
            _quantize_blocks_kernel[(triton.cdiv(columns, _BLOCK), triton.cdiv(rows, _BLOCK), count)](
                weight, data, scale, rows, columns, POWER_OF_TWO=format.power_of_two, B=_BLOCK, num_warps=16
            )
    return QuantizedTensor(format, data, scale, _BLOCK if format.rows != 1 else 1)


def quantize_rows_mxfp8(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the E4M3 values of rows and the bytes of their scales, [T, K / 32]."""
    x_TK = x_TK.contiguous()
    (rows, columns), group = x_TK.shape, FORMATS["mxfp8"].columns
    assert group is not None and columns % group == 0
    data_TK = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x_TK.device)
    scale_TG = torch.empty(rows, columns // group, dtype=torch.uint8, device=x_TK.device)
    width = min(_MX_COLUMNS, 1 << (columns - 1).bit_length())
    if rows:
        with device_guard(x_TK):
            _quantize_mxfp8_kernel[(rows, triton.cdiv(columns, width))](
                x_TK, data_TK, scale_TG, columns, K=width, B=group, num_warps=4, **pdl_options(x_TK.device)
            )
    return data_TK, scale_TG


@jit
def _quantize_blocks_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    POWER_OF_TWO: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """One block of B x B values."""
    column, row = tl.program_id(0), tl.program_id(1)
    matrix = tl.program_id(2).to(tl.int64)
    n_N, k_K = row * B + tl.arange(0, B), column * B + tl.arange(0, B)
    valid_NK = (n_N < rows)[:, None] & (k_K < columns)[None, :]
    first = matrix * rows * columns
    at_NK = first + n_N.to(tl.int64)[:, None] * columns + k_K[None, :]
    x_NK = tl.load(x_ptr + at_NK, valid_NK, other=0.0).to(tl.float32)
    scale = _scale_of(_largest(_largest(tl.abs(x_NK), 1), 0), POWER_OF_TWO)
    data_NK = _round_e4m3(tl.div_rn(x_NK, tl.broadcast_to(scale, (B, B))))
    tl.store(out_ptr + at_NK, data_NK, valid_NK)
    blocks_n, blocks_k = tl.cdiv(rows, B), tl.cdiv(columns, B)
    tl.store(scale_ptr + (matrix * blocks_n + row) * blocks_k + column, scale)


@jit
def _quantize_rows_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, scale_ptr: tl.tensor, columns: tl.tensor, K: tl.constexpr
) -> None:
    """One row with one scale."""
    row = tl.program_id(0).to(tl.int64)
    k_K = tl.arange(0, K)
    x_K = tl.load(x_ptr + row * columns + k_K, k_K < columns, other=0.0).to(tl.float32)
    scale = _scale_of(_largest(tl.abs(x_K), 0), False)
    data_K = _round_e4m3(tl.div_rn(x_K, tl.broadcast_to(scale, (K,))))
    tl.store(out_ptr + row * columns + k_K, data_K, k_K < columns)
    tl.store(scale_ptr + row, scale)


@jit
def _quantize_mxfp8_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    columns: tl.tensor,
    K: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A part of a row in groups of B."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * K
    g_G = tl.arange(0, K // B)
    k_GB = start + g_G[:, None] * B + tl.arange(0, B)[None, :]
    x_GB = tl.load(x_ptr + row * columns + k_GB, k_GB < columns, other=0.0).to(tl.float32)
    largest_G = _largest(tl.abs(x_GB), 1)
    byte_G = _encode_e8m0(tl.div_rn(largest_G, tl.full((K // B,), 448.0, tl.float32)))
    # Byte 0: numbers this small are divided by 1, which makes them zeros.
    bits_G = tl.where(byte_G == 0, 0x3F800000, tl.where(byte_G == 255, 0x7FC00000, byte_G << 23))
    scale_GB = tl.broadcast_to(bits_G.to(tl.float32, bitcast=True)[:, None], (K // B, B))
    tl.store(out_ptr + row * columns + k_GB, _round_e4m3(tl.div_rn(x_GB, scale_GB)), k_GB < columns)
    group_G = start // B + g_G
    tl.store(scale_ptr + row * (columns // B) + group_G, byte_G.to(tl.uint8), group_G < columns // B)


@jit
def _scale_of(largest: tl.tensor, POWER_OF_TWO: tl.constexpr) -> Any:
    """The scale of a block with this largest magnitude; 1 for zeros."""
    scale = tl.div_rn(largest, 448.0)
    rounded = scale
    if POWER_OF_TWO:
        byte = tl.maximum(_encode_e8m0(scale), 1)
        rounded = tl.where(byte == 255, 0x7FC00000, byte << 23).to(tl.float32, bitcast=True)
    return tl.where(scale == 0.0, 1.0, rounded)


@jit
def _encode_e8m0(scale: tl.tensor) -> Any:
    """The byte of the next power of two, as ``precision.e8m0.encode_e8m0``, in int32."""
    bits = scale.to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.where(bits <= 0x400000, 0, (bits + 0x7FFFFF) >> 23), 254)
    return tl.where(scale != scale, 255, exponent)


@jit
def _round_e4m3(x: tl.tensor) -> Any:
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@jit
def _largest(x: tl.tensor, axis: tl.constexpr) -> Any:
    """The maximum, NaN if there is one."""
    return tl.reduce(x, axis, _maximum)


@jit
def _maximum(a: tl.tensor, b: tl.tensor) -> Any:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
