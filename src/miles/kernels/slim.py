"""Products of one row with a weight, which take as long as reading the weight does.

Shapes: T = 1 row, K in, N out.

Libraries multiply by tiles of eight rows and more. With one there is nothing to save but bytes: every program takes
some outputs and reads their weights once, in as large steps as a card's memory likes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.device_code import jit, ready, tl, triton
from miles.kernels.gated import Kind, combine, gated

# Weights' rows a program reads side by side, and how much of each at once: all of it is under way together.
_OUTPUTS, _INPUTS = 2, 2048


def alone(x_TK: Tensor, weight_NK: Tensor) -> bool:
    """Whether a product is done here."""
    return x_TK.shape[:-1] == (1,) and ready(x_TK) and weight_NK.is_contiguous() and x_TK.is_contiguous()


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Rows times a weight, plus a bias; summed in float32 and rounded once."""
    if not alone(x_TK, weight_NK):
        return F.linear(x_TK, weight_NK, bias_N)
    return _launch(x_TK, weight_NK, bias_N, None, x_TK.dtype)


def wide_linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """One row times a weight, in float32."""
    return _launch(x_TK, weight_NK, None, None, torch.float32)


def gated_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, kind: Kind) -> Tensor:
    """The activation of the first half of a product, times the other half."""
    if not alone(x_TK, weight_NK):
        return gated(F.linear(x_TK, weight_NK, bias_N), kind)
    return _launch(x_TK, weight_NK, bias_N, kind, x_TK.dtype)


def _launch(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, kind: Kind | None, dtype: torch.dtype) -> Tensor:
    inputs = x_TK.shape[1]
    outputs = len(weight_NK) if kind is None else len(weight_NK) // 2
    out_TN = torch.empty(1, outputs, dtype=dtype, device=x_TK.device)
    # A gated product reads two rows an output.
    block_n = _OUTPUTS if kind is None else _OUTPUTS // 2
    block_k = min(_INPUTS, triton.next_power_of_2(inputs))
    _multiply[(triton.cdiv(outputs, block_n),)](
        *(x_TK, weight_NK, weight_NK if bias_N is None else bias_N, out_TN, outputs),
        INPUTS=inputs,
        BIAS=bias_N is not None,
        KIND=kind or "",
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=1,
    )
    return out_TN


@jit
def _multiply(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outputs: tl.tensor,
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    seen_N = n_N < outputs
    # Products are added place by place, and only at the end across places.
    sum_NK = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_NK = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    row_N = n_N.to(tl.int64) * INPUTS
    half = outputs.to(tl.int64) * INPUTS
    for start in tl.range(0, INPUTS, BLOCK_K):
        k_K = start + tl.arange(0, BLOCK_K)
        seen_NK = seen_N[:, None] & (k_K < INPUTS)[None, :] if INPUTS % BLOCK_K != 0 else seen_N[:, None]
        at_NK = weight_ptr + row_N[:, None] + k_K[None, :]
        x_K = tl.load(x_ptr + k_K, k_K < INPUTS, other=0.0).to(tl.float32)
        sum_NK += tl.load(at_NK, seen_NK, other=0.0).to(tl.float32) * x_K[None, :]
        if KIND != "":
            up_NK += tl.load(at_NK + half, seen_NK, other=0.0).to(tl.float32) * x_K[None, :]
    out_N = tl.sum(sum_NK, 1)
    if BIAS:
        out_N += tl.load(bias_ptr + n_N, seen_N, other=0.0).to(tl.float32)
    if KIND != "":
        up_N = tl.sum(up_NK, 1)
        if BIAS:
            up_N += tl.load(bias_ptr + outputs + n_N, seen_N, other=0.0).to(tl.float32)
        kept = out_ptr.dtype.element_ty
        out_N = combine(out_N.to(kept), up_N.to(kept), KIND, True)
    tl.store(out_ptr + n_N, out_N.to(out_ptr.dtype.element_ty), seen_N)
