"""Products of one row with a weight, which take as long as reading the weight does.

Shapes: T = 1 row, K in, N out.

Libraries multiply by tiles of eight rows and more. With one there is nothing to save but bytes: every program takes an
output or two and asks for all their weights at once, where the card can before the row itself is ready.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.arithmetic import exact
from miles.kernels.device_code import early, gdc_launch_dependents, gdc_wait, jit, ready, tl, triton
from miles.kernels.exact import product
from miles.kernels.gated import Kind, combine
from miles.kernels.train_gated import gate

# A program has whole rows of weights under way: a power of two of inputs, this at most, and what is left.
_HEAD = 16384
# Up to so many inputs it has four outputs, of more two.
_WIDE = 8192


def alone(x_TK: Tensor, weight_NK: Tensor) -> bool:
    """Whether a product is done here."""
    return x_TK.shape[:-1] == (1,) and ready(x_TK) and weight_NK.is_contiguous() and x_TK.is_contiguous()


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Rows times a weight, plus a bias; summed in float32 and rounded once."""
    if exact():
        return product.linear(x_TK, weight_NK, bias_N)
    if not alone(x_TK, weight_NK):
        return F.linear(x_TK, weight_NK, bias_N)
    return _launch(x_TK, weight_NK, bias_N, None, x_TK.dtype)


def wide_linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """One row times a weight, in float32."""
    return _launch(x_TK, weight_NK, None, None, torch.float32)


def gated_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, kind: Kind) -> Tensor:
    """The activation of the first half of a product, times the other half."""
    if exact():
        return product.gated_linear(x_TK, weight_NK, bias_N, kind)
    if not alone(x_TK, weight_NK):
        return gate(F.linear(x_TK, weight_NK, bias_N), kind)
    return _launch(x_TK, weight_NK, bias_N, kind, x_TK.dtype)


def _launch(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, kind: Kind | None, dtype: torch.dtype) -> Tensor:
    inputs = x_TK.shape[1]
    outputs = len(weight_NK) if kind is None else len(weight_NK) // 2
    out_TN = torch.empty(1, outputs, dtype=dtype, device=x_TK.device)
    head = min(_HEAD, 1 << (inputs.bit_length() - 1))
    rest = inputs % head
    block_n, warps = (2, 8) if inputs > _WIDE else (4, 4)
    _multiply[(triton.cdiv(outputs, block_n),)](
        *(x_TK, weight_NK, weight_NK if bias_N is None else bias_N, out_TN, outputs, outputs * inputs),
        INPUTS=inputs,
        BIAS=bias_N is not None,
        KIND=kind or "",
        N=block_n,
        H=head,
        R=triton.next_power_of_2(rest) if rest else 0,
        num_warps=warps,
        num_stages=1,
        **early(x_TK.device),
    )
    return out_TN


@jit
def _multiply(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outputs: tl.tensor,
    half: tl.tensor,
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        gdc_launch_dependents()
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    row_N = weight_ptr + n_N.to(tl.int64) * INPUTS
    h_H, r_R = tl.arange(0, H), INPUTS // H * H + tl.arange(0, R if R > 0 else 1)
    # Weights are on their way while the kernel before this one still works on the row.
    head_NH, rest_NR = _ask(row_N, n_N < outputs, h_H, r_R, INPUTS, R)
    up_head_NH, up_rest_NR = head_NH, rest_NR
    if KIND != "":
        up_head_NH, up_rest_NR = _ask(row_N + half, n_N < outputs, h_H, r_R, INPUTS, R)
    if EARLY:
        gdc_wait()
    x_H = tl.load(x_ptr + h_H)
    x_R = tl.load(x_ptr + r_R, r_R < INPUTS, other=0.0)
    out_N = _times(head_NH, rest_NR, x_H, x_R, R)
    up_N = out_N
    if KIND != "":
        up_N = _times(up_head_NH, up_rest_NR, x_H, x_R, R)
    for start in range(H, INPUTS // H * H, H):
        next_H = tl.load(x_ptr + start + h_H)
        at_NH = row_N[:, None] + (start + h_H)[None, :]
        out_N += _dot(tl.load(at_NH, (n_N < outputs)[:, None], other=0.0), next_H)
        if KIND != "":
            up_N += _dot(tl.load(at_NH + half, (n_N < outputs)[:, None], other=0.0), next_H)
    _finish(out_N, up_N, n_N, bias_ptr, out_ptr, outputs, BIAS, KIND)


@jit
def _ask(
    row_N: tl.tensor, seen_N: tl.tensor, h_H: tl.tensor, r_R: tl.tensor, INPUTS: tl.constexpr, R: tl.constexpr
) -> Any:
    """The first weights of each row, and those that are left behind all whole blocks."""
    head_NH = tl.load(row_N[:, None] + h_H[None, :], seen_N[:, None], other=0.0)
    rest_NR = head_NH
    if R > 0:
        rest_NR = tl.load(row_N[:, None] + r_R[None, :], seen_N[:, None] & (r_R < INPUTS)[None, :], other=0.0)
    return head_NH, rest_NR


@jit
def _dot(weight_NK: tl.tensor, x_K: tl.tensor) -> Any:
    return tl.sum(weight_NK.to(tl.float32) * x_K.to(tl.float32)[None, :], 1)


@jit
def _times(head_NH: tl.tensor, rest_NR: tl.tensor, x_H: tl.tensor, x_R: tl.tensor, R: tl.constexpr) -> Any:
    out_N = _dot(head_NH, x_H)
    if R > 0:
        out_N += _dot(rest_NR, x_R)
    return out_N


@jit
def _finish(
    out_N: tl.tensor,
    up_N: tl.tensor,
    n_N: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outputs: tl.tensor,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    """Add the bias, gate where there is a gate, round once and write."""
    kept = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    if BIAS:
        out_N += tl.load(bias_ptr + n_N, n_N < outputs, other=0.0).to(tl.float32)
    if KIND != "":
        if BIAS:
            up_N += tl.load(bias_ptr + outputs + n_N, n_N < outputs, other=0.0).to(tl.float32)
        out_N = combine(out_N.to(kept), up_N.to(kept), KIND, True)
    tl.store(out_ptr + n_N, out_N.to(kept), n_N < outputs)
