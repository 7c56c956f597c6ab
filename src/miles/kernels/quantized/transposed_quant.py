"""FP8 quantization of the operands of backward GEMMs, which are transposed, in Triton.

Shapes: R rows and C columns of a matrix; T tokens, K features, N out.

Bits are those of ``precision.quantize``: the same scale and the same division, correctly rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor

__all__ = ["TILE", "quantize_transposed_fp8", "transpose_fp8"]

TILE = 128


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
    is_quantized = isinstance(x, QuantizedActivation)
    old_scale = x.scale if is_quantized else source
    with device_guard(source):
        _quantize_transposed_kernel[(padded // TILE, triton.cdiv(features, TILE))](
            source,
            old_scale,
            data,
            scale,
            tokens,
            features,
            padded,
            *(old_scale.stride() if is_quantized else (0, 0)),
            SCALE_COLUMNS=x.columns if is_quantized else 0,
            TILE=TILE,
            num_warps=8,
        )
    return QuantizedActivation(data, scale.t(), TILE, dtype)


@jit(do_not_specialize=["rows", "padded"])
def _quantize_transposed_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    padded: tl.tensor,
    x_scale_stride_r: tl.tensor,
    x_scale_stride_g: tl.tensor,
    SCALE_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Quantize a tile with a scale for each of its columns; rows beyond the last are zeros, which pad the result."""
    row_block = tl.program_id(0)
    r_R = row_block * TILE + tl.arange(0, TILE)
    c_C = tl.program_id(1) * TILE + tl.arange(0, TILE)
    valid_RC = (r_R < rows)[:, None] & (c_C < columns)[None, :]
    x_RC = tl.load(x_ptr + r_R.to(tl.int64)[:, None] * columns + c_C[None, :], valid_RC, other=0.0).to(tl.float32)
    if SCALE_COLUMNS > 0:
        scale_RC = x_scale_ptr + r_R[:, None] * x_scale_stride_r + (c_C // SCALE_COLUMNS)[None, :] * x_scale_stride_g
        x_RC *= tl.load(scale_RC, valid_RC, other=0.0)
    scale_C = tl.div_rn(tl.max(tl.abs(x_RC), 0), tl.full((TILE,), 448.0, tl.float32))
    scale_C = tl.where(scale_C == 0.0, 1.0, scale_C)
    quotient_RC = tl.div_rn(x_RC, tl.broadcast_to(scale_C[None, :], (TILE, TILE))).to(tl.float8e4nv)
    at_CR = out_ptr + c_C.to(tl.int64)[:, None] * padded + r_R[None, :]
    tl.store(at_CR, tl.trans(quotient_RC), (c_C < columns)[:, None])
    tl.store(scale_ptr + row_block * columns + c_C, scale_C, c_C < columns)
