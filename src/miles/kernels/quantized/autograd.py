"""Gradients of quantized linear layers and experts: the straight-through estimator, with an optional FP8 backward.

With x' and W' the operands as the forward multiplies them (rounded to their formats):

    y = x' W'^T + b      dx = dy W'      dW = dy^T x'      db = sum of dy

Rounding counts as the identity, so ``dx`` and ``dW`` go to the operands as they were before it. Saved for backward is
the quantized input where the format quantizes it, else the input, and the wide weight, which is quantized again: no
operand is stored twice.

The two GEMMs of backward are ``grad_input`` and ``grad_weight`` (and their grouped forms). With ``backward`` "wide"
they multiply dequantized operands in the gradient's dtype. With "e4m3" or "hybrid" (Megatron's ``--fp8-format``) their
operands are quantized in groups of 128 along the dimension that is summed over: gradients to E4M3, or to E5M2. Groups
of rows do not cross from one expert to the next.

Shapes: T rows, K in, N out, E experts, R rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.moe import grouped_gemm
from miles.kernels.moe.grouped_gemm import SortedRows, supports_grouped_mm
from miles.kernels.quantized.activation_quant import has_fp8, quantize_rows_fp8, supports_fused_quantization
from miles.kernels.quantized.fp8_backward import fp8_gradients, supports_fp8_backward
from miles.kernels.quantized.fp8_gemm import supports_fp8_gemm
from miles.kernels.quantized.fp8_moe_backward import (
    fp8_grouped_grad_input,
    fp8_grouped_grad_weight,
    supports_fp8_grouped_backward,
)
from miles.kernels.quantized.quantize_triton import quantize_weight, supports_quantize_weight
from miles.kernels.quantized.transposed_quant import transpose_fp8
from miles.kernels.runtime.triton_compat import use_triton
from miles.precision.formats import BackwardPrecision, WeightFormat
from miles.precision.quantize import dequantize, dequantize_activation, quantize, quantize_activation
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor, StraightThroughWeight

__all__ = ["LinearForward", "apply_with_grad", "needs_grad", "quantize_gradient"]

LinearForward = Callable[[Tensor | QuantizedActivation, QuantizedTensor, Tensor | None], Tensor]
"""The operation without a gradient: input, weight and bias."""

# Values of a gradient that share a scale.
_GROUP = 128
_E5M2_MAX = 57344.0
_E4M3_MAX = 448.0


class _Operation(NamedTuple):
    """What a layer computes: the forward, its weight's format, and the groups of its rows if it is of experts."""

    forward: LinearForward
    weight: QuantizedTensor | StraightThroughWeight
    rows: SortedRows | None


def needs_grad(x: Tensor | QuantizedActivation, weight: QuantizedTensor | StraightThroughWeight) -> bool:
    """Whether a backward will follow."""
    if not torch.is_grad_enabled() or isinstance(x, QuantizedActivation):
        return False
    return x.requires_grad or (isinstance(weight, StraightThroughWeight) and weight.weight.requires_grad)


def apply_with_grad(
    forward: LinearForward,
    x_TK: Tensor,
    weight: QuantizedTensor | StraightThroughWeight,
    bias: Tensor | None,
    rows: SortedRows | None = None,
) -> Tensor:
    """Run ``forward`` with the gradients of this module; ``rows`` are sorted by expert if the weight is stacked."""
    trained = weight.weight if isinstance(weight, StraightThroughWeight) else None
    return _QuantizedLinear.apply(x_TK, trained, bias, _Operation(forward, weight, rows))  # pyright: ignore[reportReturnType]


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, trained: Tensor | None, bias: Tensor | None, op: _Operation) -> Tensor:
        format = op.weight.format
        packed = _pack(op.weight)
        x = _quantize_input(x_TK.reshape(-1, x_TK.shape[-1]), packed)
        ctx.format = format
        ctx.rows = op.rows
        ctx.groups = len(packed.data) if op.rows is not None else 0
        saved: tuple[Tensor, ...] = ()
        if ctx.needs_input_grad[1]:
            # A copy where the rows were padded, whose memory would be saved as well.
            saved = (x.data.contiguous(), x.scale) if isinstance(x, QuantizedActivation) else (x,)
        ctx.columns = x.columns if isinstance(x, QuantizedActivation) else None
        if isinstance(op.weight, StraightThroughWeight):
            ctx.backward_precision, ctx.segments = op.weight.backward, op.weight.segments
            ctx.save_for_backward(op.weight.weight, *saved)
        else:
            ctx.backward_precision, ctx.segments = "wide", None
            ctx.row_block = packed.row_block
            ctx.save_for_backward(packed.data, packed.scale, packed.zero, packed.global_scale, *saved)
        return op.forward(x, packed, bias).view(*x_TK.shape[:-1], packed.shape[-2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows: SortedRows | None = ctx.rows
        grad_rows = grad_TN.reshape(-1, grad_TN.shape[-1])
        precision: BackwardPrecision = ctx.backward_precision
        if rows is not None and _uses_grouped_fp8(ctx, grad_rows):
            return _backward_grouped_fp8(ctx, grad_rows, rows)
        weight, saved = _read_saved(ctx)
        grad_x = grad_weight_out = None
        use_fp8 = precision == "e4m3" and ctx.columns is not None and supports_fp8_backward(grad_rows, weight)
        if use_fp8:
            columns = int(ctx.columns or 0)
            x = QuantizedActivation(saved[0], saved[1], columns, grad_TN.dtype) if needs_weight else None
            grad_x, grad_weight_out = fp8_gradients(grad_rows, weight, x)
        else:
            if needs_x:
                grad_x = grad_input(grad_rows, weight, rows, precision)
            if needs_weight:
                x_TK = _read_input(saved, ctx.columns, grad_TN.dtype)
                grad_weight_out = grad_weight(grad_rows, x_TK, rows, ctx.groups, precision)
        if grad_x is not None:
            grad_x = grad_x.view(*grad_TN.shape[:-1], weight.shape[-1])
        grad_bias = _grad_bias(grad_rows, rows, ctx.groups) if needs_bias else None
        return grad_x, grad_weight_out, grad_bias, None


def _uses_grouped_fp8(ctx: Any, grad_RN: Tensor) -> bool:
    if ctx.backward_precision != "e4m3" or ctx.columns is None:
        return False
    return supports_fp8_grouped_backward(grad_RN, ctx.saved_tensors[0], ctx.format, ctx.segments)


def _backward_grouped_fp8(ctx: Any, grad_RN: Tensor, rows: SortedRows) -> tuple[Tensor | None, ...]:
    """The backward of experts whose GEMMs are both in FP8."""
    wide_ENK, *saved = ctx.saved_tensors
    grad_x = grad_weight_out = None
    if ctx.needs_input_grad[0]:
        transposed = transpose_fp8(quantize_weight(wide_ENK.detach(), ctx.format))
        grad_x = fp8_grouped_grad_input(grad_RN, transposed, rows)
    if ctx.needs_input_grad[1]:
        x = QuantizedActivation(saved[0], saved[1], int(ctx.columns), grad_RN.dtype)
        grad_weight_out = fp8_grouped_grad_weight(grad_RN, x, rows, ctx.groups)
    grad_bias = _grad_bias(grad_RN, rows, ctx.groups) if ctx.needs_input_grad[2] else None
    return grad_x, grad_weight_out, grad_bias, None


def _pack(weight: QuantizedTensor | StraightThroughWeight) -> QuantizedTensor:
    if isinstance(weight, QuantizedTensor):
        return weight
    return _quantize_weight(weight.weight.detach(), weight.format, weight.segments)


def _quantize_weight(weight: Tensor, format: WeightFormat, segments: tuple[int, ...]) -> QuantizedTensor:
    """``quantize``, in one kernel where there is one."""
    if use_triton(weight) and has_fp8(weight.device) and supports_quantize_weight(weight, format, segments):
        return quantize_weight(weight, format)
    return quantize(weight, format, segments)


def _quantize_input(x_TK: Tensor, weight: QuantizedTensor) -> Tensor | QuantizedActivation:
    """The input as the forward multiplies it."""
    if not weight.format.quantizes_activations:
        return x_TK
    if supports_fp8_gemm(x_TK, weight) and supports_fused_quantization(weight.format, x_TK.shape[-1]):
        return quantize_rows_fp8(x_TK, weight.format)
    return quantize_activation(x_TK, weight.format)


def _read_saved(ctx: Any) -> tuple[QuantizedTensor, tuple[Tensor, ...]]:
    """The weight and the input as the forward multiplied them."""
    format: WeightFormat = ctx.format
    if ctx.segments is not None:
        wide, *saved = ctx.saved_tensors
        return _quantize_weight(wide.detach(), format, ctx.segments), tuple(saved)
    data, scale, zero, global_scale, *saved = ctx.saved_tensors
    return QuantizedTensor(format, data, scale, ctx.row_block, zero, global_scale), tuple(saved)


def _read_input(saved: tuple[Tensor, ...], columns: int | None, dtype: torch.dtype) -> Tensor:
    """The input as the forward multiplied it."""
    if columns is None:
        return saved[0].to(dtype)
    return dequantize_activation(QuantizedActivation(saved[0], saved[1], columns, dtype)).to(dtype)


# -- the GEMMs of backward --------------------------------------------------------------------


def grad_input(
    grad_TN: Tensor, weight: QuantizedTensor, rows: SortedRows | None, precision: BackwardPrecision
) -> Tensor:
    """Compute dy W', [T, K]; a grouped GEMM if ``rows`` are sorted by expert."""
    weight_NK = dequantize(weight, grad_TN.dtype)
    if precision != "wide":
        grad_TN = _round_rows(grad_TN, precision)
    if rows is None:
        return grad_TN @ weight_NK
    return grouped_gemm.grouped_linear(grad_TN, weight_NK.transpose(1, 2), rows)


def grad_weight(
    grad_TN: Tensor, x_TK: Tensor, rows: SortedRows | None, groups: int, precision: BackwardPrecision
) -> Tensor:
    """Compute dy^T x', [N, K], or [E, N, K] of rows sorted by expert."""
    if precision != "wide":
        grad_TN, x_TK = _round_columns(grad_TN, precision, rows), _round_columns(x_TK, "e4m3", rows)
    if rows is None:
        return grad_TN.T @ x_TK
    if supports_grouped_mm(x_TK, x_TK.new_empty(0, grad_TN.shape[1], x_TK.shape[1])) and len(x_TK):
        return torch._grouped_mm(grad_TN.T, x_TK, offs=rows.ends_E)  # pyright: ignore[reportPrivateImportUsage]
    out_ENK = x_TK.new_zeros(groups, grad_TN.shape[1], x_TK.shape[1])
    start = 0
    for expert, end in enumerate(rows.ends_E.tolist()):
        if end > start:
            torch.mm(grad_TN[start:end].T, x_TK[start:end], out=out_ENK[expert])
        start = end
    return out_ENK


def _grad_bias(grad_TN: Tensor, rows: SortedRows | None, groups: int) -> Tensor:
    if rows is None:
        return grad_TN.sum(0)
    groups_E1 = torch.arange(groups, device=grad_TN.device, dtype=rows.group_R.dtype).unsqueeze(1)
    return (rows.group_R == groups_E1).to(grad_TN.dtype) @ grad_TN


# -- FP8 gradients ----------------------------------------------------------------------------


def quantize_gradient(grad_TN: Tensor, precision: BackwardPrecision) -> QuantizedActivation:
    """Quantize rows in groups of 128 columns, to E4M3 or, in "hybrid", to E5M2."""
    dtype, largest = (torch.float8_e5m2, _E5M2_MAX) if precision == "hybrid" else (torch.float8_e4m3fn, _E4M3_MAX)
    columns = grad_TN.shape[-1]
    padded = torch.nn.functional.pad(grad_TN.float(), (0, -columns % _GROUP)).unflatten(-1, (-1, _GROUP))
    scale = padded.abs().amax(-1) / largest
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    data = (padded / scale.unsqueeze(-1)).clamp(-largest, largest).to(dtype).flatten(-2)[..., :columns]
    return QuantizedActivation(data, scale, _GROUP, grad_TN.dtype)


def _round_rows(x_TN: Tensor, precision: BackwardPrecision) -> Tensor:
    return dequantize_activation(quantize_gradient(x_TN, precision)).to(x_TN.dtype)


def _round_columns(x_TN: Tensor, precision: BackwardPrecision, rows: SortedRows | None) -> Tensor:
    """Round in groups of 128 rows, of one expert each: the dimension that the weight's gradient sums over."""
    if rows is None:
        return _round_rows(x_TN.T, precision).T
    # Each expert's rows are padded with zeros to groups; where they go is computed on the device, which is not awaited.
    starts_E = torch.nn.functional.pad(rows.ends_E[:-1], (1, 0))
    groups_E = (rows.ends_E - starts_E + _GROUP - 1) // _GROUP
    first_E = (groups_E.cumsum(0) - groups_E) * _GROUP - starts_E
    place_T = torch.arange(len(x_TN), device=x_TN.device) + first_E[rows.group_R]
    padded = x_TN.new_zeros((len(x_TN) // _GROUP + len(starts_E)) * _GROUP, x_TN.shape[1])
    padded.index_copy_(0, place_T, x_TN)
    return _round_rows(padded.T, precision).T.index_select(0, place_T)
