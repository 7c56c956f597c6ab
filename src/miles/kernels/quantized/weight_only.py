"""Weight-only quantized layers on a GPU: linear, gated linear, grouped linear and MoE on packed INT8, INT4 and FP4.

Shapes: T tokens, K in, N out, k experts per token, R = T * k rows, E experts, D features, I intermediate.

A single row in inference takes the GEMV, which dequantizes in float32, and a few rows of experts take the GEMM, which
rounds the weight to the input's dtype as the reference does. Beyond that, and where results must be batch-invariant,
the weight is dequantized by ``packed_weight.dequantize_weight`` and multiplied as a wide one is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.fused.activation import ActivationKind
from miles.kernels.moe.fused_moe import combine_choices
from miles.kernels.moe.grouped_gemm import SortedRows
from miles.kernels.numerics import Numerics
from miles.kernels.quantized.packed_weight import is_weight_only
from miles.kernels.quantized.weight_only_gemm import expert_gemm, weight_only_gemm
from miles.kernels.quantized.weight_only_gemv import expert_gemv, supports_gemv, weight_only_gemv
from miles.kernels.runtime.triton_compat import use_triton, use_triton_inference
from miles.precision.quantized_tensor import QuantizedTensor

__all__ = [
    "gated_weight_only_linear",
    "grouped_weight_only_linear",
    "supports_weight_only",
    "use_weight_only",
    "weight_only_linear",
    "weight_only_moe",
]


# Beyond so many rows, or rows of an expert, dequantizing the weight and multiplying with the vendor's GEMM is faster.
MAX_ROWS = 1
MAX_EXPERT_ROWS = 16


def supports_weight_only(x: Tensor, weight: QuantizedTensor) -> bool:
    """Whether the kernels apply: a GPU, 16-bit inputs, a weight-only format, contiguous packed tensors."""
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return use_triton(x) and is_half and is_weight_only(weight.format) and weight.data.is_contiguous()


def use_weight_only(x: Tensor, weight: QuantizedTensor, numerics: Numerics, experts: int = 1) -> bool:
    """Whether to take the kernels: for few rows, and where the result need not be batch-invariant."""
    rows = x.numel() // max(1, x.shape[-1])
    most = MAX_ROWS if experts == 1 else MAX_EXPERT_ROWS * experts
    return not numerics.batch_invariant and rows <= most and supports_weight_only(x, weight)


def weight_only_linear(x_TK: Tensor, weight: QuantizedTensor, bias_N: Tensor | None, *, numerics: Numerics) -> Tensor:
    """Rows times a packed weight, plus a bias; accumulated in float32 and rounded once."""
    return _linear(x_TK, weight, bias_N, None, numerics)


def gated_weight_only_linear(
    x_TK: Tensor, weight: QuantizedTensor, bias_N: Tensor | None, kind: ActivationKind, *, numerics: Numerics
) -> Tensor:
    """``weight_only_linear`` followed by ``gated_activation``."""
    return _linear(x_TK, weight, bias_N, kind, numerics)


def grouped_weight_only_linear(
    x_RK: Tensor, weight: QuantizedTensor, rows: SortedRows, bias_EN: Tensor | None = None
) -> Tensor:
    """Each row times its expert's weight, plus its bias; ``rows`` are sorted by expert."""
    return expert_gemm(x_RK, weight, bias_EN, rows.group_R)


def weight_only_moe(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    first: QuantizedTensor,
    down: QuantizedTensor,
    activation: ActivationKind,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    interleaved: bool = False,
) -> Tensor:
    """The weighted sum of each token's experts, for inference; gates and ups of ``first`` follow each other, or with
    ``interleaved`` alternate.
    """
    (tokens, per_token), width = experts_Tk.shape, down.shape[1]
    assert first.shape[1] == 2 * down.shape[2], "experts without a gate are not fused"
    if not tokens:
        return torch.empty(0, width, dtype=x_TD.dtype, device=x_TD.device)
    experts = experts_Tk.reshape(-1)
    if tokens == 1 and supports_gemv(first) and supports_gemv(down):
        inner_RI = expert_gemv(x_TD.contiguous(), first, biases[0], experts, activation, interleaved=interleaved)
        out_RD = expert_gemv(inner_RI, down, biases[1], experts)
    else:
        inner_RI = expert_gemm(
            x_TD, first, biases[0], experts, activation, per_token=per_token, interleaved=interleaved
        )
        out_RD = expert_gemm(inner_RI, down, biases[1], experts)
    return combine_choices(out_RD, weights_Tk)


def _linear(
    x_TK: Tensor, weight: QuantizedTensor, bias_N: Tensor | None, kind: ActivationKind | None, numerics: Numerics
) -> Tensor:
    rows_TK = x_TK.reshape(-1, x_TK.shape[-1])
    is_decode = len(rows_TK) == 1 and not numerics.batch_invariant and use_triton_inference(x_TK)
    if is_decode and supports_gemv(weight):
        out_TN = weight_only_gemv(rows_TK.contiguous(), weight, bias_N, kind)
    else:
        out_TN = weight_only_gemm(rows_TK, weight, bias_N, kind)
    return out_TN.view(*x_TK.shape[:-1], -1)
