"""FP8 quantization of the operands of backward GEMMs, which are transposed, in Triton.

Shapes: R rows and C columns of a matrix; T tokens, K features, N out.

Bits are those of ``precision.quantize``: the same scale and the same division, correctly rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles.kernels.quantized.activation_quant import pad_tokens
from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton, use_triton
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor

__all__ = ["TILE", "quantize_both_fp8", "quantize_transposed_fp8", "transpose_bytes", "transpose_fp8"]

TILE = 128


def transpose_fp8(weight: QuantizedTensor) -> QuantizedTensor:
    """The transposed weight [K, N] of square blocks, or a stack: the same values and scales."""
    data = transpose_bytes(weight.data)
    return QuantizedTensor(weight.format, data, weight.scale.mT.contiguous(), weight.row_block)


def transpose_bytes(x: Tensor) -> Tensor:
    """The transposed matrix of single-byte values, or a stack of them, contiguous."""
    (*stack, rows, columns), source = x.shape, x.contiguous().view(torch.uint8)
    if not use_triton(x) or rows % 4:
        return source.mT.contiguous().view(x.dtype)
    out = torch.empty(*stack, columns, rows, dtype=torch.uint8, device=x.device)
    with device_guard(source):
        _transpose_kernel[(triton.cdiv(columns, TILE), triton.cdiv(rows, TILE), stack[0] if stack else 1)](
            source, out, rows, columns, TILE=TILE, num_warps=8
        )
    return out.view(x.dtype)


@jit
def _transpose_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor, columns: tl.tensor, TILE: tl.constexpr
) -> None:
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    x_ptr += matrix
    out_ptr += matrix
    word_R = tl.program_id(1) * (TILE // 4) + tl.arange(0, TILE // 4)
    c_C = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid_RC = (4 * word_R < rows)[:, None] & (c_C < columns)[None, :]
    at_RC = x_ptr + (4 * word_R).to(tl.int64)[:, None] * columns + c_C[None, :]
    word_RC = _pack_bytes(
        tl.load(at_RC, valid_RC, other=0),
        tl.load(at_RC + columns, valid_RC, other=0),
        tl.load(at_RC + 2 * columns, valid_RC, other=0),
        tl.load(at_RC + 3 * columns, valid_RC, other=0),
    )
    at_CR = out_ptr.to(tl.pointer_type(tl.int32)) + c_C.to(tl.int64)[:, None] * (rows // 4) + word_R[None, :]
    tl.store(at_CR, tl.trans(word_RC), tl.trans(valid_RC))


def quantize_transposed_fp8(x: Tensor | QuantizedActivation) -> QuantizedActivation:
    """The transposed rows [K, T] in groups of 128 tokens, with a scale each; T is padded with zeros to such a group."""
    return _quantize(x, None)


def quantize_both_fp8(x_TK: Tensor) -> tuple[QuantizedActivation, QuantizedActivation]:
    """The rows in groups of 128 features as ``quantize_rows_fp8`` has them, and ``quantize_transposed_fp8``."""
    (tokens, features), padded = x_TK.shape, pad_tokens(len(x_TK))
    data_TK = torch.empty(padded, features, dtype=torch.float8_e4m3fn, device=x_TK.device)[:tokens]
    scale_TG = torch.empty(-(-features // TILE), padded, dtype=torch.float32, device=x_TK.device).t()[:tokens]
    rows = QuantizedActivation(data_TK, scale_TG, TILE, x_TK.dtype)
    return rows, _quantize(x_TK, rows)


def _quantize(x: Tensor | QuantizedActivation, rows: QuantizedActivation | None) -> QuantizedActivation:
    source = (x.data if isinstance(x, QuantizedActivation) else x).contiguous()
    (tokens, features), dtype = source.shape, x.dtype
    padded = -(-tokens // TILE) * TILE
    data = torch.empty(features, padded, dtype=torch.float8_e4m3fn, device=source.device)
    scale = torch.empty(padded // TILE, features, dtype=torch.float32, device=source.device)
    is_quantized = isinstance(x, QuantizedActivation)
    old_scale = x.scale if is_quantized else source
    assert not is_quantized or x.columns % TILE == 0 or x.columns == features
    with device_guard(source):
        _quantize_transposed_kernel[(triton.cdiv(features, TILE), padded // TILE)](
            source,
            old_scale,
            data,
            scale,
            source if rows is None else rows.data,
            source if rows is None else rows.scale,
            tokens,
            features,
            padded // TILE,
            pad_tokens(tokens),
            *(old_scale.stride() if is_quantized else (0, 0)),
            SCALE_COLUMNS=x.columns if is_quantized else 0,
            ROWS=rows is not None,
            TILE=TILE,
            num_warps=8,
        )
    return QuantizedActivation(data, scale.t(), TILE, dtype)


@jit(do_not_specialize=["rows", "tiles", "row_stride"])
def _quantize_transposed_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    row_out_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    tiles: tl.tensor,
    row_stride: tl.tensor,
    x_scale_stride_r: tl.tensor,
    x_scale_stride_g: tl.tensor,
    SCALE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Quantize a tile with a scale for each of its columns, and with ``ROWS`` also with one for each of its rows.

    Rows beyond the last are zeros, which pad the transposed result. A quarter has every fourth row.
    """
    column_block, row_block = tl.program_id(0), tl.program_id(1)
    r_R = row_block * TILE + 4 * tl.arange(0, TILE // 4)
    c_C = column_block * TILE + tl.arange(0, TILE)
    scales = (x_scale_ptr + column_block * TILE // max(SCALE_COLUMNS, 1) * x_scale_stride_g, x_scale_stride_r)
    inputs = (c_C, x_ptr, scales[0], scales[1], rows, columns, SCALE_COLUMNS)
    x0_RC = _load_quarter(r_R, *inputs)
    x1_RC = _load_quarter(r_R + 1, *inputs)
    x2_RC = _load_quarter(r_R + 2, *inputs)
    x3_RC = _load_quarter(r_R + 3, *inputs)
    if ROWS:
        outputs = (c_C, row_out_ptr, row_scale_ptr + column_block * row_stride, rows, columns)
        _store_rows(x0_RC, r_R, *outputs)
        _store_rows(x1_RC, r_R + 1, *outputs)
        _store_rows(x2_RC, r_R + 2, *outputs)
        _store_rows(x3_RC, r_R + 3, *outputs)
    largest_RC = tl.maximum(tl.maximum(tl.abs(x0_RC), tl.abs(x1_RC)), tl.maximum(tl.abs(x2_RC), tl.abs(x3_RC)))
    scale_C = tl.div_rn(tl.max(largest_RC, 0), tl.full((TILE,), 448.0, tl.float32))
    scale_C = tl.where(scale_C == 0.0, 1.0, scale_C)
    scale_RC = tl.broadcast_to(scale_C[None, :], (TILE // 4, TILE))
    word_RC = _pack_bytes(
        tl.div_rn(x0_RC, scale_RC).to(tl.float8e4nv),
        tl.div_rn(x1_RC, scale_RC).to(tl.float8e4nv),
        tl.div_rn(x2_RC, scale_RC).to(tl.float8e4nv),
        tl.div_rn(x3_RC, scale_RC).to(tl.float8e4nv),
    )
    words_R = row_block * (TILE // 4) + tl.arange(0, TILE // 4)
    words_ptr = out_ptr.to(tl.pointer_type(tl.int32))
    at_CR = words_ptr + c_C.to(tl.int64)[:, None] * (tiles * (TILE // 4)) + words_R[None, :]
    tl.store(at_CR, tl.trans(word_RC), (c_C < columns)[:, None])
    tl.store(scale_ptr + row_block * columns + c_C, scale_C, c_C < columns)


@jit
def _pack_bytes(b0: tl.tensor, b1: tl.tensor, b2: tl.tensor, b3: tl.tensor) -> Any:
    """Four tensors of bytes as one of little-endian words, so that a transpose moves words between threads."""
    low = b0.to(tl.uint8, bitcast=True).to(tl.int32) | (b1.to(tl.uint8, bitcast=True).to(tl.int32) << 8)
    high = b2.to(tl.uint8, bitcast=True).to(tl.int32) | (b3.to(tl.uint8, bitcast=True).to(tl.int32) << 8)
    return low | (high << 16)


@jit
def _load_quarter(
    r_R: tl.tensor,
    c_C: tl.tensor,
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    x_scale_stride_r: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    SCALE_COLUMNS: tl.constexpr,
) -> Any:
    """Rows of the input in float32."""
    valid_RC = (r_R < rows)[:, None] & (c_C < columns)[None, :]
    x_RC = tl.load(x_ptr + r_R.to(tl.int64)[:, None] * columns + c_C[None, :], valid_RC, other=0.0).to(tl.float32)
    if SCALE_COLUMNS > 0:
        x_RC *= tl.load(x_scale_ptr + r_R * x_scale_stride_r, r_R < rows, other=0.0)[:, None]
    return x_RC


@jit
def _store_rows(
    x_RC: tl.tensor,
    r_R: tl.tensor,
    c_C: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
) -> None:
    """Quantize rows with a scale each."""
    scale_R = tl.div_rn(tl.max(tl.abs(x_RC), 1), tl.full((x_RC.shape[0],), 448.0, tl.float32))
    scale_R = tl.where(scale_R == 0.0, 1.0, scale_R)
    value_RC = tl.div_rn(x_RC, tl.broadcast_to(scale_R[:, None], x_RC.shape)).to(tl.float8e4nv)
    valid_RC = (r_R < rows)[:, None] & (c_C < columns)[None, :]
    tl.store(out_ptr + r_R.to(tl.int64)[:, None] * columns + c_C[None, :], value_RC, valid_RC)
    tl.store(scale_ptr + r_R, scale_R, r_R < rows)
