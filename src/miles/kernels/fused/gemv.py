"""GEMV: a single row times a weight, at the speed of reading the weight.

Shapes: T = 1 row, K in, N out.

Libraries multiply tiles of eight rows and more. With one row only memory bandwidth counts: every program takes a few
outputs and loads all their weights at once, with PDL before the row itself is ready.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.batch_invariant import linear as invariant
from miles.kernels.fused.activation import ActivationKind, activate_and_multiply, gated_activation
from miles.kernels.numerics import Numerics
from miles.kernels.runtime.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
    use_triton_inference,
)

# A program has whole weight rows in flight: a power of two of inputs, at most this, and the remainder.
_MAX_HEAD = 16384
# Up to so many inputs a program has four outputs, beyond that two.
_FOUR_OUTPUT_INPUTS = 8192


def can_use_gemv(x_TK: Tensor, weight_NK: Tensor) -> bool:
    """Whether the GEMV kernel applies."""
    return x_TK.shape[:-1] == (1,) and use_triton_inference(x_TK) and weight_NK.is_contiguous() and x_TK.is_contiguous()


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, numerics: Numerics) -> Tensor:
    """Rows times a weight, plus a bias; accumulated in float32 and rounded once."""
    if numerics.batch_invariant:
        return invariant.linear(x_TK, weight_NK, bias_N)
    if not can_use_gemv(x_TK, weight_NK):
        return F.linear(x_TK, weight_NK, bias_N)
    return _launch(x_TK, weight_NK, bias_N, None, x_TK.dtype)


def can_fuse_gelu(x_TK: Tensor, bias_N: Tensor | None, *, numerics: Numerics) -> bool:
    """Whether ``gelu_tanh_linear`` applies: inference in half precision on an NVIDIA GPU, with a bias.

    The trainer's backward needs the input of the activation, which the epilogue does not write.
    """
    return (
        bias_N is not None
        and not numerics.batch_invariant
        and torch.is_inference_mode_enabled()
        and x_TK.is_cuda
        and torch.version.hip is None
        and x_TK.dtype in (torch.bfloat16, torch.float16)
        and x_TK.ndim == 2
    )


def gelu_tanh_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    """GELU, in its tanh approximation, of rows times a weight plus a bias: the epilogue of the GEMM, by cuBLASLt.

    Accumulated in float32 and rounded once.
    """
    return torch.ops.aten._addmm_activation(bias_N, x_TK, weight_NK.t(), use_gelu=True)


def gemv_fp32(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """One row times a weight, in float32."""
    return _launch(x_TK, weight_NK, None, None, torch.float32)


def gated_linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, kind: ActivationKind, *, numerics: Numerics
) -> Tensor:
    """``linear`` followed by ``gated_activation``."""
    if numerics.batch_invariant:
        return invariant.gated_linear(x_TK, weight_NK, bias_N, kind)
    if not can_use_gemv(x_TK, weight_NK):
        return gated_activation(F.linear(x_TK, weight_NK, bias_N), kind)
    return _launch(x_TK, weight_NK, bias_N, kind, x_TK.dtype)


def _launch(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, kind: ActivationKind | None, dtype: torch.dtype
) -> Tensor:
    inputs = x_TK.shape[1]
    outputs = len(weight_NK) if kind is None else len(weight_NK) // 2
    out_TN = torch.empty(1, outputs, dtype=dtype, device=x_TK.device)
    head = min(_MAX_HEAD, 1 << (inputs.bit_length() - 1))
    rest = inputs % head
    block_n, warps = (2, 8) if inputs > _FOUR_OUTPUT_INPUTS else (4, 4)
    tensors = (x_TK, weight_NK, weight_NK if bias_N is None else bias_N, out_TN)
    scalars = (outputs, outputs * inputs)
    _gemv_kernel[(triton.cdiv(outputs, block_n),)](
        *tensors,
        *scalars,
        INPUTS=inputs,
        BIAS=bias_N is not None,
        ACTIVATION=kind or "",
        N=block_n,
        H=head,
        R=triton.next_power_of_2(rest) if rest else 0,
        num_warps=warps,
        num_stages=1,
        **pdl_options(x_TK.device),
    )
    return out_TN


@jit
def _gemv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outputs: tl.tensor,
    up_offset: tl.tensor,
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    row_N = weight_ptr + n_N.to(tl.int64) * INPUTS
    h_H, r_R = tl.arange(0, H), INPUTS // H * H + tl.arange(0, R if R > 0 else 1)
    # Weights are loaded while the previous kernel still computes the row.
    head_NH, rest_NR = _load_weights(row_N, n_N < outputs, h_H, r_R, INPUTS, R)
    up_head_NH, up_rest_NR = head_NH, rest_NR
    if ACTIVATION != "":
        up_head_NH, up_rest_NR = _load_weights(row_N + up_offset, n_N < outputs, h_H, r_R, INPUTS, R)
    if PDL:
        gdc_wait()
    x_H = tl.load(x_ptr + h_H)
    x_R = tl.load(x_ptr + r_R, r_R < INPUTS, other=0.0)
    out_N = _dot_head_and_rest(head_NH, rest_NR, x_H, x_R, R)
    up_N = out_N
    if ACTIVATION != "":
        up_N = _dot_head_and_rest(up_head_NH, up_rest_NR, x_H, x_R, R)
    for start in range(H, INPUTS // H * H, H):
        next_H = tl.load(x_ptr + start + h_H)
        at_NH = row_N[:, None] + (start + h_H)[None, :]
        out_N += _dot(tl.load(at_NH, (n_N < outputs)[:, None], other=0.0), next_H)
        if ACTIVATION != "":
            up_N += _dot(tl.load(at_NH + up_offset, (n_N < outputs)[:, None], other=0.0), next_H)
    _store_output(out_N, up_N, n_N, bias_ptr, out_ptr, outputs, BIAS, ACTIVATION)


@jit
def _load_weights(
    row_N: tl.tensor, valid_N: tl.tensor, h_H: tl.tensor, r_R: tl.tensor, INPUTS: tl.constexpr, R: tl.constexpr
) -> Any:
    """The first weights of each row, and the remainder beyond all whole blocks."""
    head_NH = tl.load(row_N[:, None] + h_H[None, :], valid_N[:, None], other=0.0)
    rest_NR = head_NH
    if R > 0:
        rest_NR = tl.load(row_N[:, None] + r_R[None, :], valid_N[:, None] & (r_R < INPUTS)[None, :], other=0.0)
    return head_NH, rest_NR


@jit
def _dot(weight_NK: tl.tensor, x_K: tl.tensor) -> Any:
    return tl.sum(weight_NK.to(tl.float32) * x_K.to(tl.float32)[None, :], 1)


@jit
def _dot_head_and_rest(head_NH: tl.tensor, rest_NR: tl.tensor, x_H: tl.tensor, x_R: tl.tensor, R: tl.constexpr) -> Any:
    out_N = _dot(head_NH, x_H)
    if R > 0:
        out_N += _dot(rest_NR, x_R)
    return out_N


@jit
def _store_output(
    out_N: tl.tensor,
    up_N: tl.tensor,
    n_N: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outputs: tl.tensor,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    """Add the bias, apply the activation if any, round once and store."""
    out_dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    if BIAS:
        out_N += tl.load(bias_ptr + n_N, n_N < outputs, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        if BIAS:
            up_N += tl.load(bias_ptr + outputs + n_N, n_N < outputs, other=0.0).to(tl.float32)
        out_N = activate_and_multiply(out_N.to(out_dtype), up_N.to(out_dtype), ACTIVATION, True)
    tl.store(out_ptr + n_N, out_N.to(out_dtype), n_N < outputs)
