"""FP8 quantization by tiles of 128 x 128 in Triton: weights, and operands of backward GEMMs, which are transposed.

Shapes: R rows and C columns of a matrix, r and c its blocks of 128; T tokens, K features, N out.

Bits are those of ``precision.quantize``: the same scale and the same division, correctly rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.quantized.activation_quant import quantize_rows_fp8
from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton, use_triton
from miles.precision.formats import WeightFormat
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor

__all__ = ["quantize_transposed_fp8", "quantize_weight_fp8", "transpose_fp8"]

TILE = 128
_MAX_ROW = 16384


def quantize_weight_fp8(weight: Tensor, format: WeightFormat, segments: tuple[int, ...]) -> QuantizedTensor | None:
    """``precision.quantize.quantize`` of a weight [N, K] or a stack of them; None where these kernels do not apply."""
    if not use_triton(weight) or not weight.is_contiguous() or format.power_of_two or format.element != "e4m3":
        return None
    *stack, rows, columns = weight.shape
    matrix = weight.view(-1, columns)
    if format.rows == format.columns == TILE:
        if columns % TILE or any(length % TILE for length in segments):
            return None
        data = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
        scale = torch.empty(len(matrix) // TILE, columns // TILE, dtype=torch.float32, device=weight.device)
        _launch(matrix, None, data, scale, by_tile=True, transposed=False)
        return QuantizedTensor(format, data.view(weight.shape), scale.view(*stack, rows // TILE, -1), TILE)
    if format.rows == 1 and format.columns is None and columns <= _MAX_ROW:
        by_row = quantize_rows_fp8(matrix, format)
        return QuantizedTensor(format, by_row.data.view(weight.shape), by_row.scale.reshape(*stack, rows, 1), 1)
    return None


def transpose_fp8(weight: QuantizedTensor) -> QuantizedTensor:
    """The transposed weight [K, N] of square blocks: the same values and scales."""
    data = weight.data.view(torch.uint8).t().contiguous().view(weight.data.dtype)
    return QuantizedTensor(weight.format, data, weight.scale.t().contiguous(), weight.row_block)


def quantize_transposed_fp8(x: Tensor | QuantizedActivation) -> QuantizedActivation:
    """The transposed rows [K, T] in groups of 128 tokens, with a scale each; T is padded with zeros to such a group."""
    source = (x.data if isinstance(x, QuantizedActivation) else x).contiguous()
    (tokens, features), dtype = source.shape, x.dtype
    padded = -(-tokens // TILE) * TILE
    data = torch.empty(features, padded, dtype=torch.float8_e4m3fn, device=source.device)
    scale = torch.empty(padded // TILE, features, dtype=torch.float32, device=source.device)
    _launch(source, x if isinstance(x, QuantizedActivation) else None, data, scale, by_tile=False, transposed=True)
    return QuantizedActivation(data, scale.t(), TILE, dtype)


def _launch(
    source: Tensor, scaled: QuantizedActivation | None, data: Tensor, scale: Tensor, *, by_tile: bool, transposed: bool
) -> None:
    rows, columns = source.shape
    strides = (0, 0) if scaled is None else scaled.scale.stride()
    with device_guard(source):
        _quantize_tile_kernel[(triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))](
            source,
            source if scaled is None else scaled.scale,
            data,
            scale,
            rows,
            columns,
            data.stride(0),
            scale.stride(0),
            *strides,
            SCALE_COLUMNS=0 if scaled is None else scaled.columns,
            BY_TILE=by_tile,
            TRANSPOSED=transposed,
            TILE=TILE,
            num_warps=8,
        )


@jit(do_not_specialize=["rows"])
def _quantize_tile_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    out_stride: tl.tensor,
    scale_stride: tl.tensor,
    x_scale_stride_r: tl.tensor,
    x_scale_stride_g: tl.tensor,
    SCALE_COLUMNS: tl.constexpr,
    BY_TILE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Quantize a tile, with one scale for all of it or one for each column."""
    row_block, column_block = tl.program_id(0), tl.program_id(1)
    r_R = row_block * TILE + tl.arange(0, TILE)
    c_C = column_block * TILE + tl.arange(0, TILE)
    valid_RC = (r_R < rows)[:, None] & (c_C < columns)[None, :]
    x_RC = tl.load(x_ptr + r_R.to(tl.int64)[:, None] * columns + c_C[None, :], valid_RC, other=0.0).to(tl.float32)
    if SCALE_COLUMNS > 0:
        scale_RC = x_scale_ptr + r_R[:, None] * x_scale_stride_r + (c_C // SCALE_COLUMNS)[None, :] * x_scale_stride_g
        x_RC *= tl.load(scale_RC, valid_RC, other=0.0)
    largest_C = tl.max(tl.abs(x_RC), 0)
    if BY_TILE:
        largest_C = tl.zeros((TILE,), tl.float32) + tl.max(largest_C, 0)
    scale_C = tl.div_rn(largest_C, tl.full((TILE,), 448.0, tl.float32))
    scale_C = tl.where(scale_C == 0.0, 1.0, scale_C)
    quotient_RC = tl.div_rn(x_RC, tl.broadcast_to(scale_C[None, :], (TILE, TILE))).to(tl.float8e4nv)
    if TRANSPOSED:
        # Rows beyond the last are zeros, which pad the transposed matrix to whole groups.
        at_CR = out_ptr + c_C.to(tl.int64)[:, None] * out_stride + r_R[None, :]
        tl.store(at_CR, tl.trans(quotient_RC), (c_C < columns)[:, None])
    else:
        tl.store(out_ptr + r_R.to(tl.int64)[:, None] * out_stride + c_C[None, :], quotient_RC, valid_RC)
    if BY_TILE:
        tl.store(scale_ptr + row_block * scale_stride + column_block, tl.max(scale_C, 0))
    else:
        tl.store(scale_ptr + row_block * scale_stride + c_C, scale_C, c_C < columns)
