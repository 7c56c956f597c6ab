"""FP8 quantization of the operands of backward GEMMs, which are transposed, in Triton.

Shapes: R rows and C columns of a matrix; T tokens, K features, N out.

Bits are those of ``precision.quantize``: the same scale and the same division, correctly rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.quantized.activation_quant import pad_tokens
from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor

__all__ = ["TILE", "quantize_both_fp8", "quantize_transposed_fp8", "transpose_fp8"]

TILE = 128


def transpose_fp8(weight: QuantizedTensor) -> QuantizedTensor:
    """The transposed weight [K, N] of square blocks: the same values and scales."""
    data = weight.data.view(torch.uint8).t().contiguous().view(weight.data.dtype)
    return QuantizedTensor(weight.format, data, weight.scale.t().contiguous(), weight.row_block)


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
            padded,
            pad_tokens(tokens),
            *(old_scale.stride() if is_quantized else (0, 0)),
            SCALE_COLUMNS=x.columns if is_quantized else 0,
            ROWS=rows is not None,
            TILE=TILE,
            num_warps=8,
        )
    return QuantizedActivation(data, scale.t(), TILE, dtype)


@jit(do_not_specialize=["rows", "padded", "row_stride"])
def _quantize_transposed_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    row_out_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    padded: tl.tensor,
    row_stride: tl.tensor,
    x_scale_stride_r: tl.tensor,
    x_scale_stride_g: tl.tensor,
    SCALE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Quantize a tile with a scale for each of its columns, and with ``ROWS`` also with one for each of its rows.

    Rows beyond the last are zeros, which pad the transposed result.
    """
    column_block, row_block = tl.program_id(0), tl.program_id(1)
    r_R = row_block * TILE + tl.arange(0, TILE)
    c_C = column_block * TILE + tl.arange(0, TILE)
    valid_RC = (r_R < rows)[:, None] & (c_C < columns)[None, :]
    at_RC = r_R.to(tl.int64)[:, None] * columns + c_C[None, :]
    x_RC = tl.load(x_ptr + at_RC, valid_RC, other=0.0).to(tl.float32)
    if SCALE_COLUMNS > 0:
        group = column_block * TILE // SCALE_COLUMNS
        x_scale_R = tl.load(x_scale_ptr + r_R * x_scale_stride_r + group * x_scale_stride_g, r_R < rows, other=0.0)
        x_RC *= x_scale_R[:, None]
    if ROWS:
        row_scale_R = tl.div_rn(tl.max(tl.abs(x_RC), 1), tl.full((TILE,), 448.0, tl.float32))
        row_scale_R = tl.where(row_scale_R == 0.0, 1.0, row_scale_R)
        by_row_RC = tl.div_rn(x_RC, tl.broadcast_to(row_scale_R[:, None], (TILE, TILE))).to(tl.float8e4nv)
        tl.store(row_out_ptr + at_RC, by_row_RC, valid_RC)
        tl.store(row_scale_ptr + column_block * row_stride + r_R, row_scale_R, r_R < rows)
    scale_C = tl.div_rn(tl.max(tl.abs(x_RC), 0), tl.full((TILE,), 448.0, tl.float32))
    scale_C = tl.where(scale_C == 0.0, 1.0, scale_C)
    quotient_RC = tl.div_rn(x_RC, tl.broadcast_to(scale_C[None, :], (TILE, TILE))).to(tl.float8e4nv)
    at_CR = out_ptr + c_C.to(tl.int64)[:, None] * padded + r_R[None, :]
    tl.store(at_CR, tl.trans(quotient_RC), (c_C < columns)[:, None])
    tl.store(scale_ptr + row_block * columns + c_C, scale_C, c_C < columns)
