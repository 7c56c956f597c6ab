"""Products of one row with a weight, which take as long as reading the weight does.

Shapes: T = 1 row, K in, N out.

Libraries multiply by tiles of eight rows and more. With one there is nothing to save but bytes: every program takes an
output or two and asks for all their weights at once, where the card can before the row itself is ready.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.arithmetic import exact
from miles.kernels.device_code import early, gdc_launch_dependents, gdc_wait, jit, ready, tl, triton
from miles.kernels.exact import product
from miles.kernels.gated import Kind, combine
from miles.kernels.train_gated import gate

# Up to so many inputs a program asks for so many weights, all of them at once; of more inputs it has two outputs.
_SHORT, _ELEMENTS = 8192, 4096
# The most it asks for at once of one row.
_INPUTS = 16384


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
    block_k = min(_INPUTS, triton.next_power_of_2(inputs))
    # A gated product reads two rows an output.
    block_n = max(1, _ELEMENTS // block_k // (1 if kind is None else 2)) if inputs <= _SHORT else 2
    _multiply[(triton.cdiv(outputs, block_n),)](
        *(x_TK, weight_NK, weight_NK if bias_N is None else bias_N, out_TN, outputs, outputs * inputs),
        INPUTS=inputs,
        BIAS=bias_N is not None,
        KIND=kind or "",
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4 if inputs <= _SHORT else 8,
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        gdc_launch_dependents()
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    seen_N = n_N < outputs
    # Products are added place by place, and only at the end across places.
    sum_NK = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_NK = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    row_N = n_N.to(tl.int64) * INPUTS
    if EARLY:
        # Weights are on their way while the kernel before this one still works on the row.
        early_K = tl.arange(0, BLOCK_K)
        here_NK = seen_N[:, None] & (early_K < INPUTS)[None, :]
        from_NK = weight_ptr + row_N[:, None] + early_K[None, :]
        first_NK = tl.load(from_NK, here_NK, other=0.0)
        if KIND != "":
            first_up_NK = tl.load(from_NK + half, here_NK, other=0.0)
        gdc_wait()
        row_K = tl.load(x_ptr + early_K, early_K < INPUTS, other=0.0).to(tl.float32)
        sum_NK += first_NK.to(tl.float32) * row_K[None, :]
        if KIND != "":
            up_NK += first_up_NK.to(tl.float32) * row_K[None, :]
    for start in tl.range(BLOCK_K if EARLY else 0, INPUTS, BLOCK_K):
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
