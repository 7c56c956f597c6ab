"""FP8 backward of experts in Triton: grouped dy W' and dy^T x' with E4M3 operands, rows sorted by expert.

Shapes: R rows sorted by expert, E experts, K in, N out, C features of an operand; P blocks of 128 rows of one expert.

Both operands are quantized in groups of 128 along the dimension that is summed over. For dy^T x' those are rows of an
expert: each expert's rows are padded with zeros to blocks of 128, so that no scale is shared by two experts. Blocks are
found on the device from the ends of the experts' rows, so nothing waits for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles.kernels.moe.grouped_gemm import SortedRows
from miles.kernels.quantized.activation_quant import has_fp8, quantize_rows_fp8
from miles.kernels.quantized.fp8_moe import fp8_grouped_gemm
from miles.kernels.quantized.quantize_triton import supports_quantize_weight
from miles.kernels.quantized.transposed_quant import TILE
from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton, use_triton
from miles.precision.formats import FORMATS, WeightFormat
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor

__all__ = [
    "TransposedRows",
    "fp8_grouped_grad_input",
    "fp8_grouped_grad_weight",
    "quantize_grouped_transposed_fp8",
    "supports_fp8_grouped_backward",
]

# Rows and columns of the weight's gradient in a tile.
_TILE_N, _TILE_K = 128, 128


class TransposedRows(NamedTuple):
    """Transposed rows of E4M3, [C, P * 128], in blocks of 128 rows of one expert, with scales [P, C].

    Blocks of an expert are adjacent and experts in order; blocks behind those of the last expert are not written.
    """

    data: Tensor
    scale: Tensor


def _has_square_blocks(weight_ENK: Tensor, format: WeightFormat, segments: Any) -> bool:
    """Whether the transposed weights have whole blocks, with the scales of the weights."""
    square = format.rows == format.columns == TILE and weight_ENK.shape[-2] % TILE == 0
    return square and supports_quantize_weight(weight_ENK, format, segments)


def supports_fp8_grouped_backward(grad_RN: Tensor, weight_ENK: Tensor, format: WeightFormat, segments: Any) -> bool:
    """Whether the kernels apply: half-precision gradients of experts in FP8 blocks on a GPU with FP8 tensor cores."""
    half = grad_RN.dtype in (torch.bfloat16, torch.float16)
    stacked = weight_ENK.ndim == 3 and _has_square_blocks(weight_ENK, format, segments)
    return half and stacked and format.rows == TILE and use_triton(grad_RN) and has_fp8(grad_RN.device)


def fp8_grouped_grad_input(grad_RN: Tensor, transposed: QuantizedTensor, rows: SortedRows) -> Tensor:
    """dy W', [R, K], with the transposed weights [E, K, N]."""
    return fp8_grouped_gemm(quantize_rows_fp8(grad_RN, FORMATS["fp8"]), transposed, rows)


def fp8_grouped_grad_weight(grad_RN: Tensor, x: Tensor | QuantizedActivation, rows: SortedRows, experts: int) -> Tensor:
    """dy^T x' of every expert's rows, [E, N, K]; zeros for an expert without any."""
    outputs, inputs = grad_RN.shape[1], (x.data if isinstance(x, QuantizedActivation) else x).shape[1]
    if not len(grad_RN):
        return grad_RN.new_zeros(experts, outputs, inputs)
    grad = quantize_grouped_transposed_fp8(grad_RN, rows, experts)
    other = quantize_grouped_transposed_fp8(x, rows, experts)
    out_ENK = torch.empty(experts, outputs, inputs, dtype=grad_RN.dtype, device=grad_RN.device)
    tiles = triton.cdiv(outputs, _TILE_N) * triton.cdiv(inputs, _TILE_K)
    with device_guard(grad_RN):
        _grad_weight_kernel[(tiles, experts)](
            grad.data,
            other.data,
            grad.scale,
            other.scale,
            rows.ends_E,
            out_ENK,
            outputs,
            inputs,
            len(grad.scale),
            experts,
            BLOCK_E=triton.next_power_of_2(experts),
            N=_TILE_N,
            K=_TILE_K,
            T=TILE,
            num_warps=8,
            num_stages=3,
        )
    return out_ENK


def quantize_grouped_transposed_fp8(x: Tensor | QuantizedActivation, rows: SortedRows, experts: int) -> TransposedRows:
    """Quantize rows in groups of 128 rows of one expert, with a scale for each column of a group, transposed."""
    source = (x.data if isinstance(x, QuantizedActivation) else x).contiguous()
    count, features = source.shape
    blocks = min(count, count // TILE + experts)
    data = torch.empty(features, blocks * TILE, dtype=torch.float8_e4m3fn, device=source.device)
    scale = torch.empty(blocks, features, dtype=torch.float32, device=source.device)
    old_scale, columns = (x.scale, x.columns) if isinstance(x, QuantizedActivation) else (source, 0)
    with device_guard(source):
        _quantize_grouped_kernel[(blocks, triton.cdiv(features, TILE))](
            source,
            old_scale,
            rows.ends_E,
            data,
            scale,
            features,
            blocks,
            experts,
            *old_scale.stride(),
            SCALE_COLUMNS=columns,
            BLOCK_E=triton.next_power_of_2(experts),
            T=TILE,
            num_warps=8,
        )
    return TransposedRows(data, scale)


@jit
def _count_blocks(ends_ptr: tl.tensor, experts: tl.tensor, BLOCK_E: tl.constexpr, T: tl.constexpr) -> Any:
    """First and last row of every expert, and how many blocks of T rows it has."""
    e_E = tl.arange(0, BLOCK_E)
    end_E = tl.load(ends_ptr + e_E, e_E < experts, other=0)
    start_E = tl.load(ends_ptr + e_E - 1, (e_E > 0) & (e_E < experts), other=0)
    return start_E, end_E, (end_E - start_E + T - 1) // T


@jit(do_not_specialize=["blocks"])
def _quantize_grouped_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    experts: tl.tensor,
    x_scale_stride_r: tl.tensor,
    x_scale_stride_g: tl.tensor,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    T: tl.constexpr,
) -> None:
    """Quantize T columns of a block with a scale each; rows behind the expert's last are zeros."""
    block = tl.program_id(0)
    start_E, end_E, blocks_E = _count_blocks(ends_ptr, experts, BLOCK_E, T)
    last_block_E = tl.cumsum(blocks_E, 0)
    if block >= tl.sum(blocks_E, 0):
        return
    mine_E = (last_block_E > block) & (last_block_E - blocks_E <= block)
    first = tl.sum(tl.where(mine_E, start_E + (block - last_block_E + blocks_E) * T, 0), 0)
    end = tl.sum(tl.where(mine_E, end_E, 0), 0)
    t_T, c_C = tl.arange(0, T), tl.program_id(1) * T + tl.arange(0, T)
    row_T = first + t_T
    valid_TC = (row_T < end)[:, None] & (c_C < columns)[None, :]
    x_TC = tl.load(x_ptr + row_T.to(tl.int64)[:, None] * columns + c_C[None, :], valid_TC, other=0.0).to(tl.float32)
    if SCALE_COLUMNS > 0:
        at_TC = row_T.to(tl.int64)[:, None] * x_scale_stride_r + (c_C // SCALE_COLUMNS)[None, :] * x_scale_stride_g
        x_TC *= tl.load(x_scale_ptr + at_TC, valid_TC, other=0.0)
    scale_C = tl.div_rn(tl.max(tl.abs(x_TC), 0), tl.full((T,), 448.0, tl.float32))
    scale_C = tl.where(scale_C == 0.0, 1.0, scale_C)
    quotient_TC = tl.div_rn(x_TC, tl.broadcast_to(scale_C[None, :], (T, T))).to(tl.float8e4nv)
    at_CT = out_ptr + c_C.to(tl.int64)[:, None] * (blocks * T) + block * T + t_T[None, :]
    tl.store(at_CT, tl.trans(quotient_TC), (c_C < columns)[:, None])
    tl.store(scale_ptr + block * columns + c_C, scale_C, c_C < columns)


@jit(do_not_specialize=["blocks"])
def _grad_weight_kernel(
    grad_ptr: tl.tensor,
    x_ptr: tl.tensor,
    grad_scale_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    blocks: tl.tensor,
    experts: tl.tensor,
    BLOCK_E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
) -> None:
    """One tile of one expert's gradient: its blocks of rows in order, scaled and added in float32."""
    tiles_k = tl.cdiv(inputs, K)
    n_N = tl.program_id(0) // tiles_k * N + tl.arange(0, N)
    k_K = tl.program_id(0) % tiles_k * K + tl.arange(0, K)
    expert = tl.program_id(1)
    _, _, blocks_E = _count_blocks(ends_ptr, experts, BLOCK_E, T)
    e_E = tl.arange(0, BLOCK_E)
    first = tl.sum(tl.where(e_E < expert, blocks_E, 0), 0)
    last = first + tl.sum(tl.where(e_E == expert, blocks_E, 0), 0)
    # Columns beyond the last are read again, and not stored.
    safe_N, safe_K = tl.minimum(n_N, outputs - 1), tl.minimum(k_K, inputs - 1)
    grad_NT = grad_ptr + safe_N.to(tl.int64)[:, None] * (blocks * T) + tl.arange(0, T)[None, :]
    x_KT = x_ptr + safe_K.to(tl.int64)[:, None] * (blocks * T) + tl.arange(0, T)[None, :]
    sum_NK = tl.zeros((N, K), tl.float32)
    for block in range(first, last):
        grad_scale_N = tl.load(grad_scale_ptr + block * outputs + safe_N)
        x_scale_K = tl.load(x_scale_ptr + block * inputs + safe_K)
        dot_NK = tl.dot(tl.load(grad_NT + block * T), tl.load(x_KT + block * T).T)
        sum_NK += dot_NK * (grad_scale_N[:, None] * x_scale_K[None, :])
    at_NK = out_ptr + (expert.to(tl.int64) * outputs + n_N)[:, None] * inputs + k_K[None, :]
    tl.store(at_NK, sum_NK.to(out_ptr.dtype.element_ty), (n_N < outputs)[:, None] & (k_K < inputs)[None, :])  # pyright: ignore
