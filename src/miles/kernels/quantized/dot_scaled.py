"""Microscaling matmul on tensor cores that apply the scales (Blackwell): MXFP8, MXFP4 and NVFP4 on both sides.

Shapes: T rows, K in, N out; G groups of inputs with a scale; t, n and k are a tile's rows, outputs and depth.

``tl.dot_scaled`` multiplies blocks with E8M0 or E4M3 scales natively from compute capability 10.0 on. Older GPUs would
dequantize in registers, which the weight-only kernels and the reference do better.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles.kernels.quantized.packed_weight import kernel_scale
from miles.kernels.quantized.quantize_triton import quantize_rows_mxfp8
from miles.kernels.runtime.triton_compat import (
    HAVE_TRITON,
    device_guard,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
    use_triton,
)
from miles.precision.formats import WeightFormat
from miles.precision.microscaling import nvfp4_global_scale, quantize_mxfp4, quantize_mxfp8, quantize_nvfp4
from miles.precision.quantized_tensor import QuantizedTensor

__all__ = ["MicroscaledRows", "dot_scaled_linear", "quantize_rows_microscaling", "supports_dot_scaled"]

_ROWS = 128
_OUTPUTS = 128
_DEPTH = 128


class MicroscaledRows(NamedTuple):
    """Quantized rows: E4M3 [T, K] or packed E2M1 [T, K / 2], bytes of scales [T, G], and for NVFP4 a factor [T]."""

    data: Tensor
    scale: Tensor
    factor_T: Tensor | None
    dtype: torch.dtype


def supports_dot_scaled(x: Tensor, weight: QuantizedTensor) -> bool:
    """Whether the GPU multiplies this format natively."""
    native = x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (10, 0)
    return use_triton(x) and native and weight.format.scale in ("e8m0", "e4m3") and weight.data.is_contiguous()


def quantize_rows_microscaling(x_TK: Tensor, format: WeightFormat) -> MicroscaledRows:
    """Quantize each row by itself to the element type and scales of ``format``; NVFP4 has a global scale for each."""
    if format.element == "e4m3":
        packed = quantize_rows_mxfp8(x_TK) if use_triton(x_TK) else quantize_mxfp8(x_TK)
        return MicroscaledRows(*packed, None, x_TK.dtype)
    if not format.global_scale:
        return MicroscaledRows(*quantize_mxfp4(x_TK), None, x_TK.dtype)
    factor_T1 = nvfp4_global_scale(x_TK.abs().amax(-1, keepdim=True))
    data, scale = quantize_nvfp4(x_TK, factor_T1)
    return MicroscaledRows(data, scale.view(torch.uint8), factor_T1.squeeze(-1), x_TK.dtype)


def dot_scaled_linear(x: MicroscaledRows, weight: QuantizedTensor, bias_N: Tensor | None = None) -> Tensor:
    """Quantized rows times a weight [N, K] of the same format, plus a bias; accumulated in float32, rounded once."""
    (outputs, inputs), rows = weight.shape, len(x.data)
    out_TN = torch.empty(rows, outputs, dtype=x.dtype, device=x.data.device)
    if not rows:
        return out_TN
    packs = weight.format.element == "e2m1"
    data, other = (each if packs else each.view(torch.uint8) for each in (x.data, weight.data))
    with device_guard(x.data):
        _dot_scaled_kernel[(triton.cdiv(rows, _ROWS) * triton.cdiv(outputs, _OUTPUTS),)](
            data.contiguous(),
            x.scale.contiguous(),
            x.factor_T,
            other,
            kernel_scale(weight),
            weight.global_scale,
            bias_N,
            out_TN,
            rows,
            inputs,
            outputs,
            FORMAT=weight.format.element,
            PACKED=2 if packs else 1,
            GROUP=weight.format.columns,
            GLOBAL=weight.global_scale is not None,
            BIAS=bias_N is not None,
            T=_ROWS,
            N=_OUTPUTS,
            K=_DEPTH,
            num_warps=8,
            num_stages=3,
            **pdl_options(x.data.device),
        )
    return out_TN


_jit_any_rows: Any = triton.jit(do_not_specialize=["rows"]) if HAVE_TRITON else jit


@_jit_any_rows
def _dot_scaled_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    x_factor_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    weight_scale_ptr: tl.tensor,
    weight_factor_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    GLOBAL: tl.constexpr,
    BIAS: tl.constexpr,
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Inputs past the last have bytes of zero, and E8M0 scales of zero: nothing is added."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    blocks = tl.cdiv(rows, T)
    t_T = (tl.program_id(0) % blocks) * T + tl.arange(0, T)
    n_N = (tl.program_id(0) // blocks) * N + tl.arange(0, N)
    valid_T, valid_N = t_T < rows, n_N < outputs
    c_C, g_G = tl.arange(0, K // PACKED), tl.arange(0, K // GROUP)
    stored, groups = inputs // PACKED, inputs // GROUP
    x_TC = x_ptr + t_T.to(tl.int64)[:, None] * stored + c_C[None, :]
    w_CN = weight_ptr + n_N.to(tl.int64)[None, :] * stored + c_C[:, None]
    xs_TG = x_scale_ptr + t_T.to(tl.int64)[:, None] * groups + g_G[None, :]
    ws_NG = weight_scale_ptr + n_N.to(tl.int64)[:, None] * groups + g_G[None, :]
    sum_TN = tl.zeros((T, N), tl.float32)
    for start in range(0, inputs, K):  # pyright: ignore[reportArgumentType]
        left_C, left_G = start // PACKED + c_C < stored, start // GROUP + g_G < groups
        a_TC = tl.load(x_TC + start // PACKED, valid_T[:, None] & left_C[None, :], other=0)
        b_CN = tl.load(w_CN + start // PACKED, left_C[:, None] & valid_N[None, :], other=0)
        a_TG = tl.load(xs_TG + start // GROUP, valid_T[:, None] & left_G[None, :], other=0)
        b_NG = tl.load(ws_NG + start // GROUP, valid_N[:, None] & left_G[None, :], other=0)
        if GLOBAL:
            a_TG, b_NG = a_TG.to(tl.float8e4nv, bitcast=True), b_NG.to(tl.float8e4nv, bitcast=True)
        sum_TN = tl.dot_scaled(a_TC, a_TG, FORMAT, b_CN, b_NG, FORMAT, sum_TN)
    if GLOBAL:
        sum_TN *= tl.load(x_factor_ptr + t_T, valid_T, other=0.0)[:, None] * tl.load(weight_factor_ptr)
    if BIAS:
        sum_TN += tl.load(bias_ptr + n_N, valid_N, other=0.0).to(tl.float32)[None, :]
    at_TN = out_ptr + t_T.to(tl.int64)[:, None] * outputs + n_N[None, :]
    tl.store(at_TN, sum_TN.to(out_ptr.dtype.element_ty), valid_T[:, None] & valid_N[None, :])  # pyright: ignore
