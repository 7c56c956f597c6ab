"""FP8 quantization of activations in Triton, alone or fused into the norm or gate before it.

Shapes: T tokens, K features, G = K / 128 blocks of them with a scale each; I intermediate.

Results are bitwise those of ``precision.quantize.quantize_activation`` of the wide result, which is rounded to the
model's dtype first. Scales are stored transposed, [G, T], so that a GEMM loads those of a tile in one piece.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from miles.kernels.fused.activation import ActivationKind, activate_and_multiply
from miles.kernels.runtime.triton_compat import (
    device_guard,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
)
from miles.precision.formats import WeightFormat
from miles.precision.quantized_tensor import QuantizedActivation

__all__ = [
    "gated_activation_fp8",
    "has_fp8",
    "pad_tokens",
    "quantize_rows_fp8",
    "rms_norm_fp8",
    "supports_fused_quantization",
]

# The most features of a row that one program has in its registers.
_MAX_FEATURES = 16384
_FEATURES_PER_PROGRAM = 1024


def supports_fused_quantization(format: WeightFormat, features: int) -> bool:
    """Whether the kernels here write this format: E4M3 with a float32 scale for 128 values or for a row."""
    blocks = format.activation_columns in (None, 128) and format.element == "e4m3"
    return blocks and format.quantizes_activations and features <= _MAX_FEATURES


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether a GPU converts and multiplies E4M3; elsewhere weights and activations are dequantized."""
    if torch.version.hip is not None:
        return False  # MI300 has another E4M3 (fnuz)
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def quantize_rows_fp8(x_TK: Tensor, format: WeightFormat) -> QuantizedActivation:
    """``quantize_activation`` of contiguous rows."""
    x_TK = x_TK.contiguous()
    out, grid, options = _allocate(x_TK, x_TK.shape[1], format, whole_row=False)
    tensors, modes = (x_TK, x_TK, x_TK, x_TK, x_TK, out.data, out.scale), {"MODE": "", "ACTIVATION": "", "KEEP": False}
    with device_guard(x_TK):
        _quantize_kernel[grid](*tensors, x_TK.shape[1], len(x_TK), 0.0, 0.0, **modes, **options)
    return out


def gated_activation_fp8(gate_up_T2I: Tensor, kind: ActivationKind, format: WeightFormat) -> QuantizedActivation:
    """The quantized ``gated_activation`` of gates and ups side by side."""
    gate_up_T2I = gate_up_T2I.contiguous()
    size = gate_up_T2I.shape[1] // 2
    out, grid, options = _allocate(gate_up_T2I, size, format, whole_row=False)
    tensors = (gate_up_T2I, gate_up_T2I, gate_up_T2I, gate_up_T2I, gate_up_T2I, out.data, out.scale)
    modes = {"MODE": "gate", "ACTIVATION": kind, "KEEP": False}
    with device_guard(gate_up_T2I):
        _quantize_kernel[grid](*tensors, size, len(gate_up_T2I), 0.0, 0.0, **modes, **options)
    return out


def rms_norm_fp8(
    x_TK: Tensor,
    residual_TK: Tensor | None,
    weight_K: Tensor,
    eps: float,
    format: WeightFormat,
    *,
    offset: float = 0.0,
    keep: bool = False,
) -> tuple[Tensor, QuantizedActivation, Tensor | None]:
    """``x + residual``, its quantized RMS norm, and with ``keep`` the norm before it is quantized."""
    x_TK = x_TK.contiguous()
    out, grid, options = _allocate(x_TK, x_TK.shape[1], format, whole_row=True)
    sum_TK = x_TK if residual_TK is None else torch.empty_like(x_TK)
    norm_TK = torch.empty_like(x_TK) if keep else None
    residual = x_TK if residual_TK is None else residual_TK.contiguous()
    tensors = (x_TK, residual, weight_K, sum_TK, x_TK if norm_TK is None else norm_TK, out.data, out.scale)
    modes = {"MODE": "norm" if residual_TK is None else "add_norm", "ACTIVATION": "", "KEEP": keep}
    with device_guard(x_TK):
        _quantize_kernel[grid](*tensors, x_TK.shape[1], len(x_TK), eps, offset, **modes, **options)
    return sum_TK, out, norm_TK


def pad_tokens(tokens: int) -> int:
    """The rows that are allocated for so many tokens: cuBLAS needs the scales of a block of inputs aligned."""
    return -(-tokens // 16) * 16


def _allocate(
    x: Tensor, features: int, format: WeightFormat, *, whole_row: bool
) -> tuple[QuantizedActivation, tuple[int, int], dict[str, Any]]:
    """The output of a kernel, its grid, and the launch options that follow from its shape.

    A program has a ``whole_row``, or some blocks of one.
    """
    tokens, columns = len(x), format.activation_columns or features
    padded_tokens, blocks = pad_tokens(tokens), -(-features // columns)
    data_TK = torch.empty(padded_tokens, features, dtype=torch.float8_e4m3fn, device=x.device)[:tokens]
    scale_TG = torch.empty(blocks, padded_tokens, dtype=torch.float32, device=x.device).t()[:tokens]
    padded = 1 << (features - 1).bit_length()
    part = padded if whole_row or blocks == 1 else min(padded, _FEATURES_PER_PROGRAM)
    options: dict[str, Any] = {
        "K": part,
        "COLUMNS": columns if blocks > 1 else padded,
        "POWER_OF_TWO": format.power_of_two,
        "num_warps": max(1, min(16, part // 512)),
        **pdl_options(x.device),
    }
    return QuantizedActivation(data_TK, scale_TG, columns, x.dtype), (tokens, -(-features // part)), options


_jit_any_tokens = jit(do_not_specialize=["tokens"])


@_jit_any_tokens
def _quantize_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    features: tl.tensor,
    tokens: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    k_K = tl.program_id(1) * K + tl.arange(0, K)
    valid_K = k_K < features
    weight_K = valid_K
    if MODE == "norm" or MODE == "add_norm":
        weight_K = tl.load(weight_ptr + k_K, valid_K, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()
    at_K = token * features + k_K
    dtype = x_ptr.dtype.element_ty  # pyright: ignore
    if MODE == "gate":
        row = token * 2 * features
        gate_K = tl.load(x_ptr + row + k_K, valid_K, other=0.0)
        up_K = tl.load(x_ptr + row + features + k_K, valid_K, other=0.0)
        y_K = activate_and_multiply(gate_K, up_K, ACTIVATION, True).to(dtype)
    else:
        y_K = tl.load(x_ptr + at_K, valid_K, other=0.0)
        if MODE == "add_norm":
            other_K = tl.load(residual_ptr + at_K, valid_K, other=0.0)
            y_K = (y_K.to(tl.float32) + other_K.to(tl.float32)).to(dtype)
            tl.store(sum_ptr + at_K, y_K, valid_K)
        if MODE == "norm" or MODE == "add_norm":
            wide_K = y_K.to(tl.float32)
            mean = tl.sum(wide_K * wide_K, 0) / features
            y_K = (wide_K * tl.rsqrt(mean + eps) * weight_K).to(dtype)
            if KEEP:
                tl.store(norm_ptr + at_K, y_K, valid_K)
    stride = (tokens + 15) // 16 * 16
    _store_fp8(y_K.to(tl.float32), token, valid_K, out_ptr + at_K, scale_ptr, stride, K, COLUMNS, POWER_OF_TWO)


@jit
def _store_fp8(
    y_K: tl.tensor,
    token: tl.tensor,
    valid_K: tl.tensor,
    at_K: tl.tensor,
    scale_ptr: tl.tensor,
    stride: tl.tensor,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
) -> None:
    """Quantize a row and store it with its scales."""
    y_GC = tl.reshape(y_K, (K // COLUMNS, COLUMNS))
    largest_G = tl.max(tl.abs(y_GC), 1)
    scale_G = tl.div_rn(largest_G, tl.full((K // COLUMNS,), 448.0, tl.float32))
    scale_G = tl.where(scale_G == 0.0, 1.0, scale_G)
    if POWER_OF_TWO:
        # The next power of two, from the bits.
        scale_G = ((scale_G.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    # The largest quotient rounds to 448, and a value that is not finite becomes NaN.
    y_GC = tl.div_rn(y_GC, tl.broadcast_to(scale_G[:, None], (K // COLUMNS, COLUMNS)))
    tl.store(at_K, tl.reshape(y_GC, (K,)).to(tl.float8e4nv), valid_K)
    g_G = tl.program_id(1) * (K // COLUMNS) + tl.arange(0, K // COLUMNS)
    first_G = tl.max(tl.reshape(valid_K.to(tl.int32), (K // COLUMNS, COLUMNS)), 1) > 0
    tl.store(scale_ptr + g_G * stride + token, scale_G, first_G)
