"""FP8 backward of a linear layer on a GPU: dy W' and dy^T x' as scaled matmuls of E4M3 operands.

Shapes: T tokens, K in, N out.

Both operands are quantized in groups of 128 along the dimension that is summed over. A weight in square blocks is
transposed with its scales; where every row of the weight has a scale of its own, the scales multiply the gradient
first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles.kernels.quantized.activation_quant import pad_tokens, quantize_rows_fp8
from miles.kernels.quantized.transposed_quant import (
    TILE,
    quantize_both_fp8,
    quantize_transposed_fp8,
    transpose_bytes,
    transpose_fp8,
)
from miles.precision.formats import FORMATS
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor

__all__ = ["fp8_grad_input", "fp8_grad_weight", "fp8_gradients", "supports_fp8_backward"]

# cuBLAS wants the number of groups along the summed dimension to be a multiple of four.
_ALIGNMENT = 4 * TILE


def supports_fp8_backward(grad_TN: Tensor, weight: QuantizedTensor) -> bool:
    """Whether the kernels apply: bfloat16 gradients of a dense FP8 weight on an NVIDIA GPU, aligned shapes."""
    if not (grad_TN.is_cuda and torch.version.hip is None and grad_TN.dtype == torch.bfloat16):
        return False
    rows, columns = weight.shape[-2:]
    square = weight.row_block == weight.column_block == TILE
    by_row = weight.row_block == 1 and weight.column_block == columns
    return weight.data.ndim == 2 and (square or by_row) and not (rows % _ALIGNMENT or columns % TILE)


def fp8_gradients(
    grad_TN: Tensor, weight: QuantizedTensor, x: Tensor | QuantizedActivation | None
) -> tuple[Tensor, Tensor | None]:
    """dy W' [T, K], and dy^T x' [N, K] if there is ``x``.

    The gradient is read once for both of its quantized forms, where both are needed.
    """
    if x is None or weight.row_block != TILE:
        return fp8_grad_input(grad_TN, weight), None if x is None else fp8_grad_weight(grad_TN, x)
    rows, columns = quantize_both_fp8(grad_TN)
    return _multiply_blocks(rows, transpose_fp8(weight)), fp8_grad_weight(columns, x)


def fp8_grad_input(grad_TN: Tensor, weight: QuantizedTensor) -> Tensor:
    """dy W', [T, K]."""
    if weight.row_block != TILE:
        grad_TN = grad_TN * weight.scale.view(-1).to(grad_TN.dtype)
        grad = quantize_rows_fp8(grad_TN, FORMATS["fp8_channel"])
        weight_KN = transpose_bytes(weight.data)
        ones = torch.ones(1, len(weight_KN), dtype=torch.float32, device=grad_TN.device)
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            grad.data, weight_KN.t(), grad.scale, ones, out_dtype=grad_TN.dtype, use_fast_accum=True
        )
    return _multiply_blocks(quantize_rows_fp8(grad_TN, FORMATS["fp8"]), transpose_fp8(weight))


def _multiply_blocks(grad: QuantizedActivation, transposed: QuantizedTensor) -> Tensor:
    tokens, padded = len(grad.data), pad_tokens(len(grad.data))
    functional: Any = torch.nn.functional  # newer than torch's type stubs
    out_TK = functional.scaled_mm(
        grad.data.as_strided((padded, grad.data.shape[1]), (grad.data.shape[1], 1)),
        transposed.data.t(),
        grad.scale.as_strided((padded, grad.scale.shape[1]), (1, padded)),
        functional.ScalingType.BlockWise1x128,
        transposed.scale.t(),
        functional.ScalingType.BlockWise128x128,
        output_dtype=grad.dtype,
    )
    return out_TK[:tokens]


def fp8_grad_weight(grad: Tensor | QuantizedActivation, x: Tensor | QuantizedActivation) -> Tensor:
    """dy^T x', [N, K], of dy [T, N], or of what ``quantize_transposed_fp8`` makes of it."""
    if isinstance(grad, Tensor):
        grad = quantize_transposed_fp8(grad)
    rows = quantize_transposed_fp8(x)
    functional: Any = torch.nn.functional
    return functional.scaled_mm(
        grad.data,
        rows.data.t(),
        grad.scale,
        functional.ScalingType.BlockWise1x128,
        rows.scale,
        functional.ScalingType.BlockWise1x128,
        output_dtype=grad.dtype,
    )
