"""Experts with quantized weights: the fused MoE of ``kernels.moe`` with packed expert weights.

Shapes: T tokens, k experts per token, R = T * k rows, E experts, N out, K in, D features, I intermediate.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from miles.kernels.batch_invariant import grouped_gemm as invariant
from miles.kernels.batch_invariant.activation import gated_activation as invariant_gate
from miles.kernels.batch_invariant.activation import ungated_activation
from miles.kernels.batch_invariant.expert_sort import sort_by_expert
from miles.kernels.fused.activation import ActivationKind, apply_activation, gated_activation
from miles.kernels.moe import grouped_gemm
from miles.kernels.moe.grouped_gemm import (
    ExpertExchange,
    RowAdapter,
    SortedRows,
    dispatch,
    scale_rows,
    sort_rows_by_group,
)
from miles.kernels.numerics import Numerics
from miles.kernels.quantized.activation_quant import has_fp8, quantize_rows_fp8
from miles.kernels.quantized.autograd import apply_with_grad, needs_grad
from miles.kernels.quantized.fp8_gemm import supports_fp8_gemm
from miles.kernels.quantized.fp8_moe import fp8_grouped_gemm, fp8_moe
from miles.kernels.quantized.linear import dequantize_fast, is_fp8, round_activation
from miles.kernels.quantized.weight_only import grouped_weight_only_linear, use_weight_only, weight_only_moe
from miles.kernels.runtime.triton_compat import use_triton_inference
from miles.precision.quantize import quantize
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor, StraightThroughWeight

__all__ = ["QuantizedExperts", "quantized_moe"]


class QuantizedExperts(NamedTuple):
    """Stacked expert weights, the activation between the two GEMMs, and what adapters add to the output of each."""

    first: QuantizedTensor | StraightThroughWeight
    down: QuantizedTensor | StraightThroughWeight
    first_bias_EF: Tensor | None
    down_bias_ED: Tensor | None
    activation: ActivationKind
    interleaved: bool
    numerics: Numerics
    first_adapter: RowAdapter | None = None
    down_adapter: RowAdapter | None = None

    def __call__(self, x_RD: Tensor, rows: SortedRows) -> Tensor:
        """Apply each row's expert; ``rows`` are sorted by expert."""
        inner_RF = grouped_quantized_linear(x_RD, self.first, rows, self.first_bias_EF, numerics=self.numerics)
        if self.first_adapter is not None:
            inner_RF = self.first_adapter(inner_RF, x_RD, rows)
        gated = self.first.shape[1] != self.down.shape[2]
        if self.numerics.batch_invariant:
            inner_RI = (
                invariant_gate(inner_RF, self.activation, interleaved=self.interleaved)
                if gated
                else ungated_activation(inner_RF, self.activation)
            )
        else:
            inner_RI = (
                gated_activation(inner_RF, self.activation, interleaved=self.interleaved)
                if gated
                else apply_activation(inner_RF, None, self.activation)
            )
        out_RD = grouped_quantized_linear(inner_RI, self.down, rows, self.down_bias_ED, numerics=self.numerics)
        return out_RD if self.down_adapter is None else self.down_adapter(out_RD, inner_RI, rows)

    @property
    def has_adapters(self) -> bool:
        return self.first_adapter is not None or self.down_adapter is not None


def quantized_moe(
    x: Tensor | QuantizedActivation,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    experts: QuantizedExperts,
    *,
    weigh_input: bool = False,
    exchange: ExpertExchange | None = None,
) -> Tensor:
    """As ``moe.fused_moe.moe_forward``, with quantized experts; with adapters, by grouped GEMMs."""
    is_plain = exchange is None and not weigh_input and not experts.has_adapters
    if is_plain and _can_fuse(x, experts):
        assert isinstance(experts.first, QuantizedTensor) and isinstance(experts.down, QuantizedTensor)
        rows = x if isinstance(x, QuantizedActivation) else quantize_rows_fp8(x, experts.first.format)
        return fp8_moe(rows, weights_Tk, experts_Tk, experts.first, experts.down, experts.activation)
    if is_plain and isinstance(x, Tensor) and _can_fuse_weight_only(x, experts):
        assert isinstance(experts.first, QuantizedTensor) and isinstance(experts.down, QuantizedTensor)
        return weight_only_moe(
            x,
            weights_Tk,
            experts_Tk,
            experts.first,
            experts.down,
            experts.activation,
            (experts.first_bias_EF, experts.down_bias_ED),
            interleaved=experts.interleaved,
        )
    x_TD = x.wide if isinstance(x, QuantizedActivation) else x
    assert x_TD is not None, "experts read the input before it is quantized"
    count = experts.first.shape[0] * (1 if exchange is None else exchange.world)
    is_invariant = experts.numerics.batch_invariant
    rows = sort_by_expert(experts_Tk, count) if is_invariant else sort_rows_by_group(experts_Tk, count)
    handle = None if exchange is None else exchange.open(rows)
    x_RD = dispatch(x_TD, rows)
    if weigh_input:
        x_RD = scale_rows(x_RD, weights_Tk, rows)
    out_RD = experts(x_RD, rows) if handle is None else handle(x_RD, experts)
    combine = invariant.combine_rows if is_invariant else grouped_gemm.combine_rows
    return combine(out_RD, None if weigh_input else weights_Tk, rows)


def _can_fuse(x: Tensor | QuantizedActivation, experts: QuantizedExperts) -> bool:
    """Whether the fused FP8 kernels of an engine apply."""
    first, down = experts.first, experts.down
    if (
        not (isinstance(first, QuantizedTensor) and isinstance(down, QuantizedTensor))
        or experts.numerics.batch_invariant
    ):
        return False
    biased = experts.first_bias_EF is not None or experts.down_bias_ED is not None
    rows = x.data if isinstance(x, QuantizedActivation) else x
    is_plain = is_fp8(first.format) and not (biased or experts.interleaved)
    return is_plain and use_triton_inference(rows) and has_fp8(rows.device)


def _can_fuse_weight_only(x_TD: Tensor, experts: QuantizedExperts) -> bool:
    """Whether the fused weight-only kernels of an engine apply."""
    first, down = experts.first, experts.down
    if not (isinstance(first, QuantizedTensor) and isinstance(down, QuantizedTensor)):
        return False
    is_gated = first.shape[1] == 2 * down.shape[2]
    is_plain = is_gated and not experts.numerics.batch_invariant and use_triton_inference(x_TD)
    return is_plain and all(use_weight_only(x_TD, each, experts.numerics, first.shape[0]) for each in (first, down))


def grouped_quantized_linear(
    x_RK: Tensor,
    weight: QuantizedTensor | StraightThroughWeight,
    rows: SortedRows,
    bias_EN: Tensor | None,
    *,
    numerics: Numerics,
) -> Tensor:
    """Each row times its expert's quantized weight, plus its bias; with the gradients of ``autograd``."""
    forward = partial(grouped_forward, rows=rows, numerics=numerics)
    if needs_grad(x_RK, weight):
        return apply_with_grad(forward, x_RK, weight, bias_EN, rows)
    if isinstance(weight, StraightThroughWeight):
        weight = quantize(weight.weight, weight.format, weight.segments)
    return forward(x_RK, weight, bias_EN)


def grouped_forward(
    x_RK: Tensor | QuantizedActivation,
    weight: QuantizedTensor,
    bias_EN: Tensor | None,
    *,
    rows: SortedRows,
    numerics: Numerics,
) -> Tensor:
    """``grouped_quantized_linear`` without a gradient."""
    values = x_RK.data if isinstance(x_RK, QuantizedActivation) else x_RK
    if is_fp8(weight.format) and supports_fp8_gemm(values, weight):
        x = x_RK if isinstance(x_RK, QuantizedActivation) else quantize_rows_fp8(x_RK, weight.format)
        out_RN = fp8_grouped_gemm(x, weight, rows)
        return out_RN if bias_EN is None else out_RN + bias_EN.index_select(0, rows.group_R)
    if isinstance(x_RK, Tensor) and use_weight_only(x_RK, weight, numerics, weight.shape[0]):
        return grouped_weight_only_linear(x_RK, weight, rows, bias_EN)
    rounded_RK, dtype = round_activation(x_RK, weight.format)
    weight_ENK = dequantize_fast(weight, rounded_RK.dtype)
    bias = None if bias_EN is None else bias_EN.to(rounded_RK.dtype)
    module = invariant if numerics.batch_invariant else grouped_gemm
    return module.grouped_linear(rounded_RK, weight_ENK, rows, bias).to(dtype)
