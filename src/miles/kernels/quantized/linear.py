"""Quantized linear layer: the packed weight times the input, which is quantized too if the format says so.

Shapes: T rows, K in, N out.

The result is defined by the dequantized operands: their products are summed in float32 and rounded once. On a GPU the
FP8 and weight-only kernels read the packed bytes; elsewhere both operands are dequantized and multiplied as wide ones
are.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F

from miles.kernels.batch_invariant import linear as invariant
from miles.kernels.fused.activation import ActivationKind, gated_activation
from miles.kernels.numerics import Numerics
from miles.kernels.quantized.activation_quant import quantize_rows_fp8
from miles.kernels.quantized.autograd import apply_with_grad, needs_grad
from miles.kernels.quantized.fp8_gemm import fp8_linear, supports_fp8_gemm
from miles.kernels.quantized.packed_weight import dequantize_weight, is_weight_only
from miles.kernels.quantized.weight_only import gated_weight_only_linear, use_weight_only, weight_only_linear
from miles.kernels.runtime.triton_compat import use_triton
from miles.precision.formats import WeightFormat
from miles.precision.quantize import dequantize, dequantize_activation, quantize, quantize_activation
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor, StraightThroughWeight

if TYPE_CHECKING:
    import torch

__all__ = [
    "dequantize_fast",
    "gated_quantized_linear",
    "is_fp8",
    "linear_reference",
    "quantized_linear",
    "round_activation",
]


def quantized_linear(
    x_TK: Tensor | QuantizedActivation,
    weight: QuantizedTensor | StraightThroughWeight,
    bias_N: Tensor | None,
    *,
    numerics: Numerics,
) -> Tensor:
    """Rows times a quantized weight, plus a bias; with the gradients of ``autograd``."""
    forward = partial(linear_forward, numerics=numerics)
    if isinstance(x_TK, Tensor) and needs_grad(x_TK, weight):
        return apply_with_grad(forward, x_TK, weight, bias_N)
    if isinstance(weight, StraightThroughWeight):
        weight = quantize(weight.weight, weight.format, weight.segments)
    return forward(x_TK, weight, bias_N)


def linear_forward(
    x_TK: Tensor | QuantizedActivation, weight: QuantizedTensor, bias_N: Tensor | None, *, numerics: Numerics
) -> Tensor:
    """``quantized_linear`` without a gradient."""
    rows = x_TK.data if isinstance(x_TK, QuantizedActivation) else x_TK
    if isinstance(x_TK, Tensor) and use_weight_only(x_TK, weight, numerics):
        return weight_only_linear(x_TK, weight, bias_N, numerics=numerics)
    if not (is_fp8(weight.format) and supports_fp8_gemm(rows, weight)):
        return linear_reference(x_TK, weight, bias_N, numerics=numerics)
    if not isinstance(x_TK, QuantizedActivation):
        x_TK = quantize_rows_fp8(x_TK.reshape(-1, x_TK.shape[-1]), weight.format)
    return fp8_linear(x_TK, weight, bias_N, numerics=numerics).view(*rows.shape[:-1], -1)


def gated_quantized_linear(
    x_TK: Tensor | QuantizedActivation,
    weight: QuantizedTensor | StraightThroughWeight,
    bias_N: Tensor | None,
    activation: ActivationKind,
    *,
    numerics: Numerics,
) -> Tensor:
    """``quantized_linear`` followed by ``gated_activation``, in one kernel where there is one; not batch-invariant."""
    if (
        isinstance(x_TK, Tensor)
        and isinstance(weight, QuantizedTensor)
        and not needs_grad(x_TK, weight)
        and use_weight_only(x_TK, weight, numerics)
    ):
        return gated_weight_only_linear(x_TK, weight, bias_N, activation, numerics=numerics)
    return gated_activation(quantized_linear(x_TK, weight, bias_N, numerics=numerics), activation)


def is_fp8(format: WeightFormat) -> bool:
    """Whether the FP8 kernels apply: weight and activation are E4M3 with scales in float32."""
    return format.element == "e4m3" and format.scale == "float32"


def linear_reference(
    x_TK: Tensor | QuantizedActivation, weight: QuantizedTensor, bias_N: Tensor | None, *, numerics: Numerics
) -> Tensor:
    """``quantized_linear`` on dequantized operands."""
    rounded_TK, dtype = round_activation(x_TK, weight.format)
    weight_NK = dequantize_fast(weight, rounded_TK.dtype)
    bias = None if bias_N is None else bias_N.to(rounded_TK.dtype)
    out_TN = (
        invariant.linear(rounded_TK, weight_NK, bias)
        if numerics.batch_invariant
        else F.linear(rounded_TK, weight_NK, bias)
    )
    return out_TN.to(dtype)


def dequantize_fast(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """``dequantize``, in one kernel on a GPU where there is one."""
    if use_triton(weight.data) and is_weight_only(weight.format) and weight.data.is_contiguous():
        return dequantize_weight(weight, dtype)
    return dequantize(weight, dtype)


def round_activation(x_TK: Tensor | QuantizedActivation, format: WeightFormat) -> tuple[Tensor, torch.dtype]:
    """Return the input as the multiplication sees it, and the dtype of the result.

    Quantized activations are dequantized to float32; a weight-only format leaves the input as it is.
    """
    if isinstance(x_TK, QuantizedActivation):
        return dequantize_activation(x_TK), x_TK.dtype
    if not format.quantizes_activations:
        return x_TK, x_TK.dtype
    return dequantize_activation(quantize_activation(x_TK, format)), x_TK.dtype
